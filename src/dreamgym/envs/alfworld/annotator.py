"""Annotates ALFWorld transitions by rules from the environment's facts, without a language model.

The rules state what each action requires, what it changes, and when a task is done. An experience model is
fine-tuned to write these notes as its reasoning.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from dreamgym.envs.alfworld.goals import PROPERTY, kind_of
from dreamgym.types import Annotation, Change, Fact, Note, Task, Trajectory, Transition

AGENT = "agent1"
REFUSAL = "Nothing happens."

_ACTIONS = (
    ("go", re.compile(r"^go to (?P<r>.+)$")),
    ("open", re.compile(r"^open (?P<r>.+)$")),
    ("close", re.compile(r"^close (?P<r>.+)$")),
    ("take", re.compile(r"^take (?P<o>.+) from (?P<r>.+)$")),
    ("move", re.compile(r"^(?:move|put) (?P<o>.+) (?:to|in/on) (?P<r>.+)$")),
    ("heat", re.compile(r"^heat (?P<o>.+) with (?P<r>.+)$")),
    ("cool", re.compile(r"^cool (?P<o>.+) with (?P<r>.+)$")),
    ("clean", re.compile(r"^clean (?P<o>.+) with (?P<r>.+)$")),
    ("slice", re.compile(r"^slice (?P<o>.+) with (?P<k>.+)$")),
    ("use", re.compile(r"^use (?P<o>.+)$")),
    ("examine", re.compile(r"^examine (?P<x>.+)$")),
    ("look", re.compile(r"^look$")),
    ("inventory", re.compile(r"^inventory$")),
    ("help", re.compile(r"^help$")),
)
_MAY_FINISH = ("move", "use", "take")
_MADE = {"heat": ("ishot", "iscool"), "cool": ("iscool", "ishot"), "clean": ("isclean", None)}
_MADE_WITH = {
    "heat": ("microwave", "heatable"),
    "cool": ("fridge", "coolable"),
    "clean": ("sinkbasin", "cleanable"),
}
"""The kind of receptacle needed, and the fact that marks a suitable object."""


@dataclass(frozen=True, slots=True)
class _FactSet:
    """Lookups in a set of facts."""

    facts: frozenset[Fact]

    def location(self) -> str:
        return next((fact[2] for fact in self.facts if fact[:2] == ("atlocation", AGENT)), "nowhere")

    def place_of(self, receptacle: str) -> str | None:
        return next((f[2] for f in self.facts if f[:2] == ("receptacleatlocation", receptacle)), None)

    def held(self) -> str | None:
        return next((fact[2] for fact in self.facts if fact[:2] == ("holds", AGENT)), None)

    def has(self, *fact: str) -> bool:
        return fact in self.facts

    def closed(self, receptacle: str) -> bool:
        return self.has("openable", receptacle) and not self.has("opened", receptacle)


class HouseholdAnnotator:
    """Annotates by rules."""

    name = "alfworld-rules"

    async def annotate(self, trajectory: Trajectory) -> Annotation:
        if trajectory.sheet is None:
            raise ValueError(f"trajectory {trajectory.id!r} has no world sheet to explain it from")
        facts = set(trajectory.sheet.facts)
        notes = []
        goal = _goal(trajectory.task)
        for transition in trajectory.transitions:
            note = explain(_FactSet(frozenset(facts)), transition, goal)
            facts.difference_update(note.change.ended)
            facts.update(note.change.begun)
            notes.append(note)
        return Annotation(
            plan=f"find what is needed, then {trajectory.task.instruction}",
            success_mode=f"the task ends when this holds: {trajectory.task.instruction}",
            failure_mode=f"the {goal.get('object_target', 'object')} is never brought where it belongs",
            notes=tuple(notes),
        )


def explain(known: _FactSet, transition: Transition, goal: Mapping[str, str]) -> Note:
    kind, words = _parse(transition.action)
    checked: list[str] = []
    for check, met in _checks(known, kind, words):
        checked.append(check)
        if not met:
            break
    reasoning = " ".join(checked)
    if transition.outcome.next_state.text == REFUSAL:
        return Note(reasoning=f"{reasoning} not possible.".lstrip())
    reasoning += _goal_check(known, kind, words, goal)
    if transition.outcome.success:
        reasoning += " the task is done."
    elif kind in _MAY_FINISH:
        reasoning += " the task is not done yet."
    return Note(reasoning=reasoning, change=_change(known, kind, words))


def _parse(action: str) -> tuple[str, Mapping[str, str]]:
    for kind, pattern in _ACTIONS:
        found = pattern.match(action.strip())
        if found:
            return kind, found.groupdict()
    return "unknown", {}


def _change(known: _FactSet, kind: str, words: Mapping[str, str]) -> Change:
    thing, place = words.get("o", ""), words.get("r", "")
    if kind == "go":
        target = known.place_of(place) or known.location()
        if target == known.location():
            return Change()
        return Change(
            ended=(("atlocation", AGENT, known.location()),), begun=(("atlocation", AGENT, target),)
        )
    if kind == "open":
        return Change(begun=(("opened", place),))
    if kind == "close":
        return Change(ended=(("opened", place),))
    if kind == "take":
        return Change(ended=(("inreceptacle", thing, place),), begun=(("holds", AGENT, thing),))
    if kind == "move":
        return Change(ended=(("holds", AGENT, thing),), begun=(("inreceptacle", thing, place),))
    if kind in _MADE:
        made, undone = _MADE[kind]
        ended = ((undone, thing),) if undone and known.has(undone, thing) else ()
        return Change(ended=ended, begun=((made, thing),) if not known.has(made, thing) else ())
    if kind == "slice":
        return Change(begun=(("issliced", thing),))
    if kind == "use":
        return Change(begun=(("istoggled", thing),) if not known.has("istoggled", thing) else ())
    return Change()


def _checks(known: _FactSet, kind: str, words: Mapping[str, str]) -> Iterator[tuple[str, bool]]:
    """The conditions of an action in order, as text with the actual value, each with whether it is met.

    Both values are written before the verdict: small models copy well and compare adjacent values. Without
    this they accept an action whose preparation is missing.
    """
    thing, place = words.get("o", ""), words.get("r", "")
    if kind == "go":
        there, here = known.place_of(place), known.location()
        away = there not in (None, here)
        yield f"{place} at {there or 'no place'}, agent at {here}, elsewhere: {_yes(away)}.", away
        yield f"{place} is {'closed' if known.closed(place) else 'in view'}.", True
    elif kind == "examine":
        yield from _within_reach(known, words["x"])
    elif kind == "use":
        stands = next((f[2] for f in known.facts if f[:2] == ("inreceptacle", thing)), "no place")
        beside = known.place_of(stands) == known.location()
        # Not `_here`: the prompt has no location for a receptacle that the action does not name.
        yield f"{thing} in {stands}, beside agent: {_yes(beside)}.", beside
        switched = known.has("toggleable", thing)
        yield f"{thing} {'can' if switched else 'cannot'} be switched.", switched
    elif kind == "inventory":
        yield f"in hand: {known.held() or 'nothing'}.", True
    elif place:
        yield _here(known, place)
        if kind in ("open", "close"):
            found = _door(known, place)
            yield f"{place} is {found}.", found == ("closed" if kind == "open" else "open")
        else:
            yield from _handling(known, kind, thing, place)
    elif kind == "slice":
        yield from _within_reach(known, words["k"])
    elif kind in ("look", "help"):
        yield "nothing changes.", True


def _handling(known: _FactSet, kind: str, thing: str, place: str) -> Iterator[tuple[str, bool]]:
    held = known.held()
    wanted = None if kind == "take" else thing
    yield (
        f"hand holds {held or 'nothing'}, needs {wanted or 'nothing'}: {_yes(held == wanted)}.",
        held == wanted,
    )
    if kind in ("take", "move") and known.has("openable", place):
        yield f"{place} is {_door(known, place)}.", not known.closed(place)
    if kind in _MADE_WITH:
        able = known.has(_MADE_WITH[kind][1], thing) and kind_of(place) == _MADE_WITH[kind][0]
        yield f"{place} can {kind} {kind_of(thing)}: {_yes(able)}.", able
    if kind == "take":
        lies = next((f[2] for f in known.facts if f[:2] == ("inreceptacle", thing)), "no place")
        yield f"{thing} in {lies}, needs {place}: {_yes(lies == place)}.", lies == place


def _door(known: _FactSet, place: str) -> str:
    if not known.has("openable", place):
        return "without a door"
    return "closed" if known.closed(place) else "open"


def _within_reach(known: _FactSet, name: str) -> Iterator[tuple[str, bool]]:
    if known.place_of(name) is not None:
        yield _here(known, name)
    else:
        held = known.held()
        yield f"hand holds {held or 'nothing'}, needs {name}: {_yes(held == name)}.", held == name


def _here(known: _FactSet, place: str) -> tuple[str, bool]:
    there, here = known.place_of(place), known.location()
    return f"{place} at {there or 'no place'}, agent at {here}: {_yes(there == here)}.", there == here


def _goal_check(known: _FactSet, kind: str, words: Mapping[str, str], goal: Mapping[str, str]) -> str:
    """The conditions of the goal with the actual values, one at a time."""
    family = goal.get("task_type", "")
    light = family == "look_at_obj_in_light"
    wanted = goal.get("object_target", "").lower()
    place = goal.get("toggle_target" if light else "parent_target", "").lower()
    if kind == "use" and light:
        held = kind_of(known.held() or "nothing ")
        return f" wanted {wanted}, in hand {held}: {_yes(held == wanted)}."
    if kind != "move":
        return ""
    thing, here = words["o"], words["r"]
    checks = [
        f"wanted {wanted}, this is {kind_of(thing)}: {_yes(kind_of(thing) == wanted)}",
        f"wanted in {place}, this is {kind_of(here)}: {_yes(kind_of(here) == place)}",
    ]
    made = PROPERTY.get(family)
    if made is not None:
        checks.append(f"wanted {made.removeprefix('is')}: {_yes(known.has(made, thing))}")
    if family == "pick_two_obj_and_place":
        there = [f[1] for f in known.facts if f[0] == "inreceptacle" and f[2] == here]
        checks.append(f"wanted two, another there: {_yes(any(kind_of(name) == wanted for name in there))}")
    return f" {'; '.join(checks)}."


def _yes(true: bool) -> str:
    return "yes" if true else "no"


def _goal(task: Task) -> Mapping[str, str]:
    goal = task.parameters.get("goal")
    return {str(key): str(value) for key, value in goal.items()} if isinstance(goal, dict) else {}
