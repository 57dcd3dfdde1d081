"""New worlds out of known ones: sheets recombined within their room, and drawn until a task can succeed.

What stays put makes a room: sheets that agree on every fact about unmoved things show the same one. A thing
may lie wherever a thing of its kind once lay in that room, so a new sheet holds nothing that no real one did.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from random import Random
from typing import Protocol

from dreamgym.types import Fact, Task, WorldSheet

WITHIN = "inreceptacle"


class CanSucceed(Protocol):
    """Whether a task can be carried out, and still is to be, in the world of a sheet."""

    def __call__(self, task: Task, sheet: WorldSheet) -> bool: ...


def room_of(sheet: WorldSheet, *, within: str = WITHIN) -> frozenset[Fact]:
    """What is the same in all sheets of one room: the facts about nothing that lies somewhere."""
    things = _things(sheet, within)
    return frozenset(fact for fact in sheet.facts if not things.intersection(fact[1:]))


class Worlds:
    """Known sheets, sorted by room once, to make new ones from."""

    def __init__(self, sheets: Iterable[WorldSheet], *, within: str = WITHIN) -> None:
        self._within = within
        self._sheets = tuple(sheets)
        if not self._sheets:
            raise ValueError("expected at least one sheet to recombine, got none")
        self._rooms = [room_of(sheet, within=within) for sheet in self._sheets]
        rooms: dict[frozenset[Fact], list[WorldSheet]] = {}
        for room, sheet in zip(self._rooms, self._sheets, strict=True):
            rooms.setdefault(room, []).append(sheet)
        self._places = {room: _places(known, within) for room, known in rooms.items()}

    def recombine(self, rng: Random, *, share: float = 0.5) -> WorldSheet:
        """One of the sheets with some of its things elsewhere.

        Args:
            share: how many of the things are laid anew; each goes to a place that held one of its kind in
                some sheet of the same room, which may be where it was.
        """
        chosen = rng.randrange(len(self._sheets))
        places = self._places[self._rooms[chosen]]

        def laid(fact: Fact) -> Fact:
            choices = places.get(_kind(fact[1])) if fact[0] == self._within else None
            if not choices or rng.random() >= share:
                return fact
            return (self._within, fact[1], rng.choice(choices))

        return WorldSheet(facts=tuple(laid(fact) for fact in self._sheets[chosen].facts))

    def draw(
        self, task: Task, rng: Random, can_succeed: CanSucceed, *, share: float = 0.5, attempts: int = 200
    ) -> WorldSheet | None:
        """A new sheet on which a task can succeed; None where no attempt gave one."""
        made = (self.recombine(rng, share=share) for _ in range(attempts))
        return next((sheet for sheet in made if can_succeed(task, sheet)), None)


def recombine(sheets: Iterable[WorldSheet], rng: Random, *, share: float = 0.5) -> WorldSheet:
    """One new world; whoever wants many keeps a `Worlds`."""
    return Worlds(sheets).recombine(rng, share=share)


def _places(sheets: Sequence[WorldSheet], within: str) -> dict[str, list[str]]:
    """Where each kind of thing lay; never in another thing, or two could end up inside each other."""
    found: dict[str, set[str]] = {}
    for sheet in sheets:
        things = _things(sheet, within)
        for fact in sheet.facts:
            if fact[0] == within and fact[2] not in things:
                found.setdefault(_kind(fact[1]), set()).add(fact[2])
    return {kind: sorted(places) for kind, places in found.items()}


def _things(sheet: WorldSheet, within: str) -> set[str]:
    return {fact[1] for fact in sheet.facts if fact[0] == within}


def _kind(name: str) -> str:
    """
    >>> _kind("mug 2"), _kind("lantern")
    ('mug', 'lantern')
    """
    kind, _, number = name.rpartition(" ")
    return kind if number.isdigit() else name
