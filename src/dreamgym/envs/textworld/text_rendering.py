"""Renders a TextWorld game as text: what the agent sees, and the hidden facts of the world sheet.

TextWorld renders only compiled games; in memory it provides facts. The texts here depend only on the facts.
Those of compiled games ("Oh wow! Is that what I think it is?") are sampled for each game, so that no
experience model can predict them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

from dreamgym.types import Fact

COOKING = frozenset({"fried", "roasted", "grilled"})
CUTTING = frozenset({"chopped", "sliced", "diced"})

_DIRECTIONS = {"north_of": ("north", "south"), "west_of": ("west", "east")}
"""A relation of two rooms, and the directions from the second to the first and back."""
_HEATING = ("oven", "stove", "toaster")
_OPENNESS = ("open", "closed", "locked")
_SAME = {"eaten": "consumed"}
"""Predicates of treasure games under the names that cooking games use."""
# Inverse relations, consequences of a door's state, predicates that no rule reads, internals of the recipe.
_OMITTED = {"south_of", "east_of", "free", "cookable", "cuttable", "base", "out", "cooking_location"}


class SceneRenderer:
    """Renders the facts of one moment."""

    def __init__(self, infos: Any, facts: Iterable[Any]) -> None:
        self._infos = infos
        self.marks: dict[str, set[str]] = defaultdict(set)
        self.holder: dict[str, str] = {}
        self._held: dict[str, list[str]] = defaultdict(list)
        self._exits: dict[str, str] = {}
        self._doors: dict[str, str] = {}
        self.recipe: list[tuple[str, str]] = []
        """(food, ingredient): the food needs the properties of the ingredient."""
        between_rooms = []
        for fact in facts:
            ids = [argument.name for argument in fact.arguments]
            if len(ids) == 1:
                self.marks[ids[0]].add(fact.name)
            elif fact.name in ("at", "in", "on"):
                self.holder[ids[0]] = ids[1]
                self._held[ids[1]].append(ids[0])
            elif fact.name == "base":
                self.recipe.append((ids[0], ids[1]))
            else:
                between_rooms.append((fact.name, ids))
        self.room = self.holder["P"]
        for name, ids in between_rooms:
            if name == "link" and ids[0] == self.room:
                self._doors[ids[2]] = ids[1]
            elif name in _DIRECTIONS and self.room in ids:
                there, back = _DIRECTIONS[name]
                self._exits[ids[0] if ids[1] == self.room else ids[1]] = (
                    there if ids[1] == self.room else back
                )

    def name(self, thing: str) -> str:
        return str(self._infos[thing].name)  # the player and the pocket have none

    def held_by(self, holder: str) -> list[str]:
        return sorted(self._held[holder], key=self.name)

    def look(self) -> str:
        here = [thing for thing in self.held_by(self.room) if thing != "P"]
        furniture = [thing for thing in here if self.is_fixed(thing)]
        floor = [thing for thing in here if thing not in furniture]
        sentences = [f"You are in the {self.name(self.room)}."]
        if furniture:
            sentences.append(f"You see {self._list(furniture)}.")
        sentences += [text for thing in furniture if (text := self.contents(thing))]
        if floor:
            sentences.append(_there_is("On the floor", floor, self._list(floor)))
        return " ".join(sentences + self._ways())

    def inventory(self) -> str:
        return f"You are carrying {self._list(self.held_by('I')) or 'nothing'}."

    def examine(self, name: str) -> str:
        thing, info = next((key, info) for key, info in self._infos.items() if info.name == name)
        if name == "cookbook":
            return "\n".join(line.strip() for line in info.desc.splitlines() if line.strip(" -"))
        parts = [f"You see {self._list([thing])}."]
        if info.type in _HEATING:
            parts.append(info.desc)  # what it is good for
        if self.is_fixed(thing) and not self.marks[thing] & {"closed", "locked"}:
            parts.append(self.contents(thing) or "It is empty.")
        return " ".join(parts)

    def contents(self, thing: str) -> str | None:
        """The visible contents of an object."""
        held = self.held_by(thing)
        if not held or self.marks[thing] & {"closed", "locked"}:
            return None
        place = f"{'In' if 'open' in self.marks[thing] else 'On'} the {self.name(thing)}"
        return _there_is(place, held, self._list(held))

    def condition(self, thing: str) -> list[str]:
        return condition(self.marks[thing])

    def _ways(self) -> list[str]:
        sentences, free = [], []
        for room, direction in sorted(self._exits.items(), key=lambda item: item[1]):
            door = self._doors.get(room)
            if door is None:
                free.append(direction)
            else:
                sentences.append(f"{_capital(self._list([door]))} leads {direction}.")
        if free:
            sentences.append(f"You can go {_join(free)}.")
        return sentences

    def _list(self, things: Sequence[str]) -> str:
        return _join([self._with_article(thing) for thing in things])

    def _with_article(self, thing: str) -> str:
        words = " ".join([*self.condition(thing), self.name(thing)])
        article = self._infos[thing].indefinite or ("an" if words[0] in "aeiouAEIOU" else "a")
        return f"{article} {words}"

    def is_fixed(self, thing: str) -> bool:
        return self._infos[thing].type in ("c", "s", *_HEATING)  # containers and supporters


def condition(marks: set[str]) -> list[str]:
    """The visible properties of an object, in the order of the text."""
    # As in the compiled game, which calls raw only what is inedible raw.
    heated = marks & {"burned"} or marks & COOKING or ({"raw"} if "needs_cooking" in marks else set())
    return [*(mark for mark in _OPENNESS if mark in marks), *sorted(marks & CUTTING), *sorted(heated)]


def named_facts(infos: Any, facts: Iterable[Any]) -> list[Fact]:
    """TextWorld's facts with the names in the texts, without redundant ones."""
    scene = SceneRenderer(infos, facts := list(facts))
    unseen = {ingredient for _, ingredient in scene.recipe} | {
        key for key in infos if infos[key].type == "meal" and not scene.marks[key] & {"raw", "cooked"}
    }
    named: set[Fact] = set()
    for fact in facts:
        ids = [argument.name for argument in fact.arguments]
        if fact.name in _OMITTED or fact.name.startswith("ingredient_") or unseen & set(ids):
            continue
        if fact.name == "link":
            ids = [ids[1], *sorted((ids[0], ids[2]))]
        names = ({"P": "player", "I": "player"}.get(each) or scene.name(each) for each in ids)
        named.add((_SAME.get(fact.name, str(fact.name)), *names))
    named.update(("fixed", scene.name(thing)) for thing in scene.holder if scene.is_fixed(thing))
    for food, ingredient in scene.recipe:
        wanted = scene.marks[ingredient] & (COOKING | CUTTING)
        named.update(("recipe", scene.name(food), mark) for mark in wanted or {"as it is"})
    return sorted(named)


def _there_is(place: str, things: Sequence[str], listed: str) -> str:
    return f"{place} {'is' if len(things) == 1 else 'are'} {listed}."


def _join(parts: Sequence[str]) -> str:
    """
    >>> _join(["a", "b", "c"])
    'a, b and c'
    """
    return " and ".join([", ".join(parts[:-1]), parts[-1]] if len(parts) > 1 else parts)


def _capital(sentence: str) -> str:
    return sentence[:1].upper() + sentence[1:]
