"""The world sheet in use: kept current by declared changes, and told only as far as an action touches it.

A sheet lists what was true at the start. During an episode every prediction declares which facts end and
which begin, and plain code applies them; so the present is never spread over a long history that a model
would have to add up again. What is shown to the model is the part that the action touches, nearest to the
answer, because copying from nearby is what small models do well.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from dreamgym.types import Change, Fact, WorldSheet


def apply(sheet: WorldSheet, change: Change) -> WorldSheet:
    """The sheet after a change. Facts that begin go to the end; ending what is not there does nothing.

    >>> before = WorldSheet(facts=(("in", "mug 1", "desk 1"),))
    >>> apply(before, Change(ended=(("in", "mug 1", "desk 1"),), begun=(("holds", "agent", "mug 1"),))).facts
    (('holds', 'agent', 'mug 1'),)
    """
    gone = {*change.ended, *change.begun}
    return WorldSheet(facts=(*(fact for fact in sheet.facts if fact not in gone), *change.begun))


def difference(before: WorldSheet, after: WorldSheet) -> Change:
    """The change that leads from one sheet to another."""
    return Change(
        ended=tuple(fact for fact in before.facts if fact not in after.facts),
        begun=tuple(fact for fact in after.facts if fact not in before.facts),
    )


def touched(sheet: WorldSheet, action: str, *, actor: str | None = None) -> tuple[Fact, ...]:
    """The facts an action may depend on: about what it names, about the actor, and about where the actor is.

    One step further than the names themselves: whatever shares a place with the actor is included, since
    an action happens there.
    """
    names = {name for fact in sheet.facts for name in fact[1:]}
    wanted = {name for name in names if _mentions(action, name)}
    if actor is not None:
        wanted.add(actor)
        wanted.update(
            fact[2]
            for fact in sheet.facts
            if len(fact) == 3 and fact[1] == actor and fact[0].startswith("at")
        )
    return tuple(fact for fact in sheet.facts if wanted.intersection(fact[1:]))


def tell(facts: Iterable[Fact], *, order: Sequence[str] = ()) -> list[str]:
    """Facts as short lines, grouped by what they are about; names in `order` come last, nearest the answer.

    >>> tell([("in", "apple 1", "fridge 1"), ("in", "egg 2", "fridge 1"), ("openable", "fridge 1")])
    ['fridge 1: openable', 'in fridge 1: apple 1, egg 2']
    """
    marks: dict[str, list[str]] = {}
    relations: dict[tuple[str, str], list[str]] = {}
    for fact in facts:
        predicate, *arguments = fact
        if len(arguments) == 1:
            marks.setdefault(arguments[0], []).append(predicate)
        else:
            relations.setdefault((predicate, arguments[-1]), []).append(" ".join(arguments[:-1]))
    lines = [(name, f"{name}: {', '.join(sorted(words))}") for name, words in marks.items()]
    lines += [
        (place, f"{predicate} {place}: {', '.join(sorted(things, key=_listing))}")
        for (predicate, place), things in relations.items()
    ]
    rank = {name: number for number, name in enumerate(order, 1)}
    lines.sort(key=lambda line: (rank.get(line[0], 0), line[0], line[1]))
    return [text for _, text in lines]


def listings(sheet: WorldSheet) -> list[str]:
    """Per relation the names of what stands in the open: not inside something that has a place of its own.

    >>> desks = (("at", "desk 1", "loc 2"), ("at", "desk 2", "loc 1"))
    >>> listings(WorldSheet(facts=(*desks, ("in", "mug 1", "desk 1"))))
    ['at: desk 2, desk 1']
    """
    relations = [fact for fact in sheet.facts if len(fact) > 2]
    placed = {fact[1] for fact in relations}
    found: dict[str, set[str]] = {}
    for predicate, name, place, *_ in relations:
        if place not in placed:
            found.setdefault(predicate, set()).add(name)
    return [
        f"{predicate}: {', '.join(sorted(names, key=_listing))}" for predicate, names in sorted(found.items())
    ]


def kinds(sheet: WorldSheet) -> list[str]:
    """The kinds of things that stand somewhere: names less their numbers.

    >>> kinds(WorldSheet(facts=(("in", "mug 2", "desk 1"), ("in", "mug 1", "desk 1"), ("closed", "safe 1"))))
    ['desk', 'mug']
    """
    names = {name for fact in sheet.facts if len(fact) > 2 for name in fact[1:]}
    return sorted({_listing(name)[0] for name in names})


def _listing(name: str) -> tuple[str, int]:
    """Kinds in alphabetical order, the highest number first: as the household engine lists things."""
    kind, _, number = name.rpartition(" ")
    return (kind, -int(number)) if number.isdigit() else (name, 0)


def _mentions(action: str, name: str) -> bool:
    start = action.find(name)
    while start >= 0:
        end = start + len(name)
        before, after = action[start - 1 : start], action[end : end + 1]
        if not before.isalnum() and not after.isalnum():
            return True
        start = action.find(name, start + 1)
    return False
