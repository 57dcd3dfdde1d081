"""Wrappers around an environment factory.

`find_world_sheet` and `find_expert` look inside wrappers (`inner`), so facts and experts stay available.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from dreamgym.protocols import Environment, EnvironmentFactory
from dreamgym.types import Outcome, State, Task


class StepCounter:
    """Counts episodes and steps, including those of failed attempts."""

    def __init__(self, inner: EnvironmentFactory, *, on_end: Callable[[], None] | None = None) -> None:
        """
        Args:
            on_end: called when an episode ends by itself.
        """
        self.inner = inner
        self.name = inner.name
        self.splits = inner.splits
        self.on_end = on_end or (lambda: None)
        self.steps = 0
        self.episodes = 0

    async def tasks(self, split: str, count: int | None = None, *, seed: int = 0) -> Sequence[Task]:
        return await self.inner.tasks(split, count, seed=seed)

    def make(self, task: Task, *, seed: int = 0) -> Environment:
        return _CountedEnvironment(self.inner.make(task, seed=seed), self)

    async def aclose(self) -> None:
        await self.inner.aclose()


class _CountedEnvironment:
    def __init__(self, inner: Environment, counter: StepCounter) -> None:
        self.inner = inner
        self.task = inner.task
        self._counter = counter

    async def start(self) -> State:
        self._counter.episodes += 1
        return await self.inner.start()

    async def step(self, action: str) -> Outcome:
        self._counter.steps += 1
        outcome = await self.inner.step(action)
        if outcome.over:
            self._counter.on_end()
        return outcome

    async def aclose(self) -> None:
        await self.inner.aclose()
