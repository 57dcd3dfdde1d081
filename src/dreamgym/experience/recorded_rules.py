"""What recorded transitions prove about actions: which facts each kind of action changes, and which facts
held whenever it was accepted.

A kind of action is its text with a slot for every name on the world sheet and without other numbers: ``take
@0 from @1``, ``click('#')``. An imagined change that contradicts the rules is refused
(`world_sheet.violation`), so a policy gains nothing by it. `rule_mining` mines them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, Self, TypeAlias

from dreamgym.experience.world_sheet import names_of
from dreamgym.files import atomic_write
from dreamgym.types import Change, Fact, WorldSheet

RULES_FILE = "rules.json"
_SELF, _OTHER, _LINKED = "?", "*", "linked"

Pattern: TypeAlias = tuple[str, ...]
"""A fact about one object: ``?`` is the object, ``@0`` a name in the action, ``*`` any other name."""
Effect: TypeAlias = tuple[str, ...]
"""A sign, a predicate and arguments as in a pattern."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Condition:
    """What holds whenever an action of a kind is accepted.

    Of the object in slot `where`, or of every object if it is empty: where the pattern `given` holds (None:
    always), `needed` holds, or does not hold if `negated`.
    """

    where: str
    given: Pattern | None
    needed: Pattern
    negated: bool
    accepted: int = 0
    refused: int = 0

    def __str__(self) -> str:
        subject = self.where or "every object"
        given = f" with {_spelt(self.given)}" if self.given else ""
        return f"{subject}{given} {'never' if self.negated else 'always'} has {_spelt(self.needed)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class ActionKind:
    """The recorded effects and conditions of one kind of action."""

    effects: frozenset[Effect] = frozenset()
    conditions: tuple[Condition, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedRules:
    """The rules of one environment, as far as its recordings prove them."""

    predicates: frozenset[tuple[str, int]]
    """Predicates with their number of arguments."""
    constants: frozenset[str]
    """Names on nearly every sheet, and properties."""
    new_names: frozenset[str]
    """Names that actions brought onto sheets."""
    kinds: Mapping[str, ActionKind] = field(default_factory=dict)
    """By kind of action; only kinds that were accepted at least once."""

    def violation(self, sheet: WorldSheet, action: str, change: Change, *, success: bool) -> str | None:
        """Why these facts do not allow a change or a success by this action; None if they do."""
        for fact in (*change.ended, *change.begun):
            if (fact[0], len(fact) - 1) not in self.predicates:
                return f"no recording has a fact like {' '.join(fact)!r}"
        if not (change.ended or change.begun or success):
            return None
        shape, names = action_shape(sheet.facts, action)
        kind = self.kinds.get(shape)
        if kind is None:
            return f"no action like {shape!r} was accepted in the recordings"
        known = names_of(sheet.facts)
        found = effects_of(change, names, self.constants, known)
        unseen = [each for each in found if kind.effects.isdisjoint((each, *variants_of(each)))]
        if unseen:
            return f"{shape!r} never had the effect {' '.join(unseen[0])!r} in the recordings"
        objects = Objects(sheet.facts, names, self.constants)
        broken = next((each for each in kind.conditions if not objects.satisfy(each)), None)
        return None if broken is None else f"{shape!r}: {broken}"

    def write(self, path: Path) -> None:
        kinds = {
            shape: {
                "effects": sorted(map(list, kind.effects)),
                "conditions": [
                    [each.where, each.given, each.needed, each.negated, each.accepted, each.refused]
                    for each in kind.conditions
                ],
            }
            for shape, kind in sorted(self.kinds.items())
        }
        found = {
            "predicates": sorted(map(list, self.predicates)),
            "constants": sorted(self.constants),
            "new_names": sorted(self.new_names),
            "kinds": kinds,
        }
        with atomic_write(path) as partial:
            partial.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")

    @classmethod
    def read(cls, path: Path) -> Self | None:
        """None if there is no such file."""
        if not path.exists():
            return None
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return cls(
            predicates=frozenset((str(name), int(count)) for name, count in found["predicates"]),
            constants=frozenset(found["constants"]),
            new_names=frozenset(found["new_names"]),
            kinds={
                shape: ActionKind(
                    effects=frozenset(map(tuple, kind["effects"])),
                    conditions=tuple(_read_condition(*each) for each in kind["conditions"]),
                )
                for shape, kind in found["kinds"].items()
            },
        )


def _read_condition(
    where: str, given: list[str] | None, needed: list[str], negated: bool, accepted: int, refused: int
) -> Condition:
    return Condition(
        where=where,
        given=tuple(given) if given is not None else None,
        needed=tuple(needed),
        negated=negated,
        accepted=accepted,
        refused=refused,
    )


def action_shape(facts: Sequence[Fact], action: str) -> tuple[str, tuple[str, ...]]:
    """The action with a slot for each name among the facts and `#` for other numbers, and these names.

    >>> action_shape([("in", "red apple", "fridge"), ("raw", "apple")], "take red apple from fridge")
    ('take @0 from @1', ('red apple', 'fridge'))
    >>> action_shape([("checked", "element 25")], "click('25')")
    ("click('#')", ())
    """
    names: list[str] = []
    known = names_of(facts)

    def slot(found: re.Match[str]) -> str:
        if found[0] not in known:
            return "#"
        if found[0] not in names:
            names.append(found[0])
        return f"@{names.index(found[0])}"

    return _names_pattern(known).sub(slot, action), tuple(names)


@lru_cache(maxsize=4096)
def _names_pattern(names: frozenset[str]) -> re.Pattern[str]:
    longest_first = sorted(filter(None, names), key=lambda name: (-len(name), name))
    listed = "|".join([*map(re.escape, longest_first), r"\d+"])
    return re.compile(rf"(?<!\w)(?:{listed})(?!\w)")


def _spelt(pattern: Pattern) -> str:
    return f"`{' '.join(pattern)}`"


def effects_of(
    change: Change, names: Sequence[str], constants: Collection[str], known: Collection[str]
) -> Iterator[Effect]:
    def argument(name: str) -> str:
        if name in names:
            return f"@{names.index(name)}"
        return name if name in constants or name not in known else _OTHER

    for sign, facts in (("-", change.ended), ("+", change.begun)):
        for predicate, *arguments in facts:
            yield (sign, predicate, *map(argument, arguments))


def variants_of(effect: Effect) -> Iterator[Effect]:
    """The effect with any name in place of one of its constants."""
    for place in range(2, len(effect)):
        if effect[place][0] != "@":
            yield (*effect[:place], _OTHER, *effect[place + 1 :])


class Objects:
    """The patterns that hold of each object before an action."""

    def __init__(self, facts: Sequence[Fact], names: Sequence[str], constants: frozenset[str]) -> None:
        self._names = names
        self._constants = constants
        self._facts: dict[str, list[Fact]] = {}
        near = names_of(fact for fact in facts if not set(names).isdisjoint(fact[1:]))
        wanted = constants.union(names, near)
        for fact in facts:
            # With slots only their objects matter, what they are related to, and what constants are.
            for name in () if names and wanted.isdisjoint(fact) else set(fact[1:]):
                self._facts.setdefault(name, []).append(fact)
        self._patterns: dict[str, frozenset[Pattern]] = {}

    def satisfy(self, condition: Condition) -> bool:
        return all(
            (condition.needed in found) != condition.negated
            for found in self.of(condition.where)
            if condition.given is None or condition.given in found
        )

    def of(self, where: str) -> Iterator[frozenset[Pattern]]:
        """The patterns of the object in a slot, or those of every object."""
        if where:
            number = int(where[1:])
            if number < len(self._names):
                yield self.patterns(self._names[number])
        else:
            yield from map(self.patterns, self._facts)

    def patterns(self, thing: str) -> frozenset[Pattern]:
        if thing not in self._patterns:
            self._patterns[thing] = frozenset(self._made(thing))
        return self._patterns[thing]

    def _made(self, thing: str) -> Iterator[Pattern]:
        slots = {name: f"@{number}" for number, name in enumerate(self._names) if name != thing}
        for predicate, *arguments in self._facts.get(thing, ()):
            others = [name for name in arguments if name != thing]
            yield (predicate, *(_SELF if name == thing else _OTHER for name in arguments))
            if all(name in slots or name in self._constants for name in others):
                yield (
                    predicate,
                    *(_SELF if name == thing else slots.get(name, name) for name in arguments),
                )
            yield from ((_LINKED, slots[name]) for name in others if name in slots)
            if len(others) == 1 and thing in self._names:
                yield from self._joined(predicate, thing, others[0])

    def _joined(self, predicate: str, thing: str, shared: str) -> Iterator[Pattern]:
        """Another constant that stands in a relation to the same name: the actor at the object's place. Or
        to a name one relation further: the actor at the place of what holds the object."""
        yield from ((predicate, _SELF, *found) for found in self._constants_at(shared, thing))
        for further, *arguments in self._facts.get(shared, ()):
            if len(arguments) == 2 and arguments[0] == shared and arguments[1] != thing:
                for found in self._constants_at(arguments[1], thing):
                    yield (predicate, _SELF, further, *found)

    def _constants_at(self, place: str, thing: str) -> Iterator[Pattern]:
        for predicate, *arguments in self._facts.get(place, ()):
            if len(arguments) == 2 and arguments[1] == place and arguments[0] in self._constants - {thing}:
                yield (predicate, arguments[0])
