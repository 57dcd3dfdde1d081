"""Any environment as a black box: ``black-box:NAME`` offers `start`, `step` and admissible actions, no more.

Hidden facts, experts, annotator, goal check and list of refusals of the environment are not there, so no
command can use them. The prefix stays in the name of its trajectories: they do not mix with those that hold
facts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import overload

from dreamgym.protocols import Environment, EnvironmentFactory
from dreamgym.types import Outcome, State, Task

PREFIX = "black-box:"


class BlackBoxFactory:
    """The episodes of a factory without their optional roles."""

    def __init__(self, factory: EnvironmentFactory, name: str) -> None:
        self.name = name
        self.splits = factory.splits
        self._factory = factory  # not `inner`: roles are looked for inside wrappers

    async def tasks(self, split: str, count: int | None = None, *, seed: int = 0) -> Sequence[Task]:
        return _Renamed(await self._factory.tasks(split, count, seed=seed), self.name)

    def make(self, task: Task, *, seed: int = 0) -> Environment:
        own = replace(task, environment=self._factory.name)
        return _BlackBox(self._factory.make(own, seed=seed), task)

    async def aclose(self) -> None:
        await self._factory.aclose()


class _BlackBox:
    """One episode."""

    def __init__(self, environment: Environment, task: Task) -> None:
        self.task = task
        self._environment = environment

    async def start(self) -> State:
        return await self._environment.start()

    async def step(self, action: str) -> Outcome:
        return await self._environment.step(action)

    async def aclose(self) -> None:
        await self._environment.aclose()


class _Renamed(Sequence[Task]):
    """Tasks under another name of their environment; an environment may generate them on access."""

    def __init__(self, tasks: Sequence[Task], name: str) -> None:
        self._tasks = tasks
        self._name = name

    def __len__(self) -> int:
        return len(self._tasks)

    @overload
    def __getitem__(self, index: int) -> Task: ...
    @overload
    def __getitem__(self, index: slice) -> _Renamed: ...
    def __getitem__(self, index: int | slice) -> Task | _Renamed:
        if isinstance(index, slice):
            return _Renamed(self._tasks[index], self._name)
        return replace(self._tasks[index], environment=self._name)
