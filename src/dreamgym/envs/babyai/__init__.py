"""BabyAI in words: levels of MiniGrid, the view told as relative positions, actions as words.

An episode holds no thread, process or file, so many run concurrently in one event loop. There are no hints
for experience models: no facts, no annotator, no goal check.
"""

from __future__ import annotations

import os
import random
from collections.abc import Sequence
from importlib.util import find_spec
from typing import overload

from pydantic import Field, field_validator

from dreamgym.config import Section, nearest_name
from dreamgym.envs.babyai.grid import ACTIONS, GridGame, level_names
from dreamgym.envs.episode import Episode, check_count, check_split
from dreamgym.envs.registry import EnvironmentSpec
from dreamgym.errors import ConfigError, MissingExtraError
from dreamgym.types import Outcome, State, Task

NAME = "babyai"
LEVELS = (
    "GoToRedBallNoDists", "GoToRedBall", "GoToObj", "GoToLocal", "GoToDoor", "PickupLoc", "OpenDoor",
    "UnlockLocal",
)  # fmt: skip
"""In one room, roughly from easy to hard."""
SEEDS = {"train": range(100_000), "validation": range(100_000, 110_000), "test": range(200_000, 210_000)}


class BabyAIOptions(Section):
    """Options of the BabyAI environment."""

    levels: tuple[str, ...] = Field(LEVELS, min_length=1, description="names without BabyAI- and -v0")
    horizon: int = Field(30, ge=1, description="actions after which an episode is truncated")

    @field_validator("levels", mode="before")
    @classmethod
    def _one_or_more(cls, given: object) -> object:
        return tuple(each.strip() for each in given.split(",")) if isinstance(given, str) else given


class BabyAIEpisode(Episode):
    """One episode of a level."""

    async def _start(self) -> State:
        self._game = GridGame(str(self.task.parameters["level"]), int(str(self.task.parameters["seed"])))
        return State(text=self._game.view(), admissible_actions=self._game.actions())

    async def _step(self, action: str) -> Outcome:
        if action.strip() not in ACTIONS:
            known = ", ".join(ACTIONS)
            state = State(text=f"You can only: {known}.", admissible_actions=self._game.actions())
            return Outcome(next_state=state, reward=0.0, terminated=False)
        text, won, over = self._game.act(action.strip())
        state = State(text=text, admissible_actions=() if over else self._game.actions())
        return Outcome(next_state=state, reward=float(won), terminated=over, success=won)


class BabyAIFactory:
    """Levels by seed; splits have disjoint seeds."""

    name = NAME
    splits: tuple[str, ...] = tuple(SEEDS)

    def __init__(self, options: BabyAIOptions) -> None:
        self._options = options

    async def tasks(self, split: str, count: int | None = None, *, seed: int = 0) -> Sequence[Task]:
        check_split(split, self.splits, self.name)
        seeds = SEEDS[split]
        check_count(split, len(seeds), count)
        order = random.Random(f"{split}:{seed}").sample(seeds, len(seeds))[:count]
        return _Tasks(order, split, self._options.levels)

    def make(self, task: Task, *, seed: int = 0) -> BabyAIEpisode:
        return BabyAIEpisode(task, self._options.horizon)

    async def aclose(self) -> None:
        """Nothing is held open."""


class _Tasks(Sequence[Task]):
    """Tasks generated on access: the instruction needs the level."""

    def __init__(self, seeds: Sequence[int], split: str, levels: tuple[str, ...]) -> None:
        self._seeds = seeds
        self._split = split
        self._levels = levels

    def __len__(self) -> int:
        return len(self._seeds)

    @overload
    def __getitem__(self, index: int) -> Task: ...
    @overload
    def __getitem__(self, index: slice) -> _Tasks: ...
    def __getitem__(self, index: int | slice) -> Task | _Tasks:
        if isinstance(index, slice):
            return _Tasks(self._seeds[index], self._split, self._levels)
        seed = self._seeds[index]
        level = self._levels[seed % len(self._levels)]
        return Task(
            id=f"{level}-{seed}",
            instruction=GridGame(level, seed).mission,
            environment=NAME,
            split=self._split,
            family=level,
            parameters={"level": level, "seed": seed},
        )


def open_babyai(options: BabyAIOptions) -> BabyAIFactory:
    if find_spec("minigrid") is None:
        raise MissingExtraError("BabyAI", "babyai")
    os.environ.setdefault("PYGAME_HIDE_SUPPORT_PROMPT", "1")  # it prints when it is imported
    known = level_names()
    for level in options.levels:
        if level not in known:
            raise ConfigError(
                f"environment.options.levels: unknown level {level!r}{nearest_name(level, known)}"
            )
    return BabyAIFactory(options)


SPEC = EnvironmentSpec(
    name=NAME,
    summary="instructions in a grid world, told in words: go to, pick up, open, unlock",
    options=BabyAIOptions,
    open=open_babyai,
    splits=tuple(SEEDS),
    extra="babyai",
)
