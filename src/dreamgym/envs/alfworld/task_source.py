"""Two sources of household games behind one interface: the official folder, and games made on the spot.

A source lists tasks and finds the file an engine loads. Task parameters never hold a path of this machine,
so a recorded trajectory can be replayed elsewhere: official games are named relative to the data folder,
generated ones by (split, seed, index, attempt), from which the file is written again when it is not there.
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

from dreamgym.config import nearest_name
from dreamgym.envs.alfworld.episode_process import instruction_of
from dreamgym.envs.alfworld.generate import SPLITS, GeneratedGame, generate_game
from dreamgym.errors import ConfigError, DataError, EpisodeFailedError
from dreamgym.files import write_text
from dreamgym.types import FailureKind, Task

NAME = "alfworld"
_UNSUPPORTED = ("movable", "Sliced")
"""Kinds of official tasks that the benchmark's own loader leaves out of its text games."""

Prove = Callable[[Path, dict[str, Any]], Awaitable[list[str] | None]]
"""Plays a game with the expert; the winning actions, or None."""


class GameSource(Protocol):
    @property
    def splits(self) -> tuple[str, ...]: ...

    async def tasks(self, split: str, count: int | None, seed: int, prove: Prove) -> Sequence[Task]: ...

    def game_file(self, task: Task) -> Path: ...

    def warm_games(self) -> list[Path]:
        """Files to play a little of before the first episode, so that engines start warm."""
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

    async def tasks(self, split: str, count: int | None, seed: int, prove: Prove) -> Sequence[Task]:
        check_split(split, self.splits)
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
            if not game.get("solvable"):  # the benchmark marks what its expert could not finish
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
    """Games made from what the wheel ships; proven solvable, then kept in the cache folder."""

    folder: Path
    horizon: int
    known: dict[tuple[str, int, int], Task] = field(default_factory=dict)
    """Tasks already listed, because callers ask for growing prefixes."""

    @property
    def splits(self) -> tuple[str, ...]:
        return SPLITS

    async def tasks(self, split: str, count: int | None, seed: int, prove: Prove) -> Sequence[Task]:
        check_split(split, SPLITS)
        if count is None:
            raise ConfigError("generated ALFWorld games have no end: say how many tasks you want (count)")
        new = [index for index in range(count) if (split, seed, index) not in self.known]
        for task in await asyncio.gather(*(self._proven(split, seed, index, prove) for index in new)):
            self.known[split, seed, int(str(task.parameters["index"]))] = task
        return [self.known[split, seed, index] for index in range(count)]

    async def _proven(self, split: str, seed: int, index: int, prove: Prove) -> Task:
        record = self.folder / split / str(seed) / f"{index:06d}.json"
        attempt = _read_attempt(record, self.horizon)
        if attempt is not None:
            return _generated_task(generate_game(split, seed, index, attempt), split, seed, index, attempt)
        attempt = 0
        while True:
            game = generate_game(split, seed, index, attempt)
            task = _generated_task(game, split, seed, index, attempt)
            walkthrough = await prove(self.game_file(task), game.parameters())
            if walkthrough is not None:
                proof = {"attempt": attempt, "horizon": self.horizon, "walkthrough": walkthrough}
                write_text(record, json.dumps(proof))
                return task
            self.game_file(task).unlink()
            attempt += 1

    def game_file(self, task: Task) -> Path:
        try:
            split, seed, index, attempt = (
                str(task.parameters["split"]),
                *(int(task.parameters[key]) for key in ("seed", "index", "attempt")),  # type: ignore[arg-type]
            )
            check_split(split, SPLITS)
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
        # One of each kind of room, so that all the words have been said once.
        return [
            self.game_file(_generated_task(generate_game("train", 0, index, 0), "train", 0, index, 0))
            for index in (0, 1, 2, 3)
        ]


def official_folder() -> Path | None:
    """The folder that ``ALFWORLD_DATA`` names.

    Importing `alfworld` sets the variable to a default of its own, which nobody meant while it is empty.
    """
    given = os.environ.get("ALFWORLD_DATA")
    if not given:
        return None
    folder = Path(given).expanduser()
    its_default = Path("~/.cache/alfworld").expanduser()
    return None if folder == its_default and not any(folder.glob("json_2.1.*")) else folder


def check_split(split: str, splits: Sequence[str]) -> None:
    if split not in splits:
        raise ConfigError(f"unknown split {split!r} of alfworld{nearest_name(split, splits)}")


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
    """Which attempt was proven, if it was proven within this horizon."""
    try:
        proof = json.loads(record.read_text(encoding="utf-8"))
        return int(proof["attempt"]) if len(proof["walkthrough"]) <= horizon == proof["horizon"] else None
    except (OSError, ValueError, KeyError, TypeError):
        return None
