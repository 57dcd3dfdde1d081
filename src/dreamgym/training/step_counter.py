"""Counts what episodes cost where they are played: each step, also those of attempts that came to nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from dreamgym.protocols import Environment, EnvironmentFactory
from dreamgym.types import Outcome, State, Task


class StepCounter:
    """An `EnvironmentFactory` that counts; otherwise as the one it is made of."""

    def __init__(self, inner: EnvironmentFactory, *, on_end: Callable[[], None] | None = None) -> None:
        """
        Args:
            on_end: called when an episode is over by itself.
        """
        self._inner = inner
        self.on_end = on_end or (lambda: None)
        self.steps = 0
        """Asked for so far, whatever came of their episodes."""
        self.episodes = 0
        """Started so far."""

    @property
    def name(self) -> str:
        return self._inner.name

    @property
    def splits(self) -> tuple[str, ...]:
        return self._inner.splits

    async def tasks(self, split: str, count: int | None = None, *, seed: int = 0) -> Sequence[Task]:
        return await self._inner.tasks(split, count, seed=seed)

    def make(self, task: Task, *, seed: int = 0) -> Environment:
        return _Metered(self._inner.make(task, seed=seed), self)

    async def aclose(self) -> None:
        await self._inner.aclose()


class _Metered:
    def __init__(self, environment: Environment, meter: StepCounter) -> None:
        self.inner = environment
        self._meter = meter

    @property
    def task(self) -> Task:
        return self.inner.task

    async def start(self) -> State:
        self._meter.episodes += 1
        return await self.inner.start()

    async def step(self, action: str) -> Outcome:
        self._meter.steps += 1
        outcome = await self.inner.step(action)
        if outcome.over:
            self._meter.on_end()
        return outcome

    async def aclose(self) -> None:
        await self.inner.aclose()
