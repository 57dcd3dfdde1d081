"""Plays rollout groups: n episodes of one task that start alike, many groups at once.

A group is whole or it is not there: its returns are compared with one another, so members that are missing,
or that began elsewhere, would make luck look like merit. What could not be played is counted by kind. When
too much of it fails, the cause is hardly the episodes: a breaker pauses, tries again, and then says why it
stops.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from dreamgym.errors import RolloutsFailingError
from dreamgym.protocols import Environment, EnvironmentFactory, Policy
from dreamgym.rollouts import NO_LIMITS, REAL, Limits, Origin, run_episode
from dreamgym.types import FailureKind, RolloutFailure, RolloutGroup, Task, Trajectory

PolicyFactory = Callable[[Environment, str, int], Policy]
"""Makes the policy of one episode from its environment, its trajectory's id and a seed of its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupSettings:
    """How groups are played, and when to give up."""

    size: int = 8
    """Episodes of one task (the paper's n)."""
    concurrency: int = 256
    """Episodes in flight."""
    retries: int = 2
    limits: Limits = NO_LIMITS
    failure_limit: float = 0.5
    """Share of failed groups among the last `failure_window` above which the breaker opens."""
    failure_window: int = 8
    pause: float = 10.0
    """Seconds before going on after the breaker opened."""
    pauses: int = 2
    """How often to go on; then `RolloutsFailingError`."""


@dataclass(slots=True, kw_only=True)
class GroupReport:
    """What came of the groups that were asked for."""

    groups: list[RolloutGroup] = field(default_factory=list)
    """Whole ones, in the order of their tasks."""
    dropped: list[RolloutFailure] = field(default_factory=list)
    """One per group that is missing: what broke it."""
    episodes: int = 0
    steps: int = 0
    pauses: int = 0

    @property
    def failures(self) -> Counter[FailureKind]:
        return Counter(failure.kind for failure in self.dropped)


OnPause = Callable[[str], None]
OnGroup = Callable[[RolloutGroup], None]
_USUAL = GroupSettings()


async def run_groups(
    factory: EnvironmentFactory,
    make_policy: PolicyFactory,
    tasks: Sequence[Task],
    *,
    name: str,
    seed: int = 0,
    settings: GroupSettings = _USUAL,
    origin: Origin = REAL,
    breaker: Breaker | None = None,
    numbers: Sequence[int] | None = None,
    on_group: OnGroup | None = None,
) -> GroupReport:
    """One group for each task; the same task twice makes two groups.

    Args:
        name: opens the ids of the trajectories, so it must be new in this run (``dream-00012``, say).
        seed: fixes every episode: members of a group share the environment's seed and differ in the policy's.
        breaker: one that has watched earlier steps too; by default a new one.
        numbers: of the groups, which fix their dice and the ids of their trajectories; 0, 1, 2… by default.
        on_group: told of every whole group as soon as it has been played.

    Raises:
        RolloutsFailingError: the share of failures stayed above the limit.
    """
    run = _Groups(factory, make_policy, name, seed, settings, origin, breaker)
    given = zip(range(len(tasks)) if numbers is None else numbers, tasks, strict=True)

    async def told(number: int, task: Task) -> RolloutGroup | RolloutFailure:
        result = await run.play(number, task)
        if on_group is not None and isinstance(result, RolloutGroup):
            on_group(result)
        return result

    try:
        async with asyncio.TaskGroup() as everything:
            plays = [everything.create_task(told(number, task)) for number, task in given]
    except ExceptionGroup as several:
        raise several.exceptions[0] from None  # the others were cancelled because of the first
    for play in plays:
        result = play.result()
        if isinstance(result, RolloutGroup):
            run.report.groups.append(result)
        else:
            run.report.dropped.append(result)
    return run.report


class _GroupBrokenError(Exception):
    """A member failed: cancels the others, which could not be compared with anything."""

    def __init__(self, failure: RolloutFailure) -> None:
        super().__init__(failure.message)
        self.failure = failure


class _Groups:
    def __init__(
        self,
        factory: EnvironmentFactory,
        make_policy: PolicyFactory,
        name: str,
        seed: int,
        settings: GroupSettings,
        origin: Origin,
        breaker: Breaker | None,
    ) -> None:
        self.report = GroupReport()
        self._factory = factory
        self._make_member = make_policy
        self._name = name
        self._seed = seed
        self._settings = settings
        self._origin = origin
        self._places = asyncio.Semaphore(settings.concurrency)
        self._breaker = breaker or Breaker(settings)

    async def play(self, number: int, task: Task) -> RolloutGroup | RolloutFailure:
        result = await self._play(number, task)
        try:
            self._breaker.count(result)
        finally:
            self.report.pauses = self._breaker.pauses
        return result

    async def _play(self, number: int, task: Task) -> RolloutGroup | RolloutFailure:
        try:
            async with asyncio.TaskGroup() as group:
                members = [
                    group.create_task(self._member(number, member, task))
                    for member in range(self._settings.size)
                ]
        except ExceptionGroup as several:
            broken = [error for error in several.exceptions if isinstance(error, _GroupBrokenError)]
            if len(broken) < len(several.exceptions):
                raise next(e for e in several.exceptions if e not in broken) from None
            return broken[0].failure
        trajectories = tuple(member.result() for member in members)
        return _unlike(task, trajectories) or RolloutGroup(task=task, trajectories=trajectories)

    async def _member(self, number: int, member: int, task: Task) -> Trajectory:
        trajectory_id = f"{self._name}-{number:04d}-{member:02d}"
        shared = self._seed * 1_000_003 + number
        own = shared * 1_009 + member
        async with self._places:
            await self._breaker.closed()
            result = await run_episode(
                lambda: self._factory.make(task, seed=shared),
                lambda environment: self._make_member(environment, trajectory_id, own),
                trajectory_id=trajectory_id,
                task=task,
                seed=own,
                retries=self._settings.retries,
                limits=self._settings.limits,
                origin=self._origin,
            )
        if isinstance(result, RolloutFailure):
            raise _GroupBrokenError(result)
        self.report.episodes += 1
        self.report.steps += len(result)
        return result


class Breaker:
    """Opens when too many of the last groups failed; episodes wait before it until the pause is over.

    Groups are counted and not episodes, since one broken task breaks all members of its group.
    """

    def __init__(self, settings: GroupSettings, on_pause: OnPause | None = None) -> None:
        """`on_pause` is told why, when it opens."""
        self.pauses = 0
        self._settings = settings
        self._on_pause = on_pause
        self._recent: deque[RolloutFailure | None] = deque(maxlen=settings.failure_window)
        self._until = 0.0

    def count(self, result: RolloutGroup | RolloutFailure) -> None:
        """
        Raises:
            RolloutsFailingError: it would have to open once more than the settings allow.
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
                f"{reason}; after {self.pauses} pauses it is no better: mend the cause, then resume the run"
            )
        self.pauses += 1
        if self._on_pause is not None:
            self._on_pause(f"{reason}; going on in {self._settings.pause:g} seconds")
        self._until = asyncio.get_running_loop().time() + self._settings.pause

    async def closed(self) -> None:
        """Waits for the end of a pause, if there is one."""
        left = self._until - asyncio.get_running_loop().time()
        if left > 0:
            await asyncio.sleep(left)
            await self.closed()

    def _reason(self, failures: Sequence[RolloutFailure]) -> str:
        kinds = Counter(str(failure.kind) for failure in failures)
        told = ", ".join(f"{count} {kind}" for kind, count in kinds.most_common())
        return (
            f"{len(failures)} of the last {len(self._recent)} rollout groups failed, more than the limit of "
            f"{self._settings.failure_limit:.0%} ({told}); the last one: {failures[-1].message[:300]}"
        )


def _unlike(task: Task, members: Sequence[Trajectory]) -> RolloutFailure | None:
    """The failure of a group whose members did not begin in the same world."""
    first = members[0]
    for other in members[1:]:
        if other.start.text != first.start.text or other.sheet != first.sheet:
            return RolloutFailure(
                task=task,
                kind=FailureKind.CONTRADICTION,
                message=f"expected members that start alike, got {first.start.text[:100]!r} in {first.id} "
                f"and {other.start.text[:100]!r} in {other.id}: the environment does not keep to its seed",
                attempts=1,
            )
    return None
