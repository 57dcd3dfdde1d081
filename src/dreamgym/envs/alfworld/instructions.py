"""Parses household instructions: the goal of a sentence in the benchmark's wording.

The templates are those of the benchmark's games. Generated instructions may differ in articles, prepositions
and spelling; the resulting task has the benchmark's wording.
"""

from __future__ import annotations

import functools
import importlib.util
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dreamgym.envs.alfworld.generate import FAMILIES, SPLITS, generate_game, goal_parameters
from dreamgym.envs.alfworld.goals import can_succeed
from dreamgym.envs.alfworld.rooms import affordances
from dreamgym.errors import MissingExtraError
from dreamgym.types import Task, WorldSheet

_LONGEST = 200
"""Maximum characters of an instruction; the benchmark's longest has 60."""
_EVALUATED = 200
"""Generated games of a split whose instructions count as those of the evaluation."""
_LAMPS = ("DeskLamp", "FloorLamp")
_SLOT = re.compile(r"\{(\w+)\}")
_NAME = r"(?P<{0}>[a-z]+)"
_FREE_NAME = r"(?:(?:a|an|the|some|one) )?(?P<{0}>[a-z]+(?: [a-z]+){{0,2}})"


def task_from_instruction(instruction: str) -> Task | None:
    """The task of an instruction; None if it is no goal of a household game.

    Its id is the name of the goal, so two wordings of one goal give one task. It has no game: it exists only
    in the dream, on a world sheet where it can succeed.

    >>> task = task_from_instruction("Put a hot Potato into the side table.")
    >>> task.instruction, task.id
    ('put a hot potato in sidetable', 'generated/pick_heat_then_place_in_recep-Potato-None-SideTable')
    >>> task_from_instruction("put a hot pillow in sidetable") is None
    True
    """
    if len(instruction) > _LONGEST:
        return None
    _need_tables()
    text = " ".join(instruction.lower().split()).rstrip(".! ")
    for freely in (False, True):
        for family, template, pattern in _patterns(freely):
            found = pattern.fullmatch(text)
            words = _classes(family, found.groupdict()) if found else None
            if words is not None:
                return _task(family, template, words)
    return None


def can_succeed_here(task: Task, sheet: WorldSheet) -> bool:
    """`goals.can_succeed` with the benchmark's table of receptacles and objects."""
    _need_tables()
    return can_succeed(task, sheet, contains=affordances().contains)


async def evaluation_instructions(data: Path | None) -> list[str]:
    """Instructions of the official splits other than ``train``; of generated games, those of the first 200.

    Args:
        data: folder of official games; None: ``ALFWORLD_DATA``, else generated ones.
    """
    _need_tables()
    from dreamgym.envs.alfworld.task_source import OfficialGames, official_folder

    async def never(game: Path, goal: dict[str, Any]) -> None:
        """Official games are not solved again."""

    folder = data or official_folder()
    if folder is None:
        return [
            generate_game(split, 0, index, 0).instruction
            for split in SPLITS
            for index in range(_EVALUATED)
            if split != "train"
        ]
    games = OfficialGames.at(folder)
    splits = [split for split in games.splits if split != "train"]
    return [task.instruction for split in splits for task in await games.tasks(split, None, 0, never)]


def _task(family: str, template: str, words: Mapping[str, str]) -> Task:
    goal = goal_parameters(family, words["obj"], words.get("recep", ""), words.get("toggle", ""))
    return Task(
        id=f"generated/{family}-{words['obj']}-None-{words.get('recep') or words['toggle']}",
        instruction=template.format(**{slot: word.lower() for slot, word in words.items()}),
        environment="alfworld",
        family=family,
        origin="generated",
        parameters={"source": "instruction", "goal": goal},
    )


def _classes(family: str, words: Mapping[str, str]) -> dict[str, str] | None:
    """The benchmark's classes of the words; None if the goal is impossible with them."""
    tables = affordances()
    thing = _things().get(_joined(words["obj"]))
    if thing is None and family == "pick_two_obj_and_place":
        thing = _things().get(_joined(words["obj"]).removesuffix("s"))
    able = tables.suitable.get(family)
    if thing is None or (able is not None and thing not in able):
        return None
    if "toggle" in words:
        lamp = {name.lower(): name for name in _LAMPS}.get(_joined(words["toggle"]))
        return {"obj": thing, "toggle": lamp} if lamp else None
    stand = _stands().get(_joined(words["recep"]))
    if stand is None or thing not in tables.contains[stand]:
        return None
    return {"obj": thing, "recep": stand}


@functools.cache
def _things() -> Mapping[str, str]:
    """Objects that can be carried, by lower-case name."""
    held = frozenset[str]().union(*affordances().contains.values())
    return {name.lower(): name for name in sorted(held) if not name.endswith("Sliced")}


@functools.cache
def _stands() -> Mapping[str, str]:
    """Receptacles with a fixed place, by lower-case name."""
    tables = affordances()
    return {name.lower(): name for name in tables.contains if name not in tables.holds_things}


@functools.cache
def _patterns(freely: bool) -> tuple[tuple[str, str, re.Pattern[str]], ...]:
    """(family, template, what it matches) of every wording; `freely`: any articles and prepositions."""
    from alfworld.gen import goal_library

    return tuple(
        (family, template, re.compile(" ".join(_word(word, freely) for word in _words(template, freely))))
        for family in FAMILIES
        for template in goal_library.gdict[family]["templates"]
    )


def _words(template: str, freely: bool) -> list[str]:
    words: list[str] = template.split()
    return [word for word in words if not (freely and word in ("a", "some", "the"))]


def _word(word: str, freely: bool) -> str:
    slot = _SLOT.fullmatch(word)
    if slot:
        return (_FREE_NAME if freely else _NAME).format(slot[1])
    if freely and word in ("in", "on"):
        return "(?:in|on|into|onto)"
    if freely and word in ("clean", "hot", "cool"):
        return rf"(?:(?:a|an|the|some) )?{word}"
    return re.escape(word)


def _joined(words: str) -> str:
    return words.replace(" ", "")


@functools.cache
def _need_tables() -> None:
    if importlib.util.find_spec("alfworld") is None:
        raise MissingExtraError("reading household instructions", "alfworld")
