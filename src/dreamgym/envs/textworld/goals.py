"""Whether a TextWorld game is won, lost or can be won, from the facts of its world sheet."""

from __future__ import annotations

from dreamgym.envs.textworld.facts import CUTS, HEATS, KITCHEN, MEAL, PLAYER, GameFacts
from dreamgym.envs.textworld.text_rendering import COOKING, CUTTING
from dreamgym.types import Task, WorldSheet


def goal_met(task: Task, sheet: WorldSheet) -> bool:
    """Whether the meal is eaten or, in a treasure game, the wanted object is carried.

    >>> hunger = Task(id="t", instruction="", environment="textworld")
    >>> goal_met(hunger, WorldSheet(facts=(("consumed", "meal"),)))
    True
    """
    facts = set(sheet.facts)
    wanted = {fact[1] for fact in facts if fact[0] == "wins" and len(fact) > 1}
    if wanted:
        return any(("in", thing, PLAYER) in facts for thing in wanted)
    return ("consumed", MEAL) in facts


def lost(sheet: WorldSheet) -> bool:
    """Whether an ingredient is spoilt, the meal burnt, or the wrong object carried."""
    known = GameFacts(sheet.facts)
    if any(known.carried(fact[1]) for fact in known.facts if fact[0] == "loses" and len(fact) > 1):
        return True
    if "burned" in known.marks[MEAL]:
        return True
    for food, wanted in known.recipe.items():
        marks = known.marks[food]
        made = marks & (COOKING | CUTTING)
        # A food that was used is part of the meal.
        if "used" not in marks and (marks & {"burned", "consumed"} or made - wanted):
            return True
    return False


def can_succeed(task: Task, sheet: WorldSheet) -> bool:
    """Whether the game can be won from these facts on, and is not won yet."""
    known = GameFacts(sheet.facts)
    if goal_met(task, sheet) or lost(sheet):
        return False
    rooms = _rooms_in_reach(known)
    wanted = [fact[1] for fact in known.facts if fact[0] == "wins" and len(fact) > 1]
    if wanted:
        return any(_in_reach(known, thing, rooms) for thing in wanted)
    if _in_reach(known, MEAL, rooms):
        return bool(known.marks[MEAL] & {"edible", "drinkable"})
    return (
        bool(known.recipe) and KITCHEN in rooms and all(_can_be_made(known, f, rooms) for f in known.recipe)
    )


def _can_be_made(known: GameFacts, food: str, rooms: set[str]) -> bool:
    if not _in_reach(known, food, rooms):
        return False
    marks = known.marks[food]
    missing = known.recipe[food] - marks
    heats = all(
        marks & {"raw", "needs_cooking"}
        and any(made == wanted and _in_reach(known, name, rooms) for name, made in HEATS.items())
        for wanted in missing & COOKING
    )
    sharp = any("sharp" in found and _in_reach(known, name, rooms) for name, found in known.marks.items())
    return heats and all(sharp and "uncut" in marks for _ in missing & set(CUTS.values()))


def _in_reach(known: GameFacts, thing: str, rooms: set[str], opening: frozenset[str] = frozenset()) -> bool:
    """`opening`: objects on the way; a key inside its own chest is out of reach."""
    chain = [where for _, where in known.chain(thing)]
    if not chain or chain[-1] not in rooms | {PLAYER}:
        return False
    return all(
        where not in opening and _can_be_opened(known, where, rooms, opening)
        for where in chain
        if "locked" in known.marks[where]
    )


def _can_be_opened(
    known: GameFacts, thing: str, rooms: set[str], opening: frozenset[str] = frozenset()
) -> bool:
    keys = [fact[1] for fact in known.facts if fact[0] == "match" and fact[2:3] == (thing,)]
    return any(_in_reach(known, key, rooms, opening | {thing}) for key in keys)


def _rooms_in_reach(known: GameFacts) -> set[str]:
    """Rooms that the player can reach; a locked door opens if its key is in reach."""
    found, grown = {known.room}, True
    while grown:
        grown = False
        for room in sorted(found):
            for _, there, door in known.exits(room):
                shut = door is not None and "locked" in known.marks[door]
                if there not in found and not (shut and not _can_be_opened(known, str(door), found)):
                    found.add(there)
                    grown = True
    return found
