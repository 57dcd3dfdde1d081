"""The tasks of ALFWorld: official games in a folder, or games that are generated on demand.

A source lists tasks and finds the game file of a task. Task parameters hold no path of this machine, so a
recorded trajectory can be replayed elsewhere: official games are named relative to the data folder, generated
ones by (split, seed, index, attempt), from which a missing file is generated again.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any, Protocol

from dreamgym.envs.alfworld.episode_process import instruction_of
from dreamgym.envs.alfworld.generate import SPLITS, GeneratedGame, generate_game
from dreamgym.envs.episode import check_split
from dreamgym.errors import ConfigError, DataError, EpisodeFailedError
from dreamgym.files import write_text
from dreamgym.types import FailureKind, Task

NAME = "alfworld"
_UNSUPPORTED = ("movable", "Sliced")
"""Kinds of official tasks that the benchmark's own loader skips."""
_MAX_ATTEMPTS = 30
"""Generated games for one task. At the default horizon the expert solves most at the first attempt."""

Solve = Callable[[Path, dict[str, Any]], Awaitable[list[str] | None]]
"""Plays a game with the expert; returns its actions, or None if it does not succeed."""


class GameSource(Protocol):
    """Lists tasks and finds their game files."""

    @property
    def splits(self) -> tuple[str, ...]: ...

    async def tasks(self, split: str, count: int | None, seed: int, solve: Solve) -> Sequence[Task]: ...

    def game_file(self, task: Task) -> Path: ...

    def warm_games(self) -> list[Path]:
        """Games to play a few actions of before the first episode, to fill caches."""
        ...


@dataclass(frozen=True, slots=True)
class OfficialGames:
    """A folder in the benchmark's layout: ``[json_2.1.1/]SPLIT/TASK/TRIAL/{game.tw-pddl,traj_data.json}``."""

    folder: Path

    @classmethod
    def at(cls, folder: Path) -> OfficialGames:
        candidates = [folder, *sorted(folder.glob("json_2.1.*"), reverse=True)]
        for candidate in candidates:
            if any(candidate.glob("*/*/*/game.tw-pddl")):
                return cls(candidate)
        raise ConfigError(
            f"expected ALFWorld games as SPLIT/TASK/TRIAL/game.tw-pddl below {str(folder)!r}, found none; "
            "run alfworld-download, or leave out the data option to play generated games"
        )

    @property
    def splits(self) -> tuple[str, ...]:
        return tuple(sorted(p.name for p in self.folder.iterdir() if any(p.glob("*/*/game.tw-pddl"))))

    async def tasks(self, split: str, count: int | None, seed: int, solve: Solve) -> Sequence[Task]:
        check_split(split, self.splits, NAME)
        files = sorted((self.folder / split).glob("*/*/game.tw-pddl"))
        files = [path for path in files if not any(word in str(path) for word in _UNSUPPORTED)]
        Random(seed).shuffle(files)
        tasks: list[Task] = []
        for path in files:
            if len(tasks) == count:
                break
            task = self._task(path, split)
            if task is not None:
                tasks.append(task)
        return tasks

    def game_file(self, task: Task) -> Path:
        path = (self.folder / str(task.parameters.get("game"))).resolve()
        if not path.is_relative_to(self.folder.resolve()) or not path.is_file():
            raise EpisodeFailedError(
                FailureKind.INVALID_TASK,
                f"task {task.id!r} is not an official game below {str(self.folder)!r}",
            )
        return path

    def warm_games(self) -> list[Path]:
        return [next(iter(sorted(self.folder.glob("*/*/*/game.tw-pddl"))))]

    def _task(self, path: Path, split: str) -> Task | None:
        try:
            game = json.loads(path.read_text(encoding="utf-8"))
            facts = json.loads((path.parent / "traj_data.json").read_text(encoding="utf-8"))
            if not game.get("solvable"):  # marked by the benchmark: its expert did not succeed
                return None
            goal = {"task_type": facts["task_type"], **facts["pddl_params"]}
            instruction = instruction_of(game["grammar"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise DataError(f"{path}: expected an ALFWorld game with its traj_data.json, {error!r}") from None
        name = f"{path.parent.parent.name}/{path.parent.name}"
        return Task(
            id=f"{split}/{name}",
            instruction=instruction,
            environment=NAME,
            split=split,
            family=goal["task_type"],
            parameters={
                "source": "official",
                "game": path.relative_to(self.folder).as_posix(),
                "room": int(path.parent.parent.name.rsplit("-", 1)[-1]),
                "goal": goal,
            },
        )


@dataclass(frozen=True, slots=True)
class GeneratedGames:
    """Games generated from the data in the wheel. The expert solves each once, then it is cached on disk."""

    folder: Path
    horizon: int
    known: dict[tuple[str, int, int], Task] = field(default_factory=dict)
    """Tasks listed so far: callers request growing prefixes."""

    @property
    def splits(self) -> tuple[str, ...]:
        return SPLITS

    async def tasks(self, split: str, count: int | None, seed: int, solve: Solve) -> Sequence[Task]:
        check_split(split, SPLITS, NAME)
        if count is None:
            raise ConfigError("expected a number of tasks (count): generated ALFWorld games are unlimited")
        new = [index for index in range(count) if (split, seed, index) not in self.known]
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(self._solvable(split, seed, index, solve)) for index in new]
        except ExceptionGroup as several:
            raise several.exceptions[0] from None  # the others were cancelled because of the first
        self.known.update(
            ((split, seed, index), task.result()) for index, task in zip(new, tasks, strict=True)
        )
        return [self.known[split, seed, index] for index in range(count)]

    async def _solvable(self, split: str, seed: int, index: int, solve: Solve) -> Task:
        record = self.folder / split / str(seed) / f"{index:06d}.json"
        attempt = _read_attempt(record, self.horizon)
        if attempt is not None:
            return _generated_task(generate_game(split, seed, index, attempt), split, seed, index, attempt)
        for attempt in range(_MAX_ATTEMPTS):
            game = generate_game(split, seed, index, attempt)
            task = _generated_task(game, split, seed, index, attempt)
            walkthrough = await solve(self.game_file(task), game.parameters())
            if walkthrough is not None:
                proof = {"attempt": attempt, "horizon": self.horizon, "walkthrough": walkthrough}
                write_text(record, json.dumps(proof))
                return task
            self.game_file(task).unlink()
        raise ConfigError(
            f"environment.options.horizon={self.horizon} is too short: the expert solved none of "
            f"{_MAX_ATTEMPTS} generated games within it; raise it"
        )

    def game_file(self, task: Task) -> Path:
        try:
            split, seed, index, attempt = (
                str(task.parameters["split"]),
                *(int(task.parameters[key]) for key in ("seed", "index", "attempt")),  # type: ignore[arg-type]
            )
            check_split(split, SPLITS, NAME)
        except (KeyError, TypeError, ValueError, ConfigError):
            raise EpisodeFailedError(
                FailureKind.INVALID_TASK,
                f"task {task.id!r} does not name a generated game (split, seed, index, attempt); "
                "for an official game set the data option",
            ) from None
        path = self.folder / split / str(seed) / f"{index:06d}-{attempt}.game.json"
        if not path.is_file():
            game = generate_game(split, seed, index, attempt)
            write_text(path, json.dumps({"pddl_problem": game.problem, "instruction": game.instruction}))
        return path

    def warm_games(self) -> list[Path]:
        # One of each kind of room, so that every template is cached.
        return [
            self.game_file(_generated_task(generate_game("train", 0, index, 0), "train", 0, index, 0))
            for index in (0, 1, 2, 3)
        ]


def official_folder() -> Path | None:
    """The folder that ``ALFWORLD_DATA`` names.

    Importing `alfworld` sets the variable to its own default; this is ignored while that folder is empty.
    """
    given = os.environ.get("ALFWORLD_DATA")
    if not given:
        return None
    folder = Path(given).expanduser()
    its_default = Path("~/.cache/alfworld").expanduser()
    return None if folder == its_default and not any(folder.glob("json_2.1.*")) else folder


def _generated_task(game: GeneratedGame, split: str, seed: int, index: int, attempt: int) -> Task:
    return Task(
        id=f"{split}/{game.name}/generated-{seed}-{index}",
        instruction=game.instruction,
        environment=NAME,
        split=split,
        family=game.goal.family,
        parameters={
            "source": "generated",
            "split": split,
            "seed": seed,
            "index": index,
            "attempt": attempt,
            "room": game.room,
            "goal": game.parameters(),
        },
    )


def _read_attempt(record: Path, horizon: int) -> int | None:
    """The attempt that the expert solved within this horizon, if any."""
    try:
        proof = json.loads(record.read_text(encoding="utf-8"))
        return int(proof["attempt"]) if len(proof["walkthrough"]) <= horizon == proof["horizon"] else None
    except (OSError, ValueError, KeyError, TypeError):
        return None
