"""The role that plays rollout groups, and its implementation in this process."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from dreamgym.envs.wrappers import StepCounter
from dreamgym.rollouts import (
    REAL,
    CircuitBreaker,
    GroupReport,
    GroupSettings,
    Origin,
    PolicyFactory,
    run_groups,
)
from dreamgym.types import RolloutGroup, Task


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupRequest:
    """The rollout groups of one step."""

    tasks: Sequence[Task]
    """One group for each."""
    name: str
    """Prefix of the trajectory ids."""
    seed: int
    settings: GroupSettings
    origin: Origin = REAL
    limit: int | None = None
    """Environment steps that all groups together may take; None for no limit."""
    group_limit: int | None = None
    """The most steps that one group can take, where that is known."""
    numbers: Sequence[int] | None = None
    """Of the groups, which fix their seeds and trajectory ids; by default 0, 1, 2…"""
    on_group: Callable[[RolloutGroup], None] | None = None
    """Called with each complete group."""

    def numbered(self) -> list[tuple[int, Task]]:
        numbers = range(len(self.tasks)) if self.numbers is None else self.numbers
        return list(zip(numbers, self.tasks, strict=True))

    def share(self) -> int | None:
        """Environment steps of one group, such that all together stay within the limit."""
        if self.limit is None:
            return None
        most = self.limit // max(1, len(self.tasks))
        return most if self.group_limit is None else min(most, self.group_limit)


class GroupPlayer(Protocol):
    """Plays rollout groups with the published weights. Number, name and seed fix the random draws of a group,
    so the groups do not depend on where they are played.

    Example::

        await player.publish(learner.updates, agent.weights)
        report = await player.play(GroupRequest(tasks=tasks, name="run-000012", seed=7, settings=settings))
    """

    async def publish(self, version: int, weights: Callable[[], Mapping[str, Any]]) -> None:
        """Later groups are played with these weights; nothing happens if `version` is published already."""
        ...

    async def play(self, request: GroupRequest) -> GroupReport: ...


class LocalPlayer:
    """Plays groups in this process, with a policy that shares the learner's weights."""

    def __init__(self, factory: StepCounter, make_policy: PolicyFactory, breaker: CircuitBreaker) -> None:
        self._factory, self._make_policy, self._breaker = factory, make_policy, breaker

    async def publish(self, version: int, weights: Callable[[], Mapping[str, Any]]) -> None:
        """Nothing to do: the policy has the learner's weights."""

    async def play(self, request: GroupRequest) -> GroupReport:
        factory = self._factory
        before = factory.steps
        factory.limit = None if request.limit is None else before + request.limit
        report = await run_groups(
            factory,
            self._make_policy,
            request.tasks,
            name=request.name,
            seed=request.seed,
            settings=request.settings,
            origin=request.origin,
            breaker=self._breaker,
            numbers=request.numbers,
            on_group=request.on_group,
        )
        report.taken = factory.steps - before
        return report
