"""Wrappers around an environment factory; they can be stacked.

    factory = StepCounter(TimeLimit(open_environment("alfworld"), steps=20))

A wrapper changes what its docstring says and passes everything else through. `find_world_sheet` and
`find_expert` look inside wrappers, so hidden facts and experts stay available.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from dreamgym.errors import ConfigError, EpisodeFailedError
from dreamgym.protocols import Environment, EnvironmentFactory
from dreamgym.types import FailureKind, Outcome, State, Task


class EnvironmentWrapper:
    """An environment that passes everything to `inner`; override `start` or `step`."""

    def __init__(self, inner: Environment) -> None:
        self.inner = inner

    @property
    def task(self) -> Task:
        return self.inner.task

    async def start(self) -> State:
        return await self.inner.start()

    async def step(self, action: str) -> Outcome:
        return await self.inner.step(action)

    async def aclose(self) -> None:
        await self.inner.aclose()


class FactoryWrapper:
    """A factory that passes everything to `inner`; override `make`."""

    def __init__(self, inner: EnvironmentFactory) -> None:
        self.inner = inner

    @property
    def name(self) -> str:
        return self.inner.name

    @property
    def splits(self) -> tuple[str, ...]:
        return self.inner.splits

    async def tasks(self, split: str, count: int | None = None, *, seed: int = 0) -> Sequence[Task]:
        return await self.inner.tasks(split, count, seed=seed)

    def make(self, task: Task, *, seed: int = 0) -> Environment:
        return self.inner.make(task, seed=seed)

    async def aclose(self) -> None:
        await self.inner.aclose()


class TimeLimit(FactoryWrapper):
    """Truncates every episode after a number of steps."""

    def __init__(self, inner: EnvironmentFactory, steps: int) -> None:
        if steps < 1:
            raise ConfigError(f"TimeLimit: expected at least 1 step, got {steps}")
        super().__init__(inner)
        self.steps = steps

    def make(self, task: Task, *, seed: int = 0) -> Environment:
        return _LimitedEnvironment(self.inner.make(task, seed=seed), self.steps)


class _LimitedEnvironment(EnvironmentWrapper):
    def __init__(self, inner: Environment, steps: int) -> None:
        super().__init__(inner)
        self._left = steps

    async def step(self, action: str) -> Outcome:
        outcome = await self.inner.step(action)
        self._left -= 1
        if self._left > 0 or outcome.over:
            return outcome
        await self.inner.aclose()  # further steps raise EpisodeOverError
        return replace(outcome, truncated=True)


class StepCounter(FactoryWrapper):
    """Counts episodes and steps, including those of failed attempts. With a `limit`, the step after the last
    one that it allows fails (`FailureKind.BUDGET`) and is not taken."""

    def __init__(self, inner: EnvironmentFactory, *, on_end: Callable[[], None] | None = None) -> None:
        """
        Args:
            on_end: called when an episode ends by itself.
        """
        super().__init__(inner)
        self.on_end = on_end or (lambda: None)
        self.steps = 0
        self.episodes = 0
        self.limit: int | None = None

    def check(self) -> None:
        if self.limit is not None and self.steps >= self.limit:
            raise EpisodeFailedError(FailureKind.BUDGET, f"the budget of {self.limit} steps is used")

    def make(self, task: Task, *, seed: int = 0) -> Environment:
        return _CountedEnvironment(self.inner.make(task, seed=seed), self)


class _CountedEnvironment(EnvironmentWrapper):
    def __init__(self, inner: Environment, counter: StepCounter) -> None:
        super().__init__(inner)
        self._counter = counter

    async def start(self) -> State:
        self._counter.check()
        self._counter.episodes += 1
        return await self.inner.start()

    async def step(self, action: str) -> Outcome:
        self._counter.check()
        self._counter.steps += 1
        outcome = await self.inner.step(action)
        if outcome.over:
            self._counter.on_end()
        return outcome
