"""World sheets: the hidden facts of an episode, kept current, shown in prompts and recovered from traces.

A sheet lists what was true at the start. During an episode every prediction declares which facts end and
which begin, and `WorldSheet.after` applies them, so the model never has to derive the present from a long
history. Prompts show only the facts that the action touches, because small models copy well from nearby text.

The text of an action is untrusted, and so is a reply to it. A reply may end only facts that the sheet holds,
and begin only facts about names that the sheet or the environment's own texts have, never about names that
only the action mentions (`violation`).

Environments that do not disclose their facts get a sheet in hindsight (`hindsight_sheet`): whatever a later
state showed was true from the start, unless an action of the agent made it so. `SheetSampler` makes new
sheets from known ones.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from random import Random
from typing import TYPE_CHECKING, TypeAlias

from dreamgym.types import Change, Fact, State, Task, Trajectory, Transition, WorldSheet

if TYPE_CHECKING:
    from dreamgym.experience.recorded_rules import RecordedRules

MAX_FACTS = 300
"""In one prompt."""
INSIDE = "inreceptacle"
"""The predicate of an object and its place."""
_ATTEMPTS = 200
"""Recombined sheets, of which the first on which a task can succeed is used."""
TaskCheck: TypeAlias = Callable[[Task, WorldSheet], bool]
"""Whether a task is done, or can be done, on these facts."""
Said: TypeAlias = tuple[str, str]
"""A text of the environment, and the action that it answers (empty for none)."""
_MAX_CHANGES = 200
_NUMBERED = re.compile(r"(?P<kind>.*) (?P<number>[0-9]{1,9})", re.S)


def violation(
    change: Change,
    sheet: WorldSheet,
    action: str,
    *,
    texts: Sequence[Said] = (),
    rules: RecordedRules | None = None,
    success: bool = False,
) -> str | None:
    """Why a reply's change contradicts what is known; None if it does not. Without facts nothing is known.

    Args:
        texts: the environment's own. A name in the action that a text answers is not known from it: the
            answer may repeat it.
        success: the reply claims success.

    >>> sheet = WorldSheet(facts=(("closed", "safe 1"),))
    >>> violation(Change(ended=(("in", "meal", "player"),)), sheet, "eat meal in player")
    "it ends 'in meal player', which does not hold"
    >>> violation(Change(begun=(("consumed", "meal"),)), sheet, "eat meal")
    "it begins 'consumed meal', but only the action names 'meal'"
    """
    if not sheet.facts:
        return None
    if len(change.ended) + len(change.begun) > _MAX_CHANGES:
        return f"it changes more than {_MAX_CHANGES} facts"
    held = set(sheet.facts)
    for fact in change.ended:
        if fact not in held:
            return f"it ends {' '.join(fact)!r}, which does not hold"
    known = names_of(sheet.facts) | (rules.new_names if rules else frozenset())
    predicates = {fact[0] for fact in sheet.facts}
    for fact in change.begun:
        if fact[0] not in predicates and len(fact[0].split()) != 1:
            return f"it begins {' '.join(fact)!r}: a new predicate has one word"
        for name in fact[1:]:
            if name not in known and not _told(name, texts):
                named = "only the action names" if _mentions(action, name) else "nothing is known of"
                return f"it begins {' '.join(fact)!r}, but {named} {name!r}"
    return rules.violation(sheet, action, change, success=success) if rules is not None else None


def environment_texts(task: Task, history: Sequence[Transition], state: str) -> list[Said]:
    """The texts of an episode, each with the action that it answers."""
    answered = [(past.outcome.next_state.text, past.action) for past in history]
    before = history[0].state.text if history else state
    return [(task.instruction, ""), (before, ""), *answered]


def _told(name: str, texts: Sequence[Said]) -> bool:
    return any(_mentions(text, name) and not _mentions(action, name) for text, action in texts)


def names_of(facts: Iterable[Fact]) -> frozenset[str]:
    return frozenset(name for fact in facts for name in fact[1:])


def relevant_facts(sheet: WorldSheet, action: str, *, actor: str | None = None) -> tuple[Fact, ...]:
    """The facts about the names in an action, the actor, and everything at the actor's place."""
    wanted = {name for name in names_of(sheet.facts) if _mentions(action, name)}
    if actor is not None:
        wanted.add(actor)
        wanted.update(
            fact[2]
            for fact in sheet.facts
            if len(fact) == 3 and fact[1] == actor and fact[0].startswith("at")
        )
    return tuple(fact for fact in sheet.facts if wanted.intersection(fact[1:]))


def fact_lines(facts: Iterable[Fact], *, order: Sequence[str] = ()) -> list[str]:
    """Facts as short lines, grouped by subject; subjects in `order` come last, nearest to the reply.

    >>> fact_lines([("in", "apple 1", "fridge 1"), ("in", "egg 2", "fridge 1"), ("openable", "fridge 1")])
    ['fridge 1: openable', 'in fridge 1: apple 1, egg 2']
    """
    properties: dict[str, list[str]] = {}
    relations: dict[tuple[str, str], list[str]] = {}
    for fact in facts:
        predicate, *arguments = fact
        if len(arguments) == 1:
            properties.setdefault(arguments[0], []).append(predicate)
        elif arguments:
            relations.setdefault((predicate, arguments[-1]), []).append(" ".join(arguments[:-1]))
    lines = [(name, f"{name}: {', '.join(sorted(words))}") for name, words in properties.items()]
    lines += [
        (place, f"{predicate} {place}: {', '.join(sorted(names, key=_by_kind))}")
        for (predicate, place), names in relations.items()
    ]
    rank = {name: number for number, name in enumerate(order, 1)}
    lines.sort(key=lambda line: (rank.get(line[0], 0), line[0], line[1]))
    return [text for _, text in lines]


def visible_names(sheet: WorldSheet) -> list[str]:
    """The names of each relation whose place is not inside something else: what an episode shows at its
    start.

    >>> desks = (("at", "desk 1", "loc 2"), ("at", "desk 2", "loc 1"))
    >>> visible_names(WorldSheet(facts=(*desks, ("in", "mug 1", "desk 1"))))
    ['at: desk 2, desk 1']
    """
    relations = [fact for fact in sheet.facts if len(fact) > 2]
    placed = {fact[1] for fact in relations}
    found: dict[str, set[str]] = {}
    for predicate, name, place, *_ in relations:
        if place not in placed:
            found.setdefault(predicate, set()).add(name)
    return [
        f"{predicate}: {', '.join(sorted(names, key=_by_kind))}" for predicate, names in sorted(found.items())
    ]


def object_kinds(sheet: WorldSheet) -> list[str]:
    """The kinds of the objects in relations: their names without numbers.

    >>> facts = (("in", "mug 2", "desk 1"), ("in", "mug 1", "desk 1"), ("closed", "safe 1"))
    >>> object_kinds(WorldSheet(facts=facts))
    ['desk', 'mug']
    """
    return sorted({kind_of(name) for fact in sheet.facts if len(fact) > 2 for name in fact[1:]})


def kind_of(name: str) -> str:
    """The name of an object without its number. Only ASCII digits are a number.

    >>> kind_of("mug 2"), kind_of("lantern"), kind_of("mug ²")
    ('mug', 'lantern', 'mug ²')
    """
    found = _NUMBERED.fullmatch(name)
    return found["kind"] if found else name


def _by_kind(name: str) -> tuple[str, int]:
    """Sorts kinds alphabetically and numbers downwards, as the household engine does."""
    found = _NUMBERED.fullmatch(name)
    return (found["kind"], -int(found["number"])) if found else (name, 0)


def _mentions(action: str, name: str) -> bool:
    start = action.find(name) if name else -1
    while start >= 0:
        end = start + len(name)
        before, after = action[start - 1 : start], action[end : end + 1]
        if not before.isalnum() and not after.isalnum():
            return True
        start = action.find(name, start + 1)
    return False


FactPatterns: TypeAlias = tuple[tuple[str, re.Pattern[str]], ...]
"""Predicates, and the pattern of a text that states one: its groups are the arguments."""
_NAME = r"(\w+ \d+)"


def _patterns(*pairs: tuple[str, str]) -> FactPatterns:
    return tuple((predicate, re.compile(text.replace("NAME", _NAME))) for predicate, text in pairs)


_SHOWN = _patterns(
    ("openable", "The NAME is (?:open|closed)"),
    ("opened", "The NAME is open"),
    ("pickupable", "You pick up the NAME"),
    ("openable", "You (?:open|close) the NAME"),
    ("toggleable", "You turn on the NAME"),
    ("cleanable", "You clean the NAME using"),
    ("heatable", "You heat the NAME using"),
    ("coolable", "You cool the NAME using"),
)
_ENDED = _patterns((INSIDE, "You pick up the NAME from the NAME"), ("opened", "You close the NAME"))
_BEGUN = _patterns(
    (INSIDE, "You (?:move|put) the NAME (?:to|in/on) the NAME"), ("opened", "You open the NAME")
)


_LISTING = re.compile(
    r"(?:(?:On|In) the (?P<on>\w+ \d+)|The (?P<inside>\w+ \d+) is open\. In it), you see (?P<things>[^.]+)\."
)
_OBJECT = re.compile(rf"\ban? {_NAME}")


def shown_in(state: State) -> Iterator[Fact]:
    """The facts that a state shows, by the phrases of household text games."""
    for found in _LISTING.finditer(state.text):
        for name in _OBJECT.findall(found["things"]):
            yield (INSIDE, name, found["on"] or found["inside"])
    yield from _read(_SHOWN, state)


def changed_in(state: State) -> Change:
    """The facts that the action before this state ended and began, by the same phrases."""
    return Change(ended=tuple(_read(_ENDED, state)), begun=tuple(_read(_BEGUN, state)))


def _read(patterns: FactPatterns, state: State) -> Iterator[Fact]:
    for predicate, pattern in patterns:
        for found in pattern.finditer(state.text):
            yield (predicate, *found.groups())


def hindsight_sheet(trajectory: Trajectory) -> WorldSheet:
    """The facts that a trajectory proves to have been true at its start, sorted; correct where only the
    agent changes facts and every change is recognised."""
    first: set[Fact] = set(shown_in(trajectory.start))
    changed: set[Fact] = set()

    def add_unchanged(facts: Iterable[Fact]) -> None:
        first.update(fact for fact in facts if fact not in changed)

    for transition in trajectory.transitions:
        state = transition.outcome.next_state
        change = changed_in(state)
        add_unchanged(change.ended)  # a fact that could end was true before
        changed.update(change.ended, change.begun)
        add_unchanged(shown_in(state))
    return WorldSheet(facts=tuple(sorted(first)))


def with_sheet(trajectory: Trajectory) -> Trajectory:
    """The trajectory with a world sheet: its own, or one in hindsight."""
    if trajectory.sheet is not None:
        return trajectory
    return replace(trajectory, sheet=hindsight_sheet(trajectory))


def layout_of(sheet: WorldSheet) -> frozenset[Fact]:
    """The facts about nothing that lies inside something: equal for all sheets of one room."""
    objects = _placed(sheet)
    return frozenset(fact for fact in sheet.facts if not objects.intersection(fact[1:]))


class SheetSampler:
    """New sheets from known ones: an object is placed where one of its kind was in a sheet of that layout."""

    def __init__(self, sheets: Iterable[WorldSheet]) -> None:
        self._sheets = tuple(sheets)
        if not self._sheets:
            raise ValueError("expected at least one sheet to recombine, got none")
        self._layouts = [layout_of(sheet) for sheet in self._sheets]
        known: dict[frozenset[Fact], list[WorldSheet]] = {}
        for layout, sheet in zip(self._layouts, self._sheets, strict=True):
            known.setdefault(layout, []).append(sheet)
        self._places = {layout: _places(sheets) for layout, sheets in known.items()}

    def recombine(self, rng: Random, *, share: float = 0.5) -> WorldSheet:
        """One of the sheets; each object is placed anew with the probability `share`."""
        chosen = rng.randrange(len(self._sheets))
        places = self._places[self._layouts[chosen]]

        def moved(fact: Fact) -> Fact:
            choices = places.get(kind_of(fact[1])) if fact[0] == INSIDE else None
            if not choices or rng.random() >= share:
                return fact
            return (INSIDE, fact[1], rng.choice(choices))

        return WorldSheet(facts=tuple(moved(fact) for fact in self._sheets[chosen].facts))

    def sample(self, task: Task, rng: Random, can_succeed: TaskCheck) -> WorldSheet | None:
        """A new sheet on which the task can succeed; None if no attempt gave one."""
        candidates = (self.recombine(rng) for _ in range(_ATTEMPTS))
        return next((sheet for sheet in candidates if can_succeed(task, sheet)), None)


def _places(sheets: Sequence[WorldSheet]) -> dict[str, list[str]]:
    """The places of each kind of object; never another object, or two could contain each other."""
    found: dict[str, set[str]] = {}
    for sheet in sheets:
        objects = _placed(sheet)
        for fact in sheet.facts:
            if fact[0] == INSIDE and fact[2] not in objects:
                found.setdefault(kind_of(fact[1]), set()).add(fact[2])
    return {kind: sorted(places) for kind, places in found.items()}


def _placed(sheet: WorldSheet) -> set[str]:
    return {fact[1] for fact in sheet.facts if fact[0] == INSIDE}
