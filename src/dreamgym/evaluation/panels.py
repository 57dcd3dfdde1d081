"""Benchmark panels: fixed tasks under fixed conditions, identified by a hash of what the agent is shown."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from dreamgym.envs.episode import first_tasks
from dreamgym.errors import ConfigError
from dreamgym.protocols import EnvironmentFactory
from dreamgym.types import Task

MACHINE_OPTIONS = frozenset({"processes", "step_timeout", "cache"})
"""Options that change no episode."""
_DATA = "data"
_STARTS_AT_ONCE = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """The tasks of a benchmark (the first `episodes` of a split, seed 0) and the options they run with."""

    name: str
    split: str
    episodes: int
    options: Mapping[str, Any]
    packages: tuple[str, ...]
    """Whose versions a result states."""
    digest: str
    """Hash of the tasks without data of the user's own."""
    wordings: tuple[str, ...] = ()


PANELS = {
    each.name: each
    for each in (
        Panel(
            name="alfworld",
            split="valid_unseen",
            episodes=134,
            options={"horizon": 50},
            packages=("alfworld", "textworld"),
            digest="0b7ed4ff7ef5b1f8",
            wordings=("current", "older"),
        ),
        Panel(
            name="textworld",
            split="test",
            episodes=200,
            options={
                **{"family": "both", "level": 15, "ingredients": 1, "rooms": 6, "foods": "own"},
                **{"cook": True, "cut": True, "open": True, "horizon": 30},
            },
            packages=("textworld",),
            digest="fedeeaefc7a7187a",
        ),
        Panel(
            name="webshop",
            split="test",
            episodes=500,
            options={
                **{"goals": "auto", "view": "text", "attributes_page": True, "graded": True},
                "horizon": 15,
            },
            packages=("bm25s", "snowballstemmer"),
            digest="897235061b3bc69f",
        ),
    )
}


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenPanel:
    """The tasks of a panel on this machine, and everything that a result depends on besides the policy."""

    name: str
    split: str
    options: Mapping[str, Any]
    """Without paths and numbers of this machine."""
    own_data: bool
    """Whether the user named the data, e.g. official games."""
    tasks: tuple[Task, ...]
    digest: str
    versions: Mapping[str, str]
    seed: int = field(default=0, init=False)

    def to_dict(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "split": self.split,
            "options": dict(self.options),
            "own_data": self.own_data,
            "episodes": len(self.tasks),
            "families": dict(Counter(task.family for task in self.tasks)),
            "hash": self.digest,
            "versions": dict(self.versions),
            "tasks": [task.id for task in self.tasks],
        }


async def open_panel(
    factory: EnvironmentFactory,
    panel: Panel,
    options: Mapping[str, Any],
    *,
    split: str | None = None,
    episodes: int | None = None,
) -> OpenPanel:
    """The tasks of a panel, of another split, or its first `episodes`, hashed with their start states.

    Raises:
        ConfigError: the split has fewer tasks than `episodes`.
    """
    split = split or panel.split
    tasks = list(await first_tasks(factory, split, episodes or panel.episodes))
    if episodes is not None and len(tasks) < episodes:
        raise ConfigError(
            f"split {split!r} of {panel.name} has {len(tasks)} tasks, {episodes} were requested"
        )
    return OpenPanel(
        name=panel.name,
        split=split,
        options={name: value for name, value in options.items() if name not in {_DATA, *MACHINE_OPTIONS}},
        own_data=_DATA in options,
        tasks=tuple(tasks),
        digest=await _digest(factory, tasks),
        versions={name: found for name in ("dreamgym", *panel.packages) if (found := _version(name))},
    )


async def _digest(factory: EnvironmentFactory, tasks: Sequence[Task]) -> str:
    """Ids, instructions, goals and start states; no path of this machine and no package version."""
    places = asyncio.Semaphore(_STARTS_AT_ONCE)

    async def row(task: Task) -> list[Any]:
        async with places:
            environment = factory.make(task)
            try:
                start = await environment.start()
            finally:
                await environment.aclose()
        return [task.id, task.instruction, task.family, dict(task.parameters), start.text]

    rows = await asyncio.gather(*map(row, tasks))
    return hashlib.sha256(json.dumps(rows, sort_keys=True, ensure_ascii=False).encode()).hexdigest()[:16]


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
