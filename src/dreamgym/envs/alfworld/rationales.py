"""Rationales for household tasks: a few words before each action.

A rationale names the next subgoal and where its object is, from the observations alone. A small model that
writes it first has the name to copy in its last line, and its progress without reading the whole episode.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from dreamgym.envs.alfworld.goals import kind_of
from dreamgym.envs.alfworld.instructions import task_from_instruction
from dreamgym.types import State, Task, Transition

_THING = r"([a-z]+ \d+)"
_ARRIVED = re.compile(rf"You arrive at {_THING}\.")
_TAKEN = re.compile(rf"You pick up the {_THING} from")
_MOVED = re.compile(rf"You move the {_THING} to the {_THING}\.")
_TREATED = re.compile(rf"You (clean|heat|cool) the {_THING} using")
_CLOSED = re.compile(rf"The {_THING} is closed\.")
_TREATMENT = {
    "pick_clean_then_place_in_recep": "clean",
    "pick_heat_then_place_in_recep": "heat",
    "pick_cool_then_place_in_recep": "cool",
}


def think(task: Task, history: Sequence[Transition], state: State) -> str | None:
    """The rationale of the next action; None if the goal of the task is unknown.

    >>> task = Task(id="t", instruction="put a mug in safe", environment="alfworld", parameters={"goal": {
    ...     "task_type": "pick_and_place_simple", "object_target": "Mug", "parent_target": "Safe"}})
    >>> think(task, [], State(text="The drawer 1 is closed."))
    'find mug: drawer 1 is closed'
    >>> think(task, [], State(text="You arrive at desk 1. On the desk 1, you see a mug 2, and a pen 1."))
    'find mug: mug 2 is at desk 1'
    >>> think(task, [], State(text="You arrive at desk 1. On the desk 1, you see nothing."))
    'find mug: not at desk 1'
    """
    goal = _goal(task)
    if goal is None:
        return None
    wanted, place = str(goal["object_target"]).lower(), str(goal.get("parent_target") or "").lower()
    progress = _Progress()
    for text in (*(transition.state.text for transition in history), state.text):
        progress.add(text, place)
    held = progress.held if progress.held is not None and kind_of(progress.held) == wanted else None
    if held is None and progress.held is not None:
        return f"put {progress.held} away"
    if held is None:
        return f"find {wanted}: {_seen(wanted, state.text, progress)}"
    family = str(goal["task_type"])
    treatment = _TREATMENT.get(family)
    if treatment is not None and (treatment, held) not in progress.treated:
        return f"{treatment} {held}"
    if family == "look_at_obj_in_light":
        lamp = str(goal["toggle_target"]).lower()
        known = [name for name in progress.seen_at if kind_of(name) == lamp]
        return f"look at {held}: " + (
            f"{known[0]} is at {progress.seen_at[known[0]]}" if known else f"not at {progress.at}"
        )
    return f"put {held} in {place}"


@dataclass(slots=True)
class _Progress:
    """The progress of an episode, from its observations."""

    held: str | None = None
    treated: set[tuple[str, str]] = field(default_factory=set)
    placed: set[str] = field(default_factory=set)
    at: str = ""
    seen_at: dict[str, str] = field(default_factory=dict)

    def add(self, text: str, place: str) -> None:
        if found := _ARRIVED.search(text):
            self.at = found[1]
        self.seen_at |= dict.fromkeys(re.findall(rf"\ba {_THING}", text), self.at) if self.at else {}
        if found := _TAKEN.search(text):
            self.held = found[1]
            self.placed.discard(found[1])
        elif found := _MOVED.search(text):
            self.held = None
            if kind_of(found[2]) == place:
                self.placed.add(found[1])
        elif found := _TREATED.search(text):
            self.treated.add((found[1], found[2]))


def _seen(kind: str, text: str, progress: _Progress) -> str:
    """The object of a kind in the text, with the smallest number."""
    place = f"at {progress.at}" if progress.at else "here"
    for number in sorted(int(number) for number in re.findall(rf"\b{kind} (\d+)\b", text)):
        if f"{kind} {number}" not in progress.placed:
            return f"{kind} {number} is {place}"
    closed = _CLOSED.search(text)
    return f"{closed[1]} is closed" if closed else f"not {place}"


def _goal(task: Task) -> Mapping[str, object] | None:
    found = task.parameters.get("goal")
    if not isinstance(found, Mapping):
        known = task_from_instruction(task.instruction)
        found = known.parameters["goal"] if known is not None else None
    return found if isinstance(found, Mapping) else None
