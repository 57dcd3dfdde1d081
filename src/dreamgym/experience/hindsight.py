"""A world sheet in hindsight, for environments that cannot tell their hidden facts.

Whatever a later state showed was true from the start, unless an action of the agent made it so. A reader
turns each state's text into the facts it shows and those an action began or ended; the rest is bookkeeping.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import TypeAlias

from dreamgym.types import Change, Fact, State, Trajectory, WorldSheet

Wordings: TypeAlias = tuple[tuple[str, re.Pattern[str]], ...]
"""A predicate, and how a text says it: the pattern's groups are the arguments."""

_NAME = r"(\w+ \d+)"


def _says(*pairs: tuple[str, str]) -> Wordings:
    return tuple((predicate, re.compile(text.replace("NAME", _NAME))) for predicate, text in pairs)


_SHOWN = _says(
    ("openable", "The NAME is (?:open|closed)"),
    ("opened", "The NAME is open"),
    ("pickupable", "You pick up the NAME"),
    ("openable", "You (?:open|close) the NAME"),
    ("toggleable", "You turn on the NAME"),
    ("cleanable", "You clean the NAME using"),
    ("heatable", "You heat the NAME using"),
    ("coolable", "You cool the NAME using"),
)
_ENDED = _says(
    ("inreceptacle", "You pick up the NAME from the NAME"),
    ("opened", "You close the NAME"),
)
_BEGUN = _says(
    ("inreceptacle", "You (?:move|put) the NAME (?:to|in/on) the NAME"),
    ("opened", "You open the NAME"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reader:
    """How an environment's states are read. The default knows the listings of household text games."""

    within: str = "inreceptacle"
    """The predicate of a thing and its place."""
    listing: re.Pattern[str] = re.compile(
        r"(?:(?:On|In) the (?P<on>\w+ \d+)|The (?P<inside>\w+ \d+) is open\. In it), "
        r"you see (?P<things>[^.]+)\."
    )
    thing: re.Pattern[str] = re.compile(rf"\ban? {_NAME}")
    shown: Wordings = _SHOWN
    ended: Wordings = _ENDED
    begun: Wordings = _BEGUN

    def facts(self, state: State) -> Iterator[Fact]:
        """What a state shows."""
        for found in self.listing.finditer(state.text):
            place = found["on"] or found["inside"]
            for thing in self.thing.findall(found["things"]):
                yield (self.within, thing, place)
        yield from _read(self.shown, state)

    def change(self, state: State) -> Change:
        """What the action that led to this state altered."""
        return Change(ended=tuple(_read(self.ended, state)), begun=tuple(_read(self.begun, state)))


def hindsight_sheet(trajectory: Trajectory, reader: Reader | None = None) -> WorldSheet:
    """The facts that a trajectory proves to have been true at its start, sorted.

    Holds wherever only the agent changes the world, and the reader sees every change it makes.
    """
    reader = reader or Reader()
    first: set[Fact] = set(reader.facts(trajectory.start))
    altered: set[Fact] = set()

    def unless_altered(facts: Iterable[Fact]) -> None:
        first.update(fact for fact in facts if fact not in altered)

    for transition in trajectory.transitions:
        state = transition.outcome.next_state
        change = reader.change(state)
        unless_altered(change.ended)  # what could end had been so
        altered.update(change.ended, change.begun)
        unless_altered(reader.facts(state))
    return WorldSheet(facts=tuple(sorted(first)))


def with_sheet(trajectory: Trajectory) -> Trajectory:
    """As it is where it holds a world sheet, else with one in hindsight.

    Teaching, measuring and playing all begin from this one.
    """
    if trajectory.sheet is not None:
        return trajectory
    return replace(trajectory, sheet=hindsight_sheet(trajectory))


def _read(wordings: Wordings, state: State) -> Iterator[Fact]:
    for predicate, pattern in wordings:
        for found in pattern.finditer(state.text):
            yield (predicate, *found.groups())
