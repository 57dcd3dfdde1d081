"""Lookups in the world sheet of a TextWorld game, and the lines of a prompt that an action needs.

A prompt shows few facts, close to the answer: for a move the room that it leads to, for an object its place
and properties, for a meal the recipe next to the ingredients.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping

from dreamgym.envs.textworld.text_rendering import COOKING, CUTTING, condition
from dreamgym.types import Fact, WorldSheet

PLAYER, MEAL, KITCHEN = "player", "meal", "kitchen"
HEATS: Mapping[str, str] = {"stove": "fried", "oven": "roasted", "BBQ": "grilled"}
"""The result of cooking with each."""
CUTS: Mapping[str, str] = {"slice": "sliced", "dice": "diced", "chop": "chopped"}
SHUT = frozenset({"closed", "locked"})
ROOMS = frozenset({
    "backyard", "bathroom", "bedroom", "corridor", "driveway", "garden", "kitchen", "livingroom", "pantry",
    "shed", "street", "supermarket",
})  # fmt: skip
FURNITURE = frozenset({"bed", "bench", "counter", "shelf", "showcase", "sofa", "table", "toilet"})
"""Holds objects. Furniture and rooms are exchangeable names. Directions and foods could be, too, but then
long lists are learnt later, and a wrong exit or recipe in the dream makes a policy ignore what it reads."""
UNKNOWN = "no such thing"
"""Stands in prompts and reasoning for a name that the facts do not have."""
OPPOSITE = {"north": "south", "south": "north", "west": "east", "east": "west"}

_ACTIONS = (
    ("go", re.compile(r"^go (?P<x>north|south|east|west)$")),
    ("look", re.compile(r"^look$")),
    ("inventory", re.compile(r"^inventory$")),
    ("prepare", re.compile(r"^prepare meal$")),
    ("examine", re.compile(r"^examine (?P<x>.+)$")),
    ("open", re.compile(r"^open (?P<x>.+)$")),
    ("close", re.compile(r"^close (?P<x>.+)$")),
    ("unlock", re.compile(r"^unlock (?P<x>.+) with (?P<y>.+)$")),
    ("lock", re.compile(r"^lock (?P<x>.+) with (?P<y>.+)$")),
    ("take", re.compile(r"^take (?P<x>.+?) from (?P<y>.+)$")),
    ("take", re.compile(r"^take (?P<x>.+)$")),
    ("drop", re.compile(r"^drop (?P<x>.+)$")),
    ("put", re.compile(r"^put (?P<x>.+?) on (?P<y>.+)$")),
    ("insert", re.compile(r"^insert (?P<x>.+?) into (?P<y>.+)$")),
    ("cook", re.compile(r"^cook (?P<x>.+?) with (?P<y>.+)$")),
    *((verb, re.compile(rf"^{verb} (?P<x>.+?) with (?P<y>.+)$")) for verb in CUTS),
    ("eat", re.compile(r"^eat (?P<x>.+)$")),
    ("drink", re.compile(r"^drink (?P<x>.+)$")),
)
_KNOWN_WORDS = frozenset({"", MEAL, *OPPOSITE})
_SEEN = ("needs_cooking", "raw", "uncut", "cooked", "edible", "inedible", "drinkable", "sharp", "fixed")


class GameFacts:
    """An index of the facts of one moment."""

    def __init__(self, facts: Iterable[Fact]) -> None:
        self.facts = frozenset(facts)
        self.marks: dict[str, set[str]] = defaultdict(set)
        self.place: dict[str, tuple[str, str]] = {}
        """Relation and place of an object: ``("on", "counter")``."""
        self._held: dict[str, list[str]] = defaultdict(list)
        self._ways: dict[str, dict[str, str]] = defaultdict(dict)
        self._doors: dict[frozenset[str], str] = {}
        self._names: dict[str, str] = {}
        recipe: dict[str, set[str]] = defaultdict(set)
        for fact in self.facts:
            self._names |= {name.lower(): name for name in fact[1:]}
            match fact:
                case (mark, thing):
                    self.marks[thing].add(mark)
                case ("at" | "in" | "on" as how, thing, where):
                    self.place[thing] = (how, where)
                    self._held[where].append(thing)
                case ("recipe", food, wanted):
                    recipe[food].add(wanted)
                case ("north_of" | "west_of" as relation, there, here):
                    way = relation.removesuffix("_of")
                    self._ways[here][way] = there
                    self._ways[there][OPPOSITE[way]] = here
                case ("link", door, one, other):
                    self._doors[frozenset((one, other))] = door
        self.recipe = {food: recipe[food] - {"as it is"} for food in sorted(recipe)}
        """The properties that each food needs."""
        self.room = self.place.get(PLAYER, ("at", "nowhere"))[1]

    def named(self, words: str) -> str:
        """The spelling in the facts. An action may contain any text, which must not become part of a fact."""
        return self._names.get(words.lower(), words if words in _KNOWN_WORDS else UNKNOWN)

    def has(self, *fact: str) -> bool:
        return fact in self.facts

    def held(self, holder: str) -> list[str]:
        return sorted(thing for thing in self._held[holder] if thing != PLAYER)

    def carried(self, thing: str) -> bool:
        return self.place.get(thing) == ("in", PLAYER)

    def exits(self, room: str) -> list[tuple[str, str, str | None]]:
        """(direction, room, door), in the order of the text."""
        return [
            (way, there, self._doors.get(frozenset((room, there))))
            for way, there in sorted(self._ways[room].items())
        ]

    def doors(self, room: str) -> list[str]:
        return [door for _, _, door in self.exits(room) if door is not None]

    def ways_to(self, door: str) -> set[str]:
        """The rooms that a door joins."""
        return {room for rooms, known in self._doors.items() if known == door for room in rooms}

    def chain(self, thing: str) -> list[tuple[str, str]]:
        """The place of an object, the place of that, up to a room or the player; empty if it has none.

        An imagined sheet may contain a cycle, at which the chain ends.
        """
        found: list[tuple[str, str]] = []
        if thing == PLAYER:
            return found
        while (step := self.place.get(thing)) is not None and step not in found:
            found.append(step)
            thing = step[1]
            if thing == PLAYER:
                break
        return found

    def within_reach(self, thing: str) -> bool:
        """Carried, in this room or one of its doors, and not in a closed container."""
        if thing in self.doors(self.room):
            return True
        places = [where for _, where in self.chain(thing)]
        return (
            bool(places)
            and places[-1] in (self.room, PLAYER)
            and not any(self.marks[where] & SHUT for where in places)
        )

    def condition(self, thing: str) -> list[str]:
        return condition(self.marks[thing])


def parsed(action: str) -> tuple[str, str, str]:
    """(kind, first name, second name) of an action; ``unknown`` if it is none.

    >>> parsed("take red apple from counter"), parsed("dance")
    (('take', 'red apple', 'counter'), ('unknown', '', ''))
    """
    words = " ".join(action.split())
    for kind, pattern in _ACTIONS:
        found = pattern.match(words)
        if found:
            names = found.groupdict()
            return kind, names.get("x", ""), names.get("y", "")
    return "unknown", "", ""


def facts_for(sheet: WorldSheet, action: str) -> list[str]:
    """The lines of a prompt about the sheet before an action; ``start`` for the first state."""
    known = GameFacts(sheet.facts)
    kind, *names = parsed(action)
    lines: list[str] = []
    if kind == "go":
        there = next((room for way, room, _ in known.exits(known.room) if way == names[0]), None)
        lines += [*_room(known, there)] if there is not None else []
        lines.append(_ways(known, known.room))
    elif kind == "look" or action == "start":
        lines += _room(known, known.room)
    elif kind == "inventory":
        lines.append(_listing(known, "player carries", PLAYER))
    elif kind == "prepare":
        lines += [
            line for food in known.recipe for line in (thing_line(known, food), wanted_line(known, food))
        ]
    else:
        lines += _named(known, kind, [known.named(name) for name in names if name])
    return [*lines, f"player: in {known.room}"]


def _named(known: GameFacts, kind: str, names: list[str]) -> Iterator[str]:
    for name in reversed(names):
        yield thing_line(known, name)
        if "fixed" in known.marks[name] and kind in ("open", "examine"):
            yield _listing(known, f"held by {name}", name)
    if kind in ("cook", "eat", "drink", *CUTS):
        yield wanted_line(known, names[0])
    if kind == "examine" and names == ["cookbook"]:
        yield from (wanted_line(known, food) for food in known.recipe)
    if kind in ("take", "unlock", "lock"):
        yield from (" ".join(fact) for fact in sorted(known.facts) if _decides(fact, names))


def _decides(fact: Fact, names: list[str]) -> bool:
    return fact[0] in ("wins", "loses") or (fact[0] == "match" and len(fact) > 1 and fact[1] in names)


def _room(known: GameFacts, room: str) -> Iterator[str]:
    here = known.held(room)
    furniture = [thing for thing in here if "fixed" in known.marks[thing]]
    yield _ways(known, room)
    floor = [thing for thing in here if thing not in furniture]
    if floor:
        yield f"on the floor: {_list(known, floor)}"
    for thing in reversed(furniture):
        if known.held(thing) and not known.marks[thing] & SHUT:
            yield _listing(known, f"held by {thing}", thing)
    yield f"{room}: {_list(known, furniture) or 'bare'}"


def _ways(known: GameFacts, room: str) -> str:
    parts = []
    for way, there, door in known.exits(room):
        through = f" by {_conditioned(known, door)}" if door is not None else ""
        parts.append(f"{way} {there}{through}")
    return f"ways of {room}: {', '.join(parts) or 'none'}"


def place_of(known: GameFacts, name: str) -> str:
    """The place of an object up to its room; empty if it has none.

    >>> place_of(GameFacts([("on", "egg", "table"), ("at", "table", "kitchen")]), "egg")
    'on table in kitchen'
    """
    rooms = known.ways_to(name)
    if rooms:
        return f"door of {' and '.join(sorted(rooms))}"
    return " ".join(
        "carried" if where == PLAYER else f"{'in' if how == 'at' else how} {_shut(known, where)}{where}"
        for how, where in known.chain(name)
    )


def thing_line(known: GameFacts, name: str) -> str:
    marks = [*known.condition(name), *(mark for mark in _SEEN if mark in known.marks[name])]
    return f"{name}: {', '.join([place_of(known, name) or 'nowhere', *dict.fromkeys(marks)])}"


def _shut(known: GameFacts, name: str) -> str:
    return "closed " if known.marks[name] & SHUT else ""


def wanted_line(known: GameFacts, food: str) -> str:
    wanted = known.recipe.get(food)
    if wanted is None:
        return f"recipe {food}: no"
    return f"recipe {food}: {', '.join([*sorted(wanted & CUTTING), *sorted(wanted & COOKING)]) or 'as it is'}"


def _listing(known: GameFacts, lead: str, holder: str) -> str:
    return f"{lead}: {_list(known, known.held(holder)) or 'nothing'}"


def _list(known: GameFacts, things: Iterable[str]) -> str:
    return ", ".join(_conditioned(known, thing) for thing in things)


def _conditioned(known: GameFacts, thing: str) -> str:
    return " ".join([*known.condition(thing), thing])
