"""TextWorld in process: games generated from a seed, a step in milliseconds, an expert from any state.

The fast real environment, for tests and learning curves. An episode holds no thread, process or file, so many
run concurrently in one event loop.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from importlib.util import find_spec
from typing import Literal, cast, overload

from pydantic import Field

from dreamgym.envs.episode import Episode, check_count, check_expert, check_split
from dreamgym.envs.registry import EnvironmentSpec
from dreamgym.envs.textworld.annotator import TextWorldAnnotator
from dreamgym.envs.textworld.facts import FURNITURE, PLAYER, ROOMS, facts_for
from dreamgym.envs.textworld.goals import can_succeed, goal_met
from dreamgym.envs.textworld.logic_engine import REFUSALS, GameSession
from dreamgym.envs.textworld.task_source import (
    NAME,
    SEEDS,
    CookingGame,
    CookingOptions,
    GameSettings,
    Split,
    TreasureGame,
    hidden_facts,
    make_game,
    settings_of,
    task_of,
)
from dreamgym.errors import EpisodeOverError, MissingExtraError
from dreamgym.types import Outcome, State, Task, WorldSheet


class TextWorldOptions(CookingOptions):
    """Options of the TextWorld environment."""

    family: Literal["both", "cooking", "treasure"] = Field("both", description="the kind of game")
    level: int = Field(
        15,
        ge=1,
        le=25,
        description="treasure: from 1 in 5 rooms, from 11 in 10 with doors, from 21 in 20 with locks",
    )
    games: int | None = Field(None, ge=1, description="number of games in a split; none for all")
    horizon: int = Field(
        30, ge=1, description="actions after which an episode is truncated; 60 for many ingredients"
    )


class TextWorldEpisode(Episode):
    """One episode of a game."""

    experts = ("reader", "planner")
    """The planner knows the recipe without reading it; the reader reads it first."""
    finishing = ("prepare meal", "eat meal")
    """Actions that the policy `clumsy` tries too early."""

    async def _start(self) -> State:
        self._game = GameSession(make_game(settings_of(self.task)))
        return State(text=self._game.look(), admissible_actions=self._game.actions)

    async def _step(self, action: str) -> Outcome:
        game = self._game
        text = game.act(action)
        over = game.won or game.lost
        state = State(text=text, admissible_actions=() if over else game.actions)
        return Outcome(next_state=state, reward=float(game.won), terminated=over, success=game.won)

    async def world_sheet(self) -> WorldSheet:
        if self._phase == "not started":
            raise EpisodeOverError("world_sheet: start the episode first")
        return WorldSheet(facts=hidden_facts(settings_of(self.task)))

    async def expert_action(self, expert: str | None = None) -> str:
        check_expert(expert, self.experts)
        self._require_running("expert_action")
        return self._game.expert_action() if expert == "planner" else self._game.reader_action()


class TextWorldFactory:
    """Games by seed. Splits have disjoint seeds and, in cooking, different foods."""

    name = NAME
    splits: tuple[str, ...] = tuple(SEEDS)

    def __init__(self, options: TextWorldOptions) -> None:
        self._options = options

    async def tasks(self, split: str, count: int | None = None, *, seed: int = 0) -> Sequence[Task]:
        check_split(split, self.splits, self.name)
        seeds = SEEDS[cast(Split, split)][: self._options.games]
        check_count(split, len(seeds), count)
        order = random.Random(f"{split}:{seed}").sample(seeds, len(seeds))[:count]
        return _Tasks([self._settings(cast(Split, split), number) for number in order])

    def make(self, task: Task, *, seed: int = 0) -> TextWorldEpisode:
        return TextWorldEpisode(task, self._options.horizon)

    async def aclose(self) -> None:
        """Nothing is held open."""

    def _settings(self, split: Split, seed: int) -> GameSettings:
        options = self._options
        family = options.family if options.family != "both" else ("cooking", "treasure")[seed % 2]
        if family == "treasure":
            return TreasureGame(split=split, seed=seed, level=options.level)
        shared = options.model_dump(include=set(CookingOptions.model_fields))
        return CookingGame(split=split, seed=seed, **shared)


class _Tasks(Sequence[Task]):
    """Tasks generated on access: the instruction of a treasure game needs the game."""

    def __init__(self, games: Sequence[GameSettings]) -> None:
        self._games = games

    def __len__(self) -> int:
        return len(self._games)

    @overload
    def __getitem__(self, index: int) -> Task: ...
    @overload
    def __getitem__(self, index: slice) -> _Tasks: ...
    def __getitem__(self, index: int | slice) -> Task | _Tasks:
        return _Tasks(self._games[index]) if isinstance(index, slice) else task_of(self._games[index])


def open_textworld(options: TextWorldOptions) -> TextWorldFactory:
    if find_spec("textworld") is None:
        raise MissingExtraError("TextWorld", "alfworld")
    return TextWorldFactory(options)


SPEC = EnvironmentSpec(
    name=NAME,
    summary="generated text adventures: cook a meal, find a treasure",
    options=TextWorldOptions,
    open=open_textworld,
    splits=tuple(SEEDS),
    extra="alfworld",
    annotator=TextWorldAnnotator,
    actor=PLAYER,
    select_facts=facts_for,
    goal_met=goal_met,
    can_succeed=can_succeed,
    exchangeable=(ROOMS, FURNITURE),
    refusals=REFUSALS,
)
