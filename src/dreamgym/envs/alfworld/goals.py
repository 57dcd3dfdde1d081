"""The benchmark's goals as checks of a world sheet: whether a household task is done or can be done."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Set

from dreamgym.types import Fact, Task, WorldSheet

PROPERTY = {
    "pick_clean_then_place_in_recep": "isclean",
    "pick_heat_then_place_in_recep": "ishot",
    "pick_cool_then_place_in_recep": "iscool",
}
"""The property that an object needs before it is put down, by family of task."""
_STATION = {
    "pick_clean_then_place_in_recep": ("cleanable", "sinkbasin"),
    "pick_heat_then_place_in_recep": ("heatable", "microwave"),
    "pick_cool_then_place_in_recep": ("coolable", "fridge"),
}


def goal_met(task: Task, sheet: WorldSheet) -> bool:
    """Whether the goal in `task.parameters` holds on these (current) facts.

    >>> goal = {"task_type": "pick_and_place_simple", "object_target": "Mug", "parent_target": "Desk"}
    >>> task = Task(id="t", instruction="", environment="alfworld", parameters={"goal": goal})
    >>> goal_met(task, WorldSheet(facts=(("inreceptacle", "mug 2", "desk 1"),)))
    True
    """
    goal = _goal(task)
    family = str(goal["task_type"])
    wanted = str(goal["object_target"]).lower()
    if family == "look_at_obj_in_light":
        return _lit(sheet, wanted, str(goal["toggle_target"]).lower())
    place = str(goal["parent_target"]).lower()
    there: dict[str, list[str]] = {}
    for thing, where in _pairs(sheet.facts, "inreceptacle"):
        if kind_of(thing) == wanted and kind_of(where) == place:
            there.setdefault(where, []).append(thing)
    if family == "pick_two_obj_and_place":
        return any(len(things) >= 2 for things in there.values())
    needed = PROPERTY.get(family)
    facts = set(sheet.facts)
    return any(needed is None or (needed, thing) in facts for things in there.values() for thing in things)


def can_succeed(task: Task, sheet: WorldSheet, *, contains: Mapping[str, Set[str]] | None = None) -> bool:
    """Whether the goal in `task.parameters` can be reached from these facts, and is not reached yet.

    Args:
        contains: which classes of things each class of receptacle takes (`rooms.affordances().contains`);
            without it every receptacle takes everything.
    """
    goal = _goal(task)
    family = str(goal["task_type"])
    wanted, place = str(goal["object_target"]), str(goal["parent_target"])
    facts = set(sheet.facts)
    things = {thing for thing, _ in _pairs(facts, "inreceptacle")}
    things |= {thing for _, thing in _pairs(facts, "holds")}
    stands = {kind_of(where) for where, _ in _pairs(facts, "receptacleatlocation")}
    found = [thing for thing in things if kind_of(thing) == wanted.lower() and ("pickupable", thing) in facts]
    if family == "look_at_obj_in_light":
        lamp = str(goal["toggle_target"]).lower()
        lamps = [t for t in things if kind_of(t) == lamp and ("toggleable", t) in facts]
        return bool(found and lamps) and not goal_met(task, sheet)
    if place.lower() not in stands or (contains is not None and wanted not in contains.get(place, ())):
        return False
    if family in _STATION:
        able, station = _STATION[family]
        found = [thing for thing in found if (able, thing) in facts and station in stands]
    needed = 2 if family == "pick_two_obj_and_place" else 1
    return len(found) >= needed and not goal_met(task, sheet)


def _goal(task: Task) -> Mapping[str, object]:
    goal = task.parameters.get("goal")
    if not isinstance(goal, Mapping):
        raise ValueError(f"task {task.id!r} states no goal: expected parameters['goal'], got {goal!r}")
    return goal


def _lit(sheet: WorldSheet, wanted: str, lamp: str) -> bool:
    """The object is carried, and a lamp at the agent's location is on."""
    facts = set(sheet.facts)
    held = any(kind_of(thing) == wanted for _, thing in _pairs(facts, "holds"))
    here = {location for _, location in _pairs(facts, "atlocation")}
    stands = {where for where, location in _pairs(facts, "receptacleatlocation") if location in here}
    return held and any(
        where in stands and kind_of(thing) == lamp and ("istoggled", thing) in facts
        for thing, where in _pairs(facts, "inreceptacle")
    )


def _pairs(facts: Iterable[Fact], relation: str) -> Iterator[tuple[str, str]]:
    """The arguments of a relation; malformed facts of an imagined sheet are skipped."""
    return ((fact[1], fact[2]) for fact in facts if fact[0] == relation and len(fact) == 3)


def kind_of(name: str) -> str:
    """``mug`` of ``mug 2``."""
    return name.rpartition(" ")[0]
