"""Generates household games from the benchmark's rooms, affordances and goals, with random placement.

A game is fixed by (split, seed, index, attempt). Families alternate by index, so any prefix is balanced.
`task_source` lets the expert solve each game, and takes the next attempt if it does not succeed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

from dreamgym.envs.alfworld.rooms import UNSEEN_ROOMS, Room, affordances, room, room_numbers
from dreamgym.types import JsonValue

FAMILIES = (
    "pick_and_place_simple",
    "look_at_obj_in_light",
    "pick_clean_then_place_in_recep",
    "pick_heat_then_place_in_recep",
    "pick_cool_then_place_in_recep",
    "pick_two_obj_and_place",
)
SPLITS = ("train", "valid_seen", "valid_unseen")

_LAMP = "DeskLamp"
_LAMP_STANDS = ("SideTable", "Desk", "Dresser", "Shelf", "CoffeeTable")
_OBJECTS = (28, 38)
"""Number of objects in a room; official games have 31 on average."""
_COPIES = (1, 1, 1, 2, 2, 3)
"""Instances of a class, drawn with the frequencies of the official games."""
_STATION = {
    "pick_clean_then_place_in_recep": "SinkBasin",
    "pick_heat_then_place_in_recep": "Microwave",
    "pick_cool_then_place_in_recep": "Fridge",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Goal:
    family: str
    object_class: str
    receptacle_class: str
    """Empty for the family `look_at_obj_in_light`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GeneratedGame:
    """A game that is not solved yet: the PDDL problem and its goal."""

    name: str
    """In the benchmark's form: family-object-None-receptacle-room."""
    instruction: str
    goal: Goal
    room: int
    problem: str

    def parameters(self) -> dict[str, JsonValue]:
        lamp = _LAMP if self.goal.family == "look_at_obj_in_light" else ""
        return goal_parameters(self.goal.family, self.goal.object_class, self.goal.receptacle_class, lamp)


def goal_parameters(family: str, thing: str, receptacle: str, lamp: str) -> dict[str, JsonValue]:
    """A goal as the benchmark's ``pddl_params``, which the expert reads."""
    return {
        "task_type": family,
        "object_target": thing,
        "parent_target": receptacle,
        "toggle_target": lamp,
        "mrecep_target": "",
        "object_sliced": False,
    }


def generate_game(split: str, seed: int, index: int, attempt: int) -> GeneratedGame:
    rng = Random(f"dreamgym-alfworld-1/{split}/{seed}/{index}/{attempt}")
    family = FAMILIES[index % len(FAMILIES)]
    numbers = [
        number
        for number, kind in room_numbers().items()
        if (number in UNSEEN_ROOMS) == (split == "valid_unseen")
        and kind in affordances().family_rooms[family]
    ]
    while True:
        place = room(rng.choice(numbers))
        goals = possible_goals(family, place)
        if goals:
            break
    goal = rng.choice(goals)
    from alfworld.gen import goal_library

    entry = goal_library.gdict[family]
    words = {
        "obj": goal.object_class,
        "recep": goal.receptacle_class,
        "toggle": _LAMP,
        "mrecep": "",
    }
    instruction = rng.choice(entry["templates"]).format(**{key: word.lower() for key, word in words.items()})
    lines = "(:goal".join(entry["pddl"].replace("#", "-").split("(:goal")[1:]).format(**words)
    target = goal.receptacle_class or _LAMP
    return GeneratedGame(
        name=f"{family}-{goal.object_class}-None-{target}-{place.number}",
        instruction=instruction,
        goal=goal,
        room=place.number,
        problem=_problem(place, _placement(rng, place, goal), rng, f"(:goal{lines}"),
    )


def possible_goals(family: str, place: Room) -> list[Goal]:
    """Every goal of a family that is possible in a room, in a fixed order."""
    tables = affordances()
    stands = {name for _, name, _ in place.receptacles}
    able = tables.suitable.get(family)
    objects = [name for name in place.object_classes if name != _LAMP and (able is None or name in able)]
    if family == "look_at_obj_in_light":
        if _LAMP not in place.object_classes or not stands & set(_LAMP_STANDS):
            return []
        return [Goal(family=family, object_class=name, receptacle_class="") for name in objects]
    if family in _STATION and _STATION[family] not in stands:
        return []
    return [
        Goal(family=family, object_class=name, receptacle_class=stand)
        for name in objects
        for stand in sorted(stands)
        if name in tables.contains[stand]
        and stand != _STATION.get(family)
        # The object needs another possible place, or the game would be won at the start.
        and any(name in tables.contains[other] for other in stands - {stand})
    ]


def _placement(rng: Random, place: Room, goal: Goal) -> list[tuple[str, str]]:
    """(class, receptacle identifier) of every object; the goal is not met at the start."""
    tables = affordances()
    needed = 2 if goal.family == "pick_two_obj_and_place" else 1
    wanted = [goal.object_class] * rng.randint(needed, 3)
    size = rng.randint(*_OBJECTS)
    others = [name for name in place.object_classes if name not in (goal.object_class, _LAMP)]
    rng.shuffle(others)
    for name in others:
        if len(wanted) >= size:
            break
        wanted += [name] * rng.choice(_COPIES)
    placed = []
    for name in wanted:
        stands = [
            key
            for key, kind, _ in place.receptacles
            if name in tables.contains[kind]
            and not (name == goal.object_class and kind == goal.receptacle_class)
        ]
        if stands:
            placed.append((name, rng.choice(stands)))
    if _LAMP in place.object_classes:
        stands = [key for key, kind, _ in place.receptacles if kind in _LAMP_STANDS]
        if stands:
            placed.append((_LAMP, rng.choice(stands)))
    return placed


def _problem(place: Room, placed: Sequence[tuple[str, str]], rng: Random, goal: str) -> str:
    tables = affordances()
    objects = [
        # The pose in the identifier orders objects of a class: random, so that numbers do not reveal places.
        (
            f"{name}_bar__plus_{rng.randrange(100):02d}_dot_{rng.randrange(100):02d}_bar_{number:02d}",
            name,
            stand,
        )
        for number, (name, stand) in enumerate(placed)
    ]
    location_of = {key: at for key, _, at in place.receptacles}
    kinds = {kind for _, kind, _ in place.receptacles} | {"SinkBasin", "Microwave", "Fridge"}
    classes = set(place.object_classes) | {"Knife", "ButterKnife"}
    start = "loc_bar_start"
    declared = [
        "agent1 - agent",
        *(f"{name}Type - otype" for name in sorted(classes)),
        *(f"{kind}Type - rtype" for kind in sorted(kinds)),
        *(f"{key} - object" for key, _, _ in objects),
        *(f"{key} - receptacle" for key, _, _ in place.receptacles),
        *(f"{at} - location" for at in sorted({*location_of.values(), start})),
    ]
    facts = [f"atLocation agent1 {start}"]
    for key, kind, at in place.receptacles:
        facts += [f"receptacleType {key} {kind}Type", f"receptacleAtLocation {key} {at}"]
        if kind in tables.openable:
            facts.append(f"openable {key}")
    facts += [
        f"canContain {kind}Type {name}Type"
        for kind in sorted(kinds)
        for name in sorted(tables.contains[kind] & classes)
    ]
    for key, name, stand in objects:
        facts += [
            f"objectType {key} {name}Type",
            f"inReceptacle {key} {stand}",
            f"objectAtLocation {key} {location_of[stand]}",
        ]
        facts += [f"{predicate} {key}" for predicate, members in tables.properties.items() if name in members]
        facts.append(f"{'toggleable' if name == _LAMP else 'pickupable'} {key}")
    body = "\n".join(f"  ({fact})" for fact in facts)
    return (
        f"(define (problem room_{place.number})\n(:domain alfred)\n(:objects\n  "
        + "\n  ".join(declared)
        + f"\n)\n(:init\n{body}\n)\n{goal}"
    )
