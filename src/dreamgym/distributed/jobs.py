"""What a driver sends to a worker and gets back. Everything here can be pickled."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol

from dreamgym.envs.synthetic import EpisodeStart
from dreamgym.evaluation.closed_loop import ActionList
from dreamgym.models.usage import UsageRow, stage
from dreamgym.rollouts import GroupSettings, Origin, run_groups
from dreamgym.seeding import derive_seed
from dreamgym.training.audits import Replayed, replay
from dreamgym.types import FailureKind, RolloutFailure, RolloutGroup, Task, Transition

if TYPE_CHECKING:
    from dreamgym.distributed.worker import WorkerState

UsageRows = Mapping[tuple[str, str, str], UsageRow]
"""Usage of endpoints by (stage, role, endpoint)."""


class Job(Protocol):
    """One piece of work for a worker; a job that is done twice gives the same result."""

    @property
    def name(self) -> str:
        """For messages."""
        ...

    async def run(self, state: WorkerState) -> Any: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupResult:
    """A played group, and what it used."""

    number: int
    result: RolloutGroup | RolloutFailure
    episodes: int = 0
    steps: int = 0
    """Of complete episodes."""
    taken: int = 0
    """Environment steps, also those of failed attempts."""
    usage: UsageRows = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupJob:
    """Play one rollout group."""

    number: int
    task: Task
    prefix: str
    """Of the trajectory ids."""
    seed: int
    settings: GroupSettings
    origin: Origin
    stage: str = "train"
    """Under which usage of endpoints is counted."""
    start: EpisodeStart | None = None
    """Of an imagined episode whose task is not among the recorded ones."""
    turns: Sequence[Transition] = ()
    """Of a known episode, after which an imagined one begins."""
    experience_version: int = 0
    """The audit after which the weights of the experience model were saved; 0 for the original ones."""
    limit: int | None = None
    """Environment steps that it may take."""

    @property
    def name(self) -> str:
        return f"{self.prefix}-{self.number:04d}"

    async def run(self, state: WorkerState) -> GroupResult:
        factory = state.counter(self.limit)
        if self.experience_version:
            state.load_experience(self.experience_version)
        state.turns[self.task.id] = self.turns
        if self.start is not None:
            state.starts[self.task.id, derive_seed(self.seed, "group", self.number)] = self.start
        # The driver's circuit breaker counts failures; this one must not pause.
        settings = replace(self.settings, failure_limit=1.0)
        with stage(self.stage):
            report = await run_groups(
                factory,
                state.make_policy,
                [self.task],
                name=self.prefix,
                seed=self.seed,
                settings=settings,
                origin=self.origin,
                numbers=[self.number],
            )
        return GroupResult(
            number=self.number,
            result=report.groups[0] if report.groups else report.dropped[0],
            episodes=report.episodes,
            steps=report.steps,
            taken=factory.steps,
            usage=state.new_usage(),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayJob:
    """Take the actions of an imagined episode in the real environment."""

    actions: ActionList
    trajectory_id: str

    @property
    def name(self) -> str:
        return self.trajectory_id

    async def run(self, state: WorkerState) -> Replayed:
        assert state.real is not None, "a worker of a run with audits has the real environment"
        return await replay(state.real, self.actions, self.trajectory_id)


@dataclass(frozen=True, slots=True, kw_only=True)
class Loss:
    """A job that no worker finished."""

    kind: FailureKind
    message: str
    attempts: int
