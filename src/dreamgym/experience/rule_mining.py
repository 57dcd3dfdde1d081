"""Mines `recorded_rules` from recorded transitions whose environment disclosed its facts.

A condition is kept if no accepted action of its kind contradicts it, and so many refused actions do that it
is hardly chance.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass

from dreamgym.experience.recorded_rules import (
    ActionKind,
    Condition,
    Effect,
    Objects,
    Pattern,
    RecordedRules,
    action_shape,
    effects_of,
    variants_of,
)
from dreamgym.experience.world_sheet import names_of
from dreamgym.protocols import Annotator
from dreamgym.types import Change, Fact, Trajectory

_MIN_ACCEPTED = 20
"""Accepted observations that a condition needs."""
_MAX_CHANCE = 0.01
"""Probability that a condition is none: that by chance only refused actions break it."""
_COMMON = 0.9
"""A name in this share of the sheets is a constant."""
_ANY_NAME = 3
"""Different constants at one place of an effect, after which any name may stand there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedStep:
    """One recorded action with the facts before it."""

    facts: tuple[Fact, ...]
    action: str
    change: Change
    refused: bool
    first: bool = True
    """Whether it is the first of its episode."""


def _recorded_effects(
    seen: Sequence[tuple[RecordedStep, tuple[str, ...]]], constants: Collection[str]
) -> frozenset[Effect]:
    """The effects of a kind; one that was seen with several constants may have any name there."""
    effects = {
        effect
        for step, names in seen
        if not step.refused
        for effect in effects_of(step.change, names, constants, names_of(step.facts))
    }
    variants = Counter(variant for effect in effects for variant in set(variants_of(effect)))
    return frozenset(effects | {each for each, count in variants.items() if count >= _ANY_NAME})


async def recorded_steps(
    trajectories: Iterable[Trajectory], annotator: Annotator, refusals: Collection[str]
) -> AsyncIterator[RecordedStep]:
    """The steps of trajectories whose environment disclosed its facts, kept current by the annotator."""
    for trajectory in trajectories:
        if trajectory.sheet is None:
            continue
        sheet, annotation = trajectory.sheet, await annotator.annotate(trajectory)
        for position, transition in enumerate(trajectory.transitions):
            note = annotation.notes[position]
            yield RecordedStep(
                facts=sheet.facts,
                action=transition.action,
                change=note.change,
                refused=transition.outcome.next_state.text in refusals,
                first=position == 0,
            )
            sheet = sheet.after(note.change)


def mine_rules(steps: Iterable[RecordedStep], *, actor: str | None = None) -> RecordedRules:
    """The rules that recorded steps prove."""
    found = list(steps)
    constants = _constants(found, actor)
    predicates: set[tuple[str, int]] = set()
    new_names: set[str] = set()
    shapes: dict[str, list[tuple[RecordedStep, tuple[str, ...]]]] = {}
    for step in found:
        shape, names = action_shape(step.facts, step.action)
        shapes.setdefault(shape, []).append((step, names))
        changed = (*step.change.ended, *step.change.begun)
        predicates.update((fact[0], len(fact) - 1) for fact in changed)
        if step.first:
            predicates.update((fact[0], len(fact) - 1) for fact in step.facts)
        if step.change.begun:
            new_names |= names_of(step.change.begun) - names_of(step.facts)
    kinds = {
        shape: ActionKind(
            effects=_recorded_effects(seen, constants),
            conditions=_conditions(seen, constants),
        )
        for shape, seen in shapes.items()
        if not all(step.refused for step, _ in seen)
    }
    return RecordedRules(
        predicates=frozenset(predicates),
        constants=constants,
        new_names=frozenset(new_names),
        kinds=kinds,
    )


def _constants(steps: Sequence[RecordedStep], actor: str | None) -> frozenset[str]:
    sheets = {step.facts for step in steps if step.first}
    counts = Counter(name for facts in sheets for name in names_of(facts))
    properties = {fact[0] for facts in sheets for fact in facts if len(fact) == 2}
    common = {name for name, count in counts.items() if count >= _COMMON * len(sheets)}
    return frozenset(common | (properties & counts.keys()) | ({actor} if actor else set()))


def _conditions(
    seen: Sequence[tuple[RecordedStep, tuple[str, ...]]], constants: frozenset[str]
) -> tuple[Condition, ...]:
    """The conditions that every accepted step meets and some refused step does not."""
    if not any(step.refused for step, _ in seen):
        return ()
    places = tuple(f"@{number}" for number in range(len(seen[0][1]))) or ("",)
    always: dict[tuple[str, Pattern | None], set[Pattern]] = {}
    ever: dict[tuple[str, Pattern | None], set[Pattern]] = {}
    support: Counter[tuple[str, Pattern | None]] = Counter()
    objects = [(step.refused, Objects(step.facts, names, constants)) for step, names in seen]
    for refused, each in objects:
        for where, given, patterns in () if refused else _roles(each, places):
            support[where, given] += 1
            always.setdefault((where, given), set(patterns)).intersection_update(patterns)
            ever.setdefault((where, given), set()).update(patterns)
    refusals = Counter(
        role for refused, each in objects if refused for role in {role[:2] for role in _roles(each, places)}
    )
    broken: Counter[tuple[str, Pattern | None, Pattern, bool]] = Counter()
    for refused, each in objects:
        if refused:
            broken.update(
                {
                    (where, given, needed, negated)
                    for where, given, patterns in _roles(each, places)
                    if support[where, given] >= _MIN_ACCEPTED
                    for negated, wrong in (
                        (False, always[where, given] - patterns),
                        (True, patterns - ever[where, given]),
                    )
                    for needed in wrong
                }
            )
    return tuple(
        Condition(
            where=where,
            given=given,
            needed=needed,
            negated=negated,
            accepted=support[where, given],
            refused=count,
        )
        for (where, given, needed, negated), count in sorted(broken.items(), key=str)
        if _by_chance(count, refusals[where, given], support[where, given]) < _MAX_CHANCE
        and (given is None or (where, None, needed, negated) not in broken)
    )


def _by_chance(broken: int, refused: int, accepted: int) -> float:
    """The probability that only refused actions break a condition if it does not matter."""
    return (refused / (refused + accepted)) ** broken


def _roles(
    objects: Objects, places: Sequence[str]
) -> Iterator[tuple[str, Pattern | None, frozenset[Pattern]]]:
    for where in places:
        for patterns in objects.of(where):
            if where:
                yield where, None, patterns
            yield from ((where, given, patterns) for given in patterns)
