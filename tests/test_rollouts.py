"""Rollout groups: whole or counted, alike at the start, within limits, and stopped when everything breaks."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from dreamgym.errors import EndpointError, EpisodeFailedError, RolloutsFailingError
from dreamgym.protocols import Environment
from dreamgym.rollouts import (
    CircuitBreaker,
    GroupReport,
    GroupSettings,
    Origin,
    run_episode,
    run_groups,
)
from dreamgym.testing import Corridor, CorridorFactory
from dreamgym.types import (
    Completion,
    Decision,
    FailureKind,
    Outcome,
    RolloutFailure,
    State,
    Task,
    Trajectory,
    Transition,
)


class Walker:
    """Goes east for ever, and says so in three tokens."""

    name = "walker"

    def __init__(self, action: str = "go east", wait: float = 0.0) -> None:
        self._action = action
        self._wait = wait

    async def act(self, task: Task, history: Sequence[Transition], state: State) -> Decision:
        await asyncio.sleep(self._wait)
        return Decision(action=self._action, completion=Completion(text=self._action, token_ids=(1, 2, 3)))


class Broken(Corridor):
    """Breaks at the first step."""

    async def step(self, action: str) -> Outcome:
        raise EpisodeFailedError(FailureKind.CRASHED, "the engine is gone")


class Workshop(CorridorFactory):
    """Corridors of which the first `broken` of a task break, those of other tasks never."""

    def __init__(self, *, broken: int = 0, only: str | None = None) -> None:
        super().__init__(length=4, horizon=6)
        self._broken = broken
        self._only = only
        self.made: list[tuple[str, int]] = []

    def make(self, task: Task, *, seed: int = 0) -> Corridor:
        self.made.append((task.id, seed))
        count = sum(name == task.id for name, _ in self.made)
        if count <= self._broken and self._only in (None, task.id):
            return Broken(task, length=4, start=1, way_out=4, horizon=6)
        return super().make(task, seed=seed)


async def play(factory: Any, count: int = 3, **changes: Any) -> GroupReport:
    settings = GroupSettings(**{"size": 4, "retries": 1, **changes})
    tasks = await factory.tasks("train", count)
    return await run_groups(factory, _walker, tasks, name="g", seed=7, settings=settings)


def _walker(environment: Environment, name: str, seed: int) -> Walker:
    return Walker()


async def one(policy: Walker, **settings: Any) -> Trajectory | RolloutFailure:
    factory = CorridorFactory(length=4, horizon=20)
    task = (await factory.tasks("train", 1))[0]
    return await run_episode(
        lambda: factory.make(task), lambda _: policy, trajectory_id="x", task=task, seed=0, **settings
    )


async def test_members_share_task_seed_and_start_and_nothing_else() -> None:
    factory = Workshop()
    report = await play(factory)
    assert [len(group.trajectories) for group in report.groups] == [4, 4, 4]
    for group in report.groups:
        assert len({(t.task.id, t.start.text, t.sheet) for t in group.trajectories}) == 1
    members = [t for group in report.groups for t in group.trajectories]
    assert len({t.id for t in members}) == len({t.seed for t in members}) == 12
    assert len(set(factory.made)) == 3
    assert (report.episodes, report.steps) == (12, sum(map(len, members)))


async def test_hidden_facts_are_asked_for_only_where_they_are_wanted() -> None:
    for wanted in (True, False):
        report = await play(Workshop(), world_sheets=wanted)
        sheets = [each.sheet for group in report.groups for each in group.trajectories]
        assert all((sheet is not None) == wanted for sheet in sheets)


async def test_a_member_that_breaks_is_played_again_in_a_fresh_environment() -> None:
    factory = Workshop(broken=1)
    report = await play(factory)
    assert len(report.groups) == 3
    assert not report.dropped
    assert len(factory.made) == 12 + 3


async def test_a_group_whose_member_keeps_breaking_is_dropped_and_counted_by_kind() -> None:
    tasks = await CorridorFactory(length=4).tasks("train", 3)
    report = await play(Workshop(broken=99, only=tasks[1].id))
    assert [group.task.id for group in report.groups] == [tasks[0].id, tasks[2].id]
    assert report.failures == {FailureKind.CRASHED: 1}
    assert (report.dropped[0].attempts, report.dropped[0].message) == (2, "the engine is gone")


async def test_members_that_start_differently_are_no_group() -> None:
    class Fickle(Workshop):
        def make(self, task: Task, *, seed: int = 0) -> Corridor:
            self.made.append((task.id, seed))
            return Corridor(task, length=4, start=1 + len(self.made) % 2, way_out=4, horizon=6)

    report = await play(Fickle())
    assert not report.groups
    assert report.failures == {FailureKind.CONTRADICTION: 3}
    assert "seed does not fix the start" in report.dropped[0].message


async def test_the_circuit_breaker_pauses_then_stops_with_the_reason() -> None:
    reasons: list[str] = []
    settings = GroupSettings(size=2, retries=0, failure_window=4, pause=0.01, pauses=1, concurrency=1)
    factory = Workshop(broken=999)
    tasks = [*await factory.tasks("train", 8)] * 2
    breaker = CircuitBreaker(settings, reasons.append)
    with pytest.raises(
        RolloutsFailingError, match=r"4 of the last 4 rollout groups failed.*4 crashed.*gine is g"
    ):
        await run_groups(factory, _walker, tasks, name="g", settings=settings, breaker=breaker)
    assert breaker.pauses == 1
    assert "retrying in 0.01 seconds" in reasons[0]
    assert len(factory.made) < 20, "of 32 episodes the rest was never started"


async def test_the_breaker_remembers_earlier_steps() -> None:
    settings = GroupSettings(size=2, retries=0, failure_window=4, pauses=0)
    factory = Workshop(broken=999)
    tasks = await factory.tasks("train", 2)
    breaker = CircuitBreaker(settings)
    first = await run_groups(factory, _walker, tasks, name="a", settings=settings, breaker=breaker)
    assert len(first.dropped) == 2
    with pytest.raises(RolloutsFailingError):
        await run_groups(factory, _walker, tasks, name="b", settings=settings, breaker=breaker)


async def test_a_few_failures_leave_the_breaker_closed() -> None:
    tasks = await CorridorFactory(length=4).tasks("train", 3)
    report = await play(Workshop(broken=99, only=tasks[1].id), count=8, failure_window=4, pauses=0)
    assert len(report.groups) == 7


async def test_a_bug_is_no_failure() -> None:
    class Buggy(Workshop):
        def make(self, task: Task, *, seed: int = 0) -> Corridor:
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        await play(Buggy())


async def test_an_episode_that_takes_too_long_is_a_failure() -> None:
    failure = await one(Walker(wait=0.05), max_seconds=0.08, retries=0)
    assert isinstance(failure, RolloutFailure)
    assert failure.kind is FailureKind.TIMEOUT
    assert "after 0.08 seconds" in failure.message


async def test_an_endpoint_error_counts_as_server_down() -> None:
    class Unreachable(Walker):
        async def act(self, task: Task, history: Sequence[Transition], state: State) -> Decision:
            raise EndpointError("no answer")

    failure = await one(Unreachable(), retries=0)
    assert isinstance(failure, RolloutFailure)
    assert failure.kind is FailureKind.SERVER_DOWN


async def test_provenance_states_the_origin_of_an_episode() -> None:
    origin = Origin(source="synthetic", experience_model="dreamer", policy_version=3)
    played = await one(Walker(), origin=origin)
    assert isinstance(played, Trajectory)
    found = played.provenance
    assert (found.source, found.experience_model, found.policy_version) == ("synthetic", "dreamer", 3)
    assert found.policy == "walker"


async def test_exact_tokens_are_kept_with_every_turn() -> None:
    played = await one(Walker())
    assert isinstance(played, Trajectory)
    assert all(t.completion is not None and t.completion.token_ids == (1, 2, 3) for t in played.transitions)


async def test_hundreds_of_episodes_are_in_flight_at_once() -> None:
    factory = CorridorFactory(length=6, horizon=4)
    tasks = list(await factory.tasks("train"))[:10] * 5
    clock = asyncio.get_running_loop().time
    began = clock()
    report = await run_groups(
        factory,
        lambda environment, name, seed: Walker(wait=0.02),
        tasks,
        name="many",
        settings=GroupSettings(size=8, concurrency=400),
    )
    assert report.episodes == 400
    assert clock() - began < 400 * 4 * 0.02 / 10
