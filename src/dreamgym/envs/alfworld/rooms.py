"""The 120 rooms in the `alfworld` wheel: their receptacles, locations and object classes.

Rooms 10, 219, 308 and 424 are the benchmark's unseen rooms, used only for evaluation.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files

UNSEEN_ROOMS = (10, 219, 308, 424)

# The layout files lack some appliances of the games; they are added where the room's classes name them.
_APPLIANCES = {
    "StoveBurner": 4,
    "CoffeeMachine": 1,
    "Toaster": 1,
    "GarbageCan": 1,
    "LaundryHamper": 1,
    "ToiletPaperHanger": 1,
    "TowelHolder": 1,
    "HandTowelHolder": 1,
    "Microwave": 1,
    "Fridge": 1,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """One floor plan."""

    number: int
    kind: str
    """Kitchen, LivingRoom, Bedroom or Bathroom."""
    receptacles: tuple[tuple[str, str, str], ...]
    """(identifier, class, location), sorted."""
    object_classes: tuple[str, ...]
    """Classes that can be picked up here, sorted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Affordances:
    """The benchmark's tables of classes."""

    contains: Mapping[str, frozenset[str]]
    properties: Mapping[str, frozenset[str]]
    """Object classes by the PDDL predicate that marks them."""
    suitable: Mapping[str, frozenset[str]]
    """Object classes that can be treated as a family of tasks requires."""
    openable: frozenset[str]
    holds_things: frozenset[str]
    family_rooms: Mapping[str, frozenset[str]]


@functools.cache
def affordances() -> Affordances:
    from alfworld.gen import constants

    acts = constants.VAL_ACTION_OBJECTS
    holds_things = frozenset(constants.MOVABLE_RECEPTACLES)
    return Affordances(
        contains={name: frozenset(held) for name, held in constants.VAL_RECEPTACLE_OBJECTS.items()},
        properties={
            **{f"{act}able": frozenset(acts[f"{act.title()}able"]) for act in ("clean", "heat", "cool")},
            "sliceable": frozenset(acts["Sliceable"]),
            "isReceptacleObject": holds_things,
        },
        suitable={
            f"pick_{act}_then_place_in_recep": frozenset(acts[f"{act.title()}able"])
            for act in ("clean", "heat", "cool")
        },
        openable=frozenset(constants.OPENABLE_CLASS_LIST),
        holds_things=holds_things,
        family_rooms={name: frozenset(kinds) for name, kinds in constants.GOALS_VALID.items()},
    )


@functools.cache
def room_numbers() -> Mapping[int, str]:
    """Every room and its kind."""
    from alfworld.gen import constants

    return {number: kind for kind, numbers in sorted(constants.SCENE_TYPE.items()) for number in numbers}


@functools.cache
def room(number: int) -> Room:
    folder = files("alfworld") / "gen" / "layouts"
    poses = json.loads((folder / f"FloorPlan{number}-openable.json").read_text(encoding="utf-8"))
    classes = set(json.loads((folder / f"FloorPlan{number}-objects.json").read_text(encoding="utf-8")))
    tables = affordances()
    standing = {
        key: (_class_of(key), _location(pose))
        for key, pose in poses.items()
        if _class_of(key) in tables.contains and _class_of(key) not in tables.holds_things
    }
    present = {name for name, _ in standing.values()}
    for name, count in _APPLIANCES.items():
        if name in classes and name not in present:
            for copy in range(count):
                place = f"{name}|+00.{copy:02d}|+00.90|+00.00"
                standing[place] = name, f"loc|{name.lower()}|0|0|30"
    placeable = frozenset().union(*(tables.contains[name] for name, _ in standing.values()))
    return Room(
        number=number,
        kind=room_numbers()[number],
        receptacles=tuple(sorted((_mangle(key), name, _mangle(at)) for key, (name, at) in standing.items())),
        object_classes=tuple(sorted(classes & (placeable | {"DeskLamp"}))),
    )


def _class_of(identifier: str) -> str:
    first, *_, last = identifier.split("|")
    return last if last.endswith("Basin") else first


def _location(pose: list[float]) -> str:
    x, z, rotation, horizon = pose
    return f"loc|{round(x * 4)}|{round(z * 4)}|{round(rotation / 90)}|{round(horizon)}"


def _mangle(identifier: str) -> str:
    """PDDL names cannot hold this punctuation; the simulator restores it in its texts."""
    for character, word in (("|", "_bar_"), ("-", "_minus_"), ("+", "_plus_"), (".", "_dot_")):
        identifier = identifier.replace(character, word)
    return identifier
