"""Annotates TextWorld transitions by rules from the hidden facts, without a language model.

The rules state what an action requires, what it changes, and what it means for the recipe. An experience
model is fine-tuned to write these notes as its reasoning.
"""

from __future__ import annotations

from collections.abc import Iterator

from dreamgym.envs.textworld.facts import (
    CUTS,
    HEATS,
    KITCHEN,
    MEAL,
    PLAYER,
    SHUT,
    GameFacts,
    parsed,
    place_of,
    thing_line,
    wanted_line,
)
from dreamgym.envs.textworld.logic_engine import REFUSALS
from dreamgym.envs.textworld.text_rendering import COOKING, CUTTING
from dreamgym.types import Annotation, Change, Fact, Note, Trajectory, Transition

_OPENING = {
    "open": ("closed", "open"),
    "close": ("open", "closed"),
    "unlock": ("locked", "closed"),
    "lock": ("closed", "locked"),
}
"""The state of a door or container before and after each action."""


class TextWorldAnnotator:
    """Annotates by rules."""

    name = "textworld-rules"

    async def annotate(self, trajectory: Trajectory) -> Annotation:
        if trajectory.sheet is None:
            raise ValueError(f"trajectory {trajectory.id!r} has no world sheet to explain it from")
        facts = set(trajectory.sheet.facts)
        notes = []
        for transition in trajectory.transitions:
            note = explain(GameFacts(facts), transition)
            facts.difference_update(note.change.ended)
            facts.update(note.change.begun)
            notes.append(note)
        hunt = any(fact[0] == "wins" for fact in trajectory.sheet.facts)
        return Annotation(
            plan="search the house and take it"
            if hunt
            else "read the cookbook, gather, cook and cut as it says, prepare the meal and eat it",
            success_mode="the thing asked for is in hand" if hunt else "the meal is eaten",
            failure_mode="the wrong thing is taken"
            if hunt
            else "an ingredient is eaten, burnt, or cooked or cut in another way than the recipe's",
            notes=tuple(notes),
        )


def explain(known: GameFacts, transition: Transition) -> Note:
    kind, *names = parsed(transition.action)
    thing, other = (known.named(name) for name in names)
    parts: list[str] = []
    for check, met in checks(known, kind, thing, other):
        parts.append(f"{check}: {_yes(met)}")
        if not met:
            break
    if transition.outcome.next_state.text in REFUSALS:
        return Note(reasoning=". ".join([*parts, "not possible"]) + ".")
    if (kind, thing) == ("examine", "cookbook"):
        # Quoted first: after the long start of the cookbook, a small model loses the ingredients.
        parts += [wanted_line(known, food) for food in known.recipe]
    parts += _goal_check(known, kind, thing, other)
    if transition.outcome.success:
        parts.append("the task is done")
    elif transition.outcome.terminated:
        parts.append("all is lost")
    return Note(
        reasoning=". ".join(parts or ["nothing changes"]) + ".", change=changes(known, kind, thing, other)
    )


def changes(known: GameFacts, kind: str, thing: str, other: str) -> Change:
    """The change of an action whose conditions are met."""
    carried: Fact = ("in", thing, PLAYER)
    if kind == "go":
        there = next((room for way, room, _ in known.exits(known.room) if way == thing), known.room)
        return Change(ended=(("at", PLAYER, known.room),), begun=(("at", PLAYER, there),))
    if kind in _OPENING:
        before, after = _OPENING[kind]
        return Change(ended=((before, thing),), begun=((after, thing),))
    if kind == "take":
        how, where = known.place.get(thing, ("at", "nowhere"))
        return Change(ended=((how, thing, where),), begun=(carried,))
    laid = {"drop": ("at", thing, known.room), "put": ("on", thing, other), "insert": ("in", thing, other)}
    if kind in laid:
        return Change(ended=(carried,), begun=(laid[kind],))
    if kind in ("eat", "drink"):
        able = "edible" if kind == "eat" else "drinkable"
        return Change(ended=(carried, (able, thing)), begun=(("consumed", thing),))
    if kind == "cook":
        return _cooked(known, thing, HEATS.get(other, "fried"))
    if kind in CUTS:
        return Change(ended=(("uncut", thing),), begun=((CUTS[kind], thing),))
    return _prepared(known) if kind == "prepare" else Change()


def _prepared(known: GameFacts) -> Change:
    meal = (("in", MEAL, PLAYER), ("edible", MEAL), ("raw", MEAL))
    return Change(
        ended=tuple(("in", food, PLAYER) for food in known.recipe),
        begun=(*meal, *(("used", food) for food in known.recipe)),
    )


def _cooked(known: GameFacts, thing: str, made: str) -> Change:
    marks = known.marks[thing]
    if "needs_cooking" in marks:
        return Change(
            ended=(("needs_cooking", thing), ("inedible", thing)),
            begun=((made, thing), ("edible", thing), ("cooked", thing)),
        )
    if "raw" in marks:
        return Change(ended=(("raw", thing),), begun=((made, thing), ("cooked", thing)))
    return Change(
        ended=(("cooked", thing), ("edible", thing)), begun=(("burned", thing), ("inedible", thing))
    )


def checks(known: GameFacts, kind: str, thing: str, other: str) -> Iterator[tuple[str, bool]]:
    """The conditions of an action in order, as text with the actual value, each with whether it is met.

    Both values are written before the verdict, which `explain` adds: small models copy well and compare
    adjacent values.
    """
    if kind == "unknown":
        yield "no such action", False
    elif kind == "go":
        yield from _way(known, thing)
    elif kind == "look":
        yield f"player in {known.room}", True
    elif kind == "inventory":
        # No number: a model that is fine-tuned to copy numbers does not learn to count.
        yield f"player carries {'something' if known.held(PLAYER) else 'nothing'}", True
    elif kind == "prepare":
        yield from _meal(known)
    elif kind in ("open", "close", "unlock", "lock"):
        yield from _opening(known, kind, thing, other)
    elif kind in ("take", "examine"):
        yield from _reach(known, thing)
        if known.ways_to(thing) and (kind == "take" or known.recipe):
            yield f"{thing} is a door", False  # doors can be examined in treasure games only
        elif kind == "take":
            yield from _taking(known, thing, other)
    else:
        yield _carried(known, thing)
        yield from _use(known, kind, thing, other)


def _way(known: GameFacts, way: str) -> Iterator[tuple[str, bool]]:
    found = next((each for each in known.exits(known.room) if each[0] == way), None)
    yield f"{way} of {known.room} is {found[1] if found else 'nothing'}", found is not None
    door = found[2] if found else None
    if door is not None:
        yield _stated(known, door, "open")


def _meal(known: GameFacts) -> Iterator[tuple[str, bool]]:
    if not known.recipe:
        yield "no recipe", False
        return
    yield _compared("needs", KITCHEN, known.room)
    for food in known.recipe:
        yield _carried(known, food)
        quote = f"{wanted_line(known, food)}; "
        for name, group, none in (("cooking", COOKING, "raw"), ("cutting", CUTTING, "uncut")):
            asked = " and ".join(sorted(known.recipe[food] & group)) or none
            there = " and ".join(sorted(known.marks[food] & group)) or none
            yield _compared(f"{quote}{name}", there, asked)
            quote = ""


def _opening(known: GameFacts, kind: str, thing: str, other: str) -> Iterator[tuple[str, bool]]:
    yield from _reach(known, thing)
    yield _stated(known, thing, _OPENING[kind][0])
    if other:
        yield _carried(known, other)
        fits = next((fact[2] for fact in sorted(known.facts) if fact[:2] == ("match", other)), "nothing")
        yield _compared("fits", fits, thing)
    elif kind == "open" and "fixed" in known.marks[thing]:
        yield f"holds {'something' if known.held(thing) else 'nothing'}", True


def _taking(known: GameFacts, thing: str, other: str) -> Iterator[tuple[str, bool]]:
    if "fixed" in known.marks[thing]:
        yield f"{thing} is fixed", False
    asked, where = other or known.room, known.place.get(thing, ("at", "nowhere"))[1]
    yield _compared("asked from", asked, where)


def _use(known: GameFacts, kind: str, thing: str, other: str) -> Iterator[tuple[str, bool]]:
    """Conditions of an action with a carried object."""
    marks, tool = known.marks[thing], known.marks[other]
    if kind in ("eat", "drink"):
        able = "edible" if kind == "eat" else "drinkable"
        yield _stated(known, thing, able)
    elif kind in CUTS:
        yield _stated(known, thing, "uncut")
        yield _carried(known, other)
        yield f"{other} {'sharp' if 'sharp' in tool else 'blunt'}", "sharp" in tool
    elif other:
        yield from _reach(known, other)
        if kind == "cook":
            heated = "raw" if marks & {"raw", "needs_cooking"} else "cooked" if "cooked" in marks else ""
            yield (
                f"{thing} {heated or 'is not for cooking'}",
                heated == "raw" or {"cooked", "edible"} <= marks,
            )
            yield f"{other} makes it {_made(known, thing, other)}", other in HEATS
        else:
            opens = sorted(tool & {"open", *SHUT}) or ["a place" if "fixed" in tool else "no place"]
            yield f"{other} is {opens[0]}", opens[0] == ("open" if kind == "insert" else "a place")


def _reach(known: GameFacts, thing: str) -> Iterator[tuple[str, bool]]:
    places = [where for _, where in known.chain(thing)]
    if known.ways_to(thing) or not places or places[-1] == PLAYER:
        yield f"{thing} {_place(known, thing)}, player in {known.room}", known.within_reach(thing)
        return
    yield _compared(f"{thing} {_place(known, thing)}", places[-1], known.room)
    shut = next((where for where in places if known.marks[where] & SHUT), None)
    if shut is not None:
        yield f"{shut} closed", False


def _carried(known: GameFacts, thing: str) -> tuple[str, bool]:
    """First the line of the prompt about the object, so that the compared values are adjacent."""
    return _compared(f"{thing_line(known, thing)}; {thing}", _place(known, thing), "carried")


def _place(known: GameFacts, thing: str) -> str:
    """The place of an object, as in the prompt."""
    return place_of(known, thing) or "nowhere"


def _stated(known: GameFacts, thing: str, needed: str) -> tuple[str, bool]:
    groups = (
        ("open", "closed", "locked"),
        ("edible", "inedible", "drinkable"),
        ("uncut", *sorted(CUTTING)),
    )
    asked = next(group for group in groups if needed in group)
    actual = [mark for mark in asked if mark in known.marks[thing]]
    return _compared(f"{thing} is", " and ".join(actual) or "neither", needed)


def _compared(lead: str, left: str, right: str) -> tuple[str, bool]:
    """A comparison of the actual with the needed value."""
    return _comparison(lead, left, right), left == right


def _comparison(lead: str, left: str, right: str) -> str:
    """The form whose verdict is checked in a model's reasoning (`experience.reply_format`)."""
    return f"{lead}, {left} = {right}"


def _made(known: GameFacts, thing: str, heater: str) -> str:
    raw = known.marks[thing] & {"raw", "needs_cooking"}
    return HEATS.get(heater, "nothing") if raw else "burned"


def _goal_check(known: GameFacts, kind: str, thing: str, other: str) -> Iterator[str]:
    """Comparisons of the goal or recipe with the result, one at a time."""
    if kind == "take":
        yield from (
            f"{_comparison(fact[0], fact[1], thing)}: {_yes(fact[1] == thing)}"
            for fact in sorted(known.facts)
            if fact[0] in ("wins", "loses")
        )
    if kind not in ("cook", "eat", "drink", *CUTS) or thing == MEAL:
        return
    wanted = known.recipe.get(thing)
    if wanted is None:
        yield f"recipe {thing} no"
    elif kind in ("eat", "drink"):
        yield f"recipe {thing} yes"
    else:
        group, made = (CUTTING, CUTS[kind]) if kind in CUTS else (COOKING, _made(known, thing, other))
        asked = " and ".join(sorted(wanted & group)) or "none"
        yield f"{_comparison(f'recipe {thing}', asked, made)}: {_yes(made == asked)}"


def _yes(true: bool) -> str:
    return "yes" if true else "no"
