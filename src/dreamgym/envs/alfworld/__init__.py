"""ALFWorld, the paper's household benchmark, with its original simulator.

The registry finds `SPEC`. By default games are generated from the data in the `alfworld` wheel; `data` (or
``ALFWORLD_DATA``) selects official games. See `task_source`, `episode_process` and `experts`.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from dreamgym.config import Section
from dreamgym.envs.alfworld.annotator import AGENT, REFUSAL, HouseholdAnnotator
from dreamgym.envs.alfworld.goals import goal_met
from dreamgym.envs.alfworld.instructions import (
    can_succeed_here,
    evaluation_instructions,
    task_from_instruction,
)
from dreamgym.envs.alfworld.rationales import think
from dreamgym.envs.episode import Episode, check_count, check_expert
from dreamgym.envs.process_pool import EpisodeProcess, ProcessPool
from dreamgym.envs.registry import EnvironmentSpec
from dreamgym.errors import EpisodeFailedError, EpisodeOverError, MissingExtraError
from dreamgym.types import Outcome, State, Task, WorldSheet


class AlfworldOptions(Section):
    """Options of the ALFWorld environment."""

    data: Path | None = Field(
        None, description="folder of official games; default: ALFWORLD_DATA, else generated"
    )
    horizon: int = Field(50, ge=1, description="actions after which an episode is truncated")
    wording: Literal["as_is", "current", "older"] = Field(
        "as_is",
        description="current: the wheel's grammar (move X to Y); older: that of official games (put X in/on "
        "Y); as_is: a game's own, and current for generated games",
    )
    processes: int = Field(64, ge=1, description="episodes at once, each in a process of its own")
    step_timeout: float = Field(120.0, gt=0, description="seconds after which a process counts as hung")
    cache: Path | None = Field(None, description="folder for generated files; default: DREAMGYM_CACHE")


_ATTEMPTS = 3
"""To solve a game when processes die or hang."""


class AlfworldFactory:
    """Makes ALFWorld episodes; see `AlfworldOptions`."""

    name = "alfworld"

    def __init__(self, options: AlfworldOptions) -> None:
        from dreamgym.envs.alfworld.task_source import (
            GameSource,
            GeneratedGames,
            OfficialGames,
            official_folder,
        )

        self._options = options
        cache = options.cache or cache_folder()
        data = options.data or official_folder()
        self._source: GameSource = (
            OfficialGames.at(data)
            if data
            else GeneratedGames(cache / "alfworld" / "games-1", options.horizon)
        )
        self._pool = ProcessPool(
            "dreamgym.envs.alfworld.episode_process:EpisodeHandler",
            {
                "cache": str(cache / "alfworld"),
                "warm_games": [str(path) for path in self._source.warm_games()],
                "wording": options.wording,
            },
            limit=options.processes,
        )

    @property
    def splits(self) -> tuple[str, ...]:
        return self._source.splits

    async def tasks(self, split: str, count: int | None = None, *, seed: int = 0) -> Sequence[Task]:
        tasks = await self._source.tasks(split, count, seed, self._solve)
        check_count(split, len(tasks), count)
        return tasks

    def make(self, task: Task, *, seed: int = 0) -> AlfworldEnvironment:
        """`seed` has no effect: games and their experts are deterministic."""
        return AlfworldEnvironment(task, self._source.game_file(task), self._pool, options=self._options)

    async def aclose(self) -> None:
        self._pool.close()

    async def _solve(self, game: Path, goal: dict[str, Any]) -> list[str] | None:
        """The expert's actions; a process that dies or hangs is replaced."""
        for attempt in range(_ATTEMPTS):
            try:
                return await self._solve_once(game, goal)
            except EpisodeFailedError:
                if attempt == _ATTEMPTS - 1:
                    raise
        raise AssertionError

    async def _solve_once(self, game: Path, goal: dict[str, Any]) -> list[str] | None:
        process = await self._pool.open()
        try:
            seconds = self._options.step_timeout
            await process.ask({"do": "start", "game": str(game), "goal": goal}, timeout=seconds)
            reply = await process.ask({"do": "solve", "limit": self._options.horizon}, timeout=seconds)
            return reply["actions"] if reply["won"] else None
        finally:
            await process.aclose()


class AlfworldEnvironment(Episode):
    """One ALFWorld episode in a process of its own."""

    experts = ("handcoded", "planner")

    def __init__(self, task: Task, game: Path, pool: ProcessPool, *, options: AlfworldOptions) -> None:
        super().__init__(task, options.horizon)
        self._game = game
        self._pool = pool
        self._timeout = options.step_timeout
        self._process: EpisodeProcess | None = None

    async def _start(self) -> State:
        self._process = await self._pool.open()
        goal = self.task.parameters["goal"]
        return _state(await self._ask({"do": "start", "game": str(self._game), "goal": goal}))

    async def _step(self, action: str) -> Outcome:
        reply = await self._ask({"do": "step", "action": action})
        won = bool(reply["won"])
        return Outcome(next_state=_state(reply), reward=float(won), terminated=won, success=won)

    async def world_sheet(self) -> WorldSheet:
        reply = await self._ask({"do": "sheet"})
        return WorldSheet(facts=tuple(tuple(fact) for fact in reply["facts"]))

    async def expert_action(self, expert: str | None = None) -> str:
        check_expert(expert, self.experts)
        reply = await self._ask({"do": "expert", "name": expert or self.experts[0]})
        # The planner has no action where the goal is out of reach.
        return str(reply["action"] or "look")

    async def aclose(self) -> None:
        await super().aclose()
        process, self._process = self._process, None
        if process is not None:
            await process.aclose()

    async def _ask(self, request: dict[str, Any]) -> dict[str, Any]:
        if self._process is None:
            raise EpisodeOverError("this episode has no process: call this between start and aclose")
        return await self._process.ask(request, timeout=self._timeout)


def cache_folder() -> Path:
    """``DREAMGYM_CACHE``, else the platform's cache folder. Everything in it can be generated again."""
    given = os.environ.get("DREAMGYM_CACHE")
    if given:
        return Path(given)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "dreamgym"


def _state(reply: dict[str, Any]) -> State:
    return State(text=reply["text"], admissible_actions=tuple(reply["admissible"]))


def _open(options: AlfworldOptions) -> AlfworldFactory:
    if importlib.util.find_spec("alfworld") is None:
        raise MissingExtraError("the environment alfworld", "alfworld")
    return AlfworldFactory(options)


SPEC = EnvironmentSpec(
    name="alfworld",
    summary="household tasks in text (the paper's ALFWorld), official or generated games",
    options=AlfworldOptions,
    open=_open,
    splits=("train", "valid_seen", "valid_unseen"),
    extra="alfworld",
    annotator=HouseholdAnnotator,
    actor=AGENT,
    goal_met=goal_met,
    can_succeed=can_succeed_here,
    task_from_instruction=task_from_instruction,
    evaluation_instructions=lambda options: evaluation_instructions(options.data),
    think=think,
    refusals=(REFUSAL,),
)
