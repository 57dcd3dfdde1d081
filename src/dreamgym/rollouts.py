"""Runs episodes and rollout groups: a policy and an environment in, trajectories or counted failures out.

A rollout group is n episodes of one task with the same start. It is complete or dropped: its returns are
compared with one another, so a missing member or another start would bias the comparison. Failures are
counted by kind. When too many groups fail, a circuit breaker pauses the run, then stops it with the reason.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import overload

from dreamgym.errors import EndpointError, EpisodeFailedError, RolloutsFailingError
from dreamgym.protocols import Environment, EnvironmentFactory, Policy, find_given_turns, find_world_sheet
from dreamgym.seeding import derive_seed
from dreamgym.types import (
    FailureKind,
    Provenance,
    RolloutFailure,
    RolloutGroup,
    Source,
    State,
    Task,
    Trajectory,
    Transition,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """The provenance of a rollout, apart from the policy's name and the time."""

    source: Source = "real"
    experience_model: str | None = None
    policy_version: int = 0


REAL = Origin()


async def run_episode(
    make_environment: Callable[[], Environment],
    make_policy: Callable[[Environment], Policy],
    *,
    trajectory_id: str,
    task: Task,
    seed: int,
    retries: int = 2,
    keep_admissible_actions: bool = True,
    keep_world_sheet: bool = True,
    max_seconds: float | None = None,
    origin: Origin = REAL,
) -> Trajectory | RolloutFailure:
    """One episode from start to end. An environment that fails is replaced, at most `retries` times.

    An episode that takes more than `max_seconds` has failed: a busy machine is no fault of the policy.
    """
    kind, message = FailureKind.CRASHED, ""
    for _ in range(1 + retries):
        environment = make_environment()
        try:
            async with asyncio.timeout(max_seconds) as deadline:
                policy = make_policy(environment)
                trajectory = await _play(environment, policy, trajectory_id, seed, keep_world_sheet, origin)
        except EpisodeFailedError as error:
            kind, message = error.kind, str(error)
        except EndpointError as error:
            kind, message = FailureKind.SERVER_DOWN, str(error)
        except TimeoutError:
            if not deadline.expired():
                raise
            kind, message = FailureKind.TIMEOUT, f"the episode was not over after {max_seconds:g} seconds"
        else:
            return trajectory if keep_admissible_actions else _without_admissible_actions(trajectory)
        finally:
            await environment.aclose()
    return RolloutFailure(task=task, kind=kind, message=message, attempts=1 + retries)


async def _play(
    environment: Environment,
    policy: Policy,
    trajectory_id: str,
    seed: int,
    keep_world_sheet: bool,
    origin: Origin,
) -> Trajectory:
    start = state = await environment.start()
    facts = find_world_sheet(environment) if keep_world_sheet else None
    sheet = await facts.world_sheet() if facts is not None else None
    beginning = find_given_turns(environment)
    transitions = list(await beginning.given_turns()) if beginning is not None else []
    given, over = len(transitions), False
    if transitions:
        state = transitions[-1].outcome.next_state
    while not over:
        decision = await policy.act(environment.task, transitions, state)
        outcome = await environment.step(decision.action)
        transitions.append(
            Transition(
                state=state,
                action=decision.action,
                outcome=outcome,
                thought=decision.thought,
                completion=decision.completion,
            )
        )
        state, over = outcome.next_state, outcome.over
    return Trajectory(
        id=trajectory_id,
        task=environment.task,
        start=start,
        transitions=tuple(transitions),
        provenance=Provenance(
            source=origin.source,
            policy=policy.name,
            policy_version=origin.policy_version,
            experience_model=origin.experience_model,
            recorded_at=time.time(),
        ),
        seed=seed,
        sheet=sheet,
        given=given,
    )


def _without_admissible_actions(trajectory: Trajectory) -> Trajectory:
    def bare(state: State) -> State:
        return replace(state, admissible_actions=None)

    transitions = tuple(
        replace(
            transition,
            state=bare(transition.state),
            outcome=replace(transition.outcome, next_state=bare(transition.outcome.next_state)),
        )
        for transition in trajectory.transitions
    )
    return replace(trajectory, start=bare(trajectory.start), transitions=transitions)


PolicyFactory = Callable[[Environment, str, int], Policy]
"""Makes the policy of one episode from its environment, its trajectory id and its seed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupSettings:
    """How groups are run, and when the circuit breaker opens."""

    size: int = 8
    """Episodes of one task (the paper's n)."""
    concurrency: int = 256
    """Episodes at once."""
    retries: int = 2
    max_seconds: float | None = None
    """Of an episode; a longer one has failed."""
    failure_limit: float = 0.5
    """Fraction of failed groups among the last `failure_window` above which the breaker opens; 1: never."""
    failure_window: int = 8
    pause: float = 10.0
    """Seconds until the run continues after the breaker opened."""
    pauses: int = 2
    """Pauses before `RolloutsFailingError`."""
    world_sheets: bool = True
    """Whether trajectories hold the hidden facts; some environments spend real actions to find them."""


@dataclass(slots=True, kw_only=True)
class GroupReport(Sequence[RolloutGroup]):
    """The results of `run_groups`: a sequence of its groups, with the failures."""

    groups: list[RolloutGroup] = field(default_factory=list)
    """Complete groups, in the order of their tasks."""
    dropped: list[RolloutFailure] = field(default_factory=list)
    """One failure for each missing group."""
    episodes: int = 0
    steps: int = 0
    taken: int = 0
    """Environment steps, also those of failed attempts; a `GroupPlayer` counts them."""
    pauses: int = 0
    metrics: dict[str, float] = field(default_factory=dict)
    """What the player measured; part of the step's row."""

    @property
    def failures(self) -> Counter[FailureKind]:
        return Counter(failure.kind for failure in self.dropped)

    def __len__(self) -> int:
        return len(self.groups)

    @overload
    def __getitem__(self, index: int) -> RolloutGroup: ...

    @overload
    def __getitem__(self, index: slice) -> list[RolloutGroup]: ...

    def __getitem__(self, index: int | slice) -> RolloutGroup | list[RolloutGroup]:
        return self.groups[index]


_DEFAULTS = GroupSettings()


async def run_groups(
    factory: EnvironmentFactory,
    make_policy: PolicyFactory,
    tasks: Sequence[Task],
    *,
    name: str,
    seed: int = 0,
    settings: GroupSettings = _DEFAULTS,
    origin: Origin = REAL,
    breaker: CircuitBreaker | None = None,
    numbers: Sequence[int] | None = None,
    on_group: Callable[[RolloutGroup], None] | None = None,
) -> GroupReport:
    """Run one group for each task; a task that is listed twice gets two groups.

    Args:
        name: prefix of the trajectory ids, so it must be unique in the run (``dream-00012``).
        seed: members of a group share the environment's seed and have different seeds for the policy.
        breaker: a circuit breaker that counted earlier groups; by default a new one.
        numbers: of the groups, which fix their seeds and trajectory ids; by default 0, 1, 2…
        on_group: called with each complete group.

    Raises:
        RolloutsFailingError: the fraction of failed groups stayed above the limit.
    """
    runner = _GroupRunner(
        factory=factory,
        make_policy=make_policy,
        name=name,
        seed=seed,
        settings=settings,
        origin=origin,
        breaker=breaker or CircuitBreaker(settings),
        slots=asyncio.Semaphore(settings.concurrency),
    )
    given = zip(range(len(tasks)) if numbers is None else numbers, tasks, strict=True)

    async def run_one(number: int, task: Task) -> RolloutGroup | RolloutFailure:
        result = await runner.run(number, task)
        if on_group is not None and isinstance(result, RolloutGroup):
            on_group(result)
        return result

    try:
        async with asyncio.TaskGroup() as tasks_running:
            running = [tasks_running.create_task(run_one(number, task)) for number, task in given]
    except ExceptionGroup as several:
        raise several.exceptions[0] from None  # the others were cancelled because of the first
    for each in running:
        result = each.result()
        if isinstance(result, RolloutGroup):
            runner.report.groups.append(result)
        else:
            runner.report.dropped.append(result)
    return runner.report


class _GroupFailedError(Exception):
    """A member failed: cancels the others, since the group cannot be complete."""

    def __init__(self, failure: RolloutFailure) -> None:
        super().__init__(failure.message)
        self.failure = failure


@dataclass(slots=True, kw_only=True)
class _GroupRunner:
    factory: EnvironmentFactory
    make_policy: PolicyFactory
    name: str
    seed: int
    settings: GroupSettings
    origin: Origin
    breaker: CircuitBreaker
    slots: asyncio.Semaphore
    report: GroupReport = field(default_factory=GroupReport)

    async def run(self, number: int, task: Task) -> RolloutGroup | RolloutFailure:
        result = await self._run(number, task)
        try:
            self.breaker.count(result)
        finally:
            self.report.pauses = self.breaker.pauses
        return result

    async def _run(self, number: int, task: Task) -> RolloutGroup | RolloutFailure:
        try:
            async with asyncio.TaskGroup() as group:
                members = [
                    group.create_task(self._member(number, member, task))
                    for member in range(self.settings.size)
                ]
        except ExceptionGroup as several:
            failed = [error for error in several.exceptions if isinstance(error, _GroupFailedError)]
            if len(failed) < len(several.exceptions):
                raise next(e for e in several.exceptions if e not in failed) from None
            return failed[0].failure
        trajectories = tuple(member.result() for member in members)
        return _different_start(task, trajectories) or RolloutGroup(task=task, trajectories=trajectories)

    async def _member(self, number: int, member: int, task: Task) -> Trajectory:
        trajectory_id = f"{self.name}-{number:04d}-{member:02d}"
        group_seed = derive_seed(self.seed, "group", number)
        seed = derive_seed(self.seed, "member", number, member)
        async with self.slots:
            await self.breaker.closed()
            result = await run_episode(
                lambda: self.factory.make(task, seed=group_seed),
                lambda environment: self.make_policy(environment, trajectory_id, seed),
                trajectory_id=trajectory_id,
                task=task,
                seed=seed,
                retries=self.settings.retries,
                max_seconds=self.settings.max_seconds,
                keep_world_sheet=self.settings.world_sheets,
                origin=self.origin,
            )
        if isinstance(result, RolloutFailure):
            raise _GroupFailedError(result)
        self.report.episodes += 1
        self.report.steps += len(result.chosen)
        return result


class CircuitBreaker:
    """Opens when too many of the last groups failed; new episodes then wait until the pause is over.

    It counts groups and not episodes, since one failing task fails all members of its group.
    """

    def __init__(self, settings: GroupSettings, on_pause: Callable[[str], None] | None = None) -> None:
        """`on_pause` receives the reason when it opens."""
        self.pauses = 0
        self._settings = settings
        self._on_pause = on_pause
        self._recent: deque[RolloutFailure | None] = deque(maxlen=settings.failure_window)
        self._until = 0.0

    def count(self, result: RolloutGroup | RolloutFailure) -> None:
        """
        Raises:
            RolloutsFailingError: it would open more often than the settings allow.
        """
        self._recent.append(result if isinstance(result, RolloutFailure) else None)
        failures = [failure for failure in self._recent if failure is not None]
        full = len(self._recent) == self._settings.failure_window
        if not full or len(failures) <= self._settings.failure_limit * len(self._recent):
            return
        reason = self._reason(failures)
        self._recent.clear()
        if self.pauses >= self._settings.pauses:
            raise RolloutsFailingError(
                f"{reason}; no improvement after {self.pauses} pauses: fix the cause, then resume the run"
            )
        self.pauses += 1
        if self._on_pause is not None:
            self._on_pause(f"{reason}; retrying in {self._settings.pause:g} seconds")
        self._until = asyncio.get_running_loop().time() + self._settings.pause

    async def closed(self) -> None:
        """Wait for the end of a pause, if there is one."""
        left = self._until - asyncio.get_running_loop().time()
        if left > 0:
            await asyncio.sleep(left)
            await self.closed()

    def _reason(self, failures: Sequence[RolloutFailure]) -> str:
        kinds = Counter(str(failure.kind) for failure in failures)
        counts = ", ".join(f"{count} {kind}" for kind, count in kinds.most_common())
        return (
            f"{len(failures)} of the last {len(self._recent)} rollout groups failed, more than the limit of "
            f"{self._settings.failure_limit:.0%} ({counts}); the last one: {failures[-1].message[:300]}"
        )


def _different_start(task: Task, members: Sequence[Trajectory]) -> RolloutFailure | None:
    """The failure of a group whose members did not start alike."""
    first, (state, *known) = members[0], _start_of(members[0])
    for other in members[1:]:
        theirs, *others = _start_of(other)
        if [theirs, *others] != [state, *known]:
            return RolloutFailure(
                task=task,
                kind=FailureKind.CONTRADICTION,
                message=f"expected members that start alike, got {str(state)[:100]!r} in {first.id} "
                f"and {str(theirs)[:100]!r} in {other.id}: the seed does not fix the start",
                attempts=1,
            )
    return None


def _start_of(trajectory: Trajectory) -> list[object]:
    """The text before the policy's first turn, the hidden facts, and the given turns."""
    turns = trajectory.transitions[: trajectory.given]
    texts = [trajectory.start.text, *(turn.outcome.next_state.text for turn in turns)]
    return [texts[-1], trajectory.sheet, *texts, *(turn.action for turn in turns)]
