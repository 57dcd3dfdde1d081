"""Shared by environments: an episode that is used once and truncated at its horizon, checks of names."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from random import Random

from dreamgym.config import nearest_name
from dreamgym.errors import ConfigError, EpisodeOverError, UnknownSplitError
from dreamgym.protocols import EnvironmentFactory
from dreamgym.types import Outcome, State, Task


class Episode:
    """Calls `_start` once, `_step` only while the episode runs, and truncates it after `horizon` actions."""

    def __init__(self, task: Task, horizon: int) -> None:
        self.task = task
        self._left = horizon
        self._phase = "not started"

    async def start(self) -> State:
        if self._phase != "not started":
            raise EpisodeOverError("an environment is one episode: make another one")
        self._phase = "starting"
        state = await self._start()
        self._phase = "running"
        return state

    async def step(self, action: str) -> Outcome:
        self._require_running("step")
        outcome = await self._step(action)
        self._left -= 1
        if not outcome.over and self._left <= 0:
            outcome = replace(outcome, truncated=True)
        if outcome.over:
            self._phase = "over"
        return outcome

    async def aclose(self) -> None:
        self._phase = "closed"

    def _require_running(self, call: str) -> None:
        if self._phase != "running":
            raise EpisodeOverError(f"{call}: expected a running episode, this one is {self._phase}")

    async def _start(self) -> State:
        raise NotImplementedError

    async def _step(self, action: str) -> Outcome:
        raise NotImplementedError


def check_expert(expert: str | None, experts: Sequence[str]) -> None:
    if expert is not None and expert not in experts:
        raise ConfigError(f"unknown expert {expert!r}{nearest_name(expert, experts)}")


def select_tasks(tasks: Sequence[Task], split: str, count: int | None, seed: int) -> list[Task]:
    """The first `count` tasks in an order given by `seed`; None for all."""
    check_count(split, len(tasks), count)
    found = list(tasks)
    Random(seed).shuffle(found)
    return found[:count]


async def first_tasks(
    factory: EnvironmentFactory, split: str, count: int, *, seed: int = 0
) -> Sequence[Task]:
    """The first `count` tasks of a split, or all where it has fewer; an unknown split is an error."""
    try:
        return await factory.tasks(split, count, seed=seed)
    except ConfigError:  # fewer tasks than that; a split that does not exist raises again
        return await factory.tasks(split, None, seed=seed)


def check_count(split: str, available: int, count: int | None) -> None:
    if count is not None and count > available:
        raise ConfigError(f"split {split!r} has {available} tasks, {count} were requested")


def check_split(split: str, splits: Sequence[str], environment: str) -> None:
    if split not in splits:
        raise UnknownSplitError(split, splits, environment)
