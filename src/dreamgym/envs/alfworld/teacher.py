"""Explains ALFWorld transitions from the environment's own facts, so that no teacher model is needed.

Knows the rules of the household domain: what each action requires, what it changes, and when a task is done.
The notes it writes are what the experience model learns to think before it answers.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from dreamgym.envs.alfworld.goals import PROPERTY
from dreamgym.types import Annotation, Change, Fact, Note, Task, Trajectory, Transition, WorldSheet

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


@dataclass(frozen=True, slots=True)
class _World:
    """Quick questions to a set of facts."""

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


class HouseholdTeacher:
    """The programmatic teacher of ALFWorld."""

    name = "alfworld-rules"

    async def annotate(self, trajectory: Trajectory) -> Annotation:
        if trajectory.sheet is None:
            raise ValueError(f"trajectory {trajectory.id!r} has no world sheet to explain it from")
        facts = set(trajectory.sheet.facts)
        notes = []
        goal = _goal(trajectory.task)
        for transition in trajectory.transitions:
            note = explain(_World(frozenset(facts)), transition, goal)
            facts.difference_update(note.change.ended)
            facts.update(note.change.begun)
            notes.append(note)
        return Annotation(
            plan=f"find what is needed, then {trajectory.task.instruction}",
            success_mode=f"the task ends when this holds: {trajectory.task.instruction}",
            failure_mode=f"the {goal.get('object_target', 'object')} is never brought where it belongs",
            notes=tuple(notes),
        )


def explain(world: _World, transition: Transition, goal: Mapping[str, str]) -> Note:
    kind, words = _parse(transition.action)
    if transition.outcome.next_state.text == REFUSAL:
        return Note(reasoning=f"not possible: {_obstacle(world, kind, words)}.")
    reasoning = _reason(world, kind, words) + _goal_check(world, kind, words, goal)
    if transition.outcome.success:
        reasoning += " the task is done."
    elif kind in _MAY_FINISH:
        reasoning += " the task is not done yet."
    return Note(reasoning=reasoning, change=_change(world, kind, words))


def current_sheet(sheet: WorldSheet, notes: tuple[Note, ...]) -> WorldSheet:
    """A sheet after the changes of these notes."""
    facts = list(sheet.facts)
    for note in notes:
        facts = [fact for fact in facts if fact not in note.change.ended] + list(note.change.begun)
    return WorldSheet(facts=tuple(facts))


def _parse(action: str) -> tuple[str, Mapping[str, str]]:
    for kind, pattern in _ACTIONS:
        found = pattern.match(action.strip())
        if found:
            return kind, found.groupdict()
    return "unknown", {}


def _change(world: _World, kind: str, words: Mapping[str, str]) -> Change:
    thing, place = words.get("o", ""), words.get("r", "")
    if kind == "go":
        target = world.place_of(place) or world.location()
        if target == world.location():
            return Change()
        return Change(
            ended=(("atlocation", AGENT, world.location()),), begun=(("atlocation", AGENT, target),)
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
        ended = ((undone, thing),) if undone and world.has(undone, thing) else ()
        return Change(ended=ended, begun=((made, thing),) if not world.has(made, thing) else ())
    if kind == "slice":
        return Change(begun=(("issliced", thing),))
    if kind == "use":
        return Change(begun=(("istoggled", thing),) if not world.has("istoggled", thing) else ())
    return Change()


def _reason(world: _World, kind: str, words: Mapping[str, str]) -> str:
    thing, place = words.get("o", ""), words.get("r", "")
    if kind == "go":
        return f"{place} is {'closed' if world.closed(place) else 'in view'}."
    if kind == "open":
        return f"{place} is here and closed, it opens."
    if kind == "close":
        return f"{place} is here and open, it closes."
    if kind == "take":
        return f"{thing} is in {place}, hands are free."
    if kind == "move":
        return f"{thing} is in hand, {place} can hold it."
    if kind in _MADE:
        return f"{thing} is in hand at {place}."
    if kind == "use":
        return f"{thing} can be switched."
    if kind == "inventory":
        return f"in hand: {world.held() or 'nothing'}."
    return "nothing changes."


def _goal_check(world: _World, kind: str, words: Mapping[str, str], goal: Mapping[str, str]) -> str:
    """What the task asks for beside what there is, one small question after the other."""
    family = goal.get("task_type", "")
    light = family == "look_at_obj_in_light"
    wanted = goal.get("object_target", "").lower()
    place = goal.get("toggle_target" if light else "parent_target", "").lower()
    if kind == "use" and light:
        held = _kind(world.held() or "nothing ")
        return f" wanted {wanted}, in hand {held}: {_yes(held == wanted)}."
    if kind != "move":
        return ""
    thing, here = words["o"], words["r"]
    checks = [
        f"wanted {wanted}, this is {_kind(thing)}: {_yes(_kind(thing) == wanted)}",
        f"wanted in {place}, this is {_kind(here)}: {_yes(_kind(here) == place)}",
    ]
    made = PROPERTY.get(family)
    if made is not None:
        checks.append(f"wanted {made.removeprefix('is')}: {_yes(world.has(made, thing))}")
    if family == "pick_two_obj_and_place":
        there = [f[1] for f in world.facts if f[0] == "inreceptacle" and f[2] == here]
        checks.append(f"wanted two, another there: {_yes(any(_kind(name) == wanted for name in there))}")
    return f" {'; '.join(checks)}."


def _yes(true: bool) -> str:
    return "yes" if true else "no"


def _kind(name: str) -> str:
    return name.rpartition(" ")[0]


def _obstacle(world: _World, kind: str, words: Mapping[str, str]) -> str:
    """The first requirement of an action that is not met."""
    thing, place = words.get("o", ""), words.get("r", words.get("x", ""))
    if kind == "unknown":
        return "no such action"
    if place and world.place_of(place) is not None and world.place_of(place) != world.location():
        return f"{place} is not here"
    if kind in ("open", "close"):
        if not world.has("openable", place):
            return f"{place} cannot be opened"
        return f"{place} is already {'open' if kind == 'open' else 'closed'}"
    if kind == "take":
        if world.held():
            return f"hands hold {world.held()}"
        return f"{thing} is not in {place}" if not world.closed(place) else f"{place} is closed"
    if kind in ("move", *_MADE) and world.held() != thing:
        return f"{thing} is not in hand"
    if kind == "move":
        return f"{place} is closed" if world.closed(place) else f"{place} cannot hold {thing}"
    return "it cannot be done here"


def _goal(task: Task) -> Mapping[str, str]:
    goal = task.parameters.get("goal")
    return {str(key): str(value) for key, value in goal.items()} if isinstance(goal, dict) else {}
