"""Plays episodes of an environment under test: validates every reply, and every call has a timeout."""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TypeVar

from dreamgym.envs.episode import first_tasks
from dreamgym.protocols import Environment, EnvironmentFactory, HasExpert, find_expert
from dreamgym.types import Outcome, State, Task

TIMEOUT_SECONDS = 300.0
"""For each call."""
NONSENSE = "xyzzy plugh"
_TASKS = 12

T = TypeVar("T")


class CheckFailed(Exception):  # noqa: N818 - a finding about the environment, not an error
    """The environment violates the contract."""


class CheckSkipped(Exception):  # noqa: N818
    """The check does not apply to this environment."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """A recorded episode, to compare with a replay of its actions."""

    task: Task
    start: State
    actions: tuple[str, ...]
    outcomes: tuple[Outcome, ...]


class Subject:
    """The environment under test."""

    def __init__(self, factory: EnvironmentFactory, *, split: str, episodes: int, concurrency: int) -> None:
        self.factory = factory
        self.split = split
        self.episodes = episodes
        self.concurrency = concurrency
        self.say: Callable[[str], None] = lambda detail: None
        self._tasks: list[Task] = []

    async def tasks(self) -> list[Task]:
        if not self._tasks:
            self._tasks = await self.list_tasks(_TASKS)
        if not self._tasks:
            raise CheckFailed(f"split {self.split!r} has no tasks")
        return self._tasks

    async def list_tasks(self, count: int) -> list[Task]:
        return list((await answered(first_tasks(self.factory, self.split, count)))[:count])

    @asynccontextmanager
    async def episode(self, task: Task) -> AsyncIterator[Environment]:
        environment = self.factory.make(task, seed=0)
        try:
            yield environment
        finally:
            await answered(environment.aclose())

    @asynccontextmanager
    async def started(self, task: Task) -> AsyncIterator[tuple[Environment, State]]:
        async with self.episode(task) as environment:
            yield environment, await begin(environment)

    async def record(self, task: Task, *, steps: int, seed: int, expert: bool) -> Record:
        """Play up to `steps` actions: the expert's if requested and available, else random ones."""
        async with self.started(task) as (environment, start):
            guide = find_expert(environment) if expert else None
            actions, outcomes = await play(environment, start, steps=steps, seed=seed, expert=guide)
        return Record(task=task, start=start, actions=actions, outcomes=outcomes)

    async def replay(self, record: Record, *, pause: Callable[[], Awaitable[object]] | None = None) -> None:
        """Play the same actions again.

        Raises:
            CheckFailed: something differs.
        """
        async with self.started(record.task) as (environment, start):
            compare(record, 0, record.start, start)
            for position, action in enumerate(record.actions):
                if pause is not None:
                    await pause()
                compare(record, position + 1, record.outcomes[position], await act(environment, action))


async def answered(call: Awaitable[T]) -> T:
    try:
        async with asyncio.timeout(TIMEOUT_SECONDS):
            return await call
    except TimeoutError:
        raise CheckFailed(f"no answer within {TIMEOUT_SECONDS:g} s") from None


async def begin(environment: Environment) -> State:
    state = await answered(environment.start())
    _check_state(state, "start")
    return state


async def act(environment: Environment, action: str) -> Outcome:
    outcome = await answered(environment.step(action))
    if not isinstance(outcome, Outcome):
        raise CheckFailed(f"step({shown(action)}): expected an Outcome, got {outcome!r}")
    _check_state(outcome.next_state, f"step({shown(action)})")
    if not math.isfinite(outcome.reward):
        raise CheckFailed(f"step({shown(action)}): expected a finite reward, got {outcome.reward!r}")
    return outcome


async def play(
    environment: Environment, start: State, *, steps: int, seed: int, expert: HasExpert | None = None
) -> tuple[tuple[str, ...], tuple[Outcome, ...]]:
    """Actions and outcomes of at most `steps` steps: the expert's, else random admissible actions."""
    source, state = random.Random(seed), start
    actions: list[str] = []
    outcomes: list[Outcome] = []
    while len(actions) < steps and not (outcomes and outcomes[-1].over):
        if expert is not None:
            actions.append(await answered(expert.expert_action()))
        else:
            actions.append(source.choice(state.admissible_actions or (NONSENSE, "look", "help")))
        outcomes.append(await act(environment, actions[-1]))
        state = outcomes[-1].next_state
    return tuple(actions), tuple(outcomes)


def shown(text: str) -> str:
    """A quoted text, short enough for one line."""
    return repr(text if len(text) <= 60 else f"{text[:57]}...")


def compare(record: Record, position: int, before: State | Outcome, now: State | Outcome) -> None:
    if before == now:
        return
    old, new = _fields(before), _fields(now)
    what = next((name for name in old if old[name] != new[name]), "")
    raise CheckFailed(
        f"task {record.task.id!r}, after {position} actions {list(record.actions[:position])[-3:]}: "
        f"{what} was {shown(str(old.get(what)))} and is now {shown(str(new.get(what)))}"
    )


def _fields(seen: State | Outcome) -> dict[str, object]:
    if isinstance(seen, State):
        return {"text": seen.text, "admissible actions": seen.admissible_actions}
    flags = ("reward", "terminated", "truncated", "success")
    return {**_fields(seen.next_state), **{name: getattr(seen, name) for name in flags}}


def _check_state(state: State, where: str) -> None:
    if not isinstance(state, State) or not isinstance(state.text, str) or not state.text.strip():
        raise CheckFailed(f"{where}: expected a State with some text, got {state!r}")
    actions = state.admissible_actions
    if actions is None:
        return
    if not all(isinstance(action, str) and action.strip() for action in actions):
        raise CheckFailed(f"{where}: expected admissible actions that are words, got {actions!r}")
    if len(set(actions)) != len(actions):
        twice = next(action for action in actions if actions.count(action) > 1)
        raise CheckFailed(f"{where}: the admissible action {twice!r} is listed twice")
