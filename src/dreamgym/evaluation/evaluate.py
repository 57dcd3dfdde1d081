"""How often a policy succeeds in reality, and how much oftener than another on the same episodes.

Episode i of an evaluation is fixed by split, seed and i: task, environment and dice are the same for every
policy. So two policies are compared episode by episode, which tells differences from luck with far fewer
episodes than two shares side by side.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Self

from dreamgym.data.trajectories import TrajectoryWriter, read_trajectories
from dreamgym.envs.wrappers import StepCounter
from dreamgym.errors import ConfigError, DataError
from dreamgym.evaluation.statistics import Estimate, mcnemar, paired_difference, share_of_episodes
from dreamgym.gc_pause import gc_frozen
from dreamgym.protocols import EnvironmentFactory
from dreamgym.rollout_groups import GroupSettings, PolicyFactory, run_groups
from dreamgym.rollouts import Limits
from dreamgym.types import Task, Trajectory


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationSettings:
    """Which episodes are played, and how."""

    split: str
    episodes: int = 200
    seed: int = 0
    concurrency: int = 64
    retries: int = 2
    seconds: float | None = None
    """An episode that takes longer has failed, which is not the policy's fault."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Episode:
    """What came of one episode."""

    number: int
    task: str
    family: str
    success: bool
    steps: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """What came of all of them."""

    policy: str
    environment: str
    settings: EvaluationSettings
    episodes: tuple[Episode, ...]
    failures: Mapping[str, int]
    """Episodes that could not be played, by kind: in no share."""
    real_steps: int
    """All that were taken, also in episodes that broke."""
    seconds: float

    @property
    def success(self) -> Estimate:
        return share_of_episodes(episode.success for episode in self.episodes)

    def by_family(self) -> dict[str, Estimate]:
        families = sorted({episode.family for episode in self.episodes})
        return {
            family: share_of_episodes(each.success for each in self.episodes if each.family == family)
            for family in families
        }

    def to_dict(self) -> dict[str, Any]:
        return {
            "policy": self.policy,
            "environment": self.environment,
            **asdict(self.settings),
            "success": self.success.to_dict(),
            "by_family": {name: share.to_dict() for name, share in self.by_family().items()},
            "failures": dict(self.failures),
            "real_steps": self.real_steps,
            "steps_per_episode": sum(e.steps for e in self.episodes) / max(1, len(self.episodes)),
            "wall_seconds": round(self.seconds, 2),
            "outcomes": [asdict(episode) for episode in self.episodes],
        }

    @classmethod
    def from_dict(cls, stored: Mapping[str, Any]) -> Self:
        """
        Raises:
            DataError: it is not what `to_dict` made.
        """
        try:
            return cls(
                policy=str(stored["policy"]),
                environment=str(stored["environment"]),
                settings=EvaluationSettings(
                    **{name: stored[name] for name in EvaluationSettings.__dataclass_fields__}
                ),
                episodes=tuple(Episode(**each) for each in stored["outcomes"]),
                failures=dict(stored["failures"]),
                real_steps=int(stored["real_steps"]),
                seconds=float(stored["wall_seconds"]),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise DataError(f"expected a stored evaluation, {error!r}") from None


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """The first policy against the second, on the episodes that both could play."""

    difference: Estimate
    """In success; above 0 where the first is better."""
    first_only: int
    second_only: int

    @property
    def p_value(self) -> float:
        return mcnemar(self.first_only, self.second_only)

    def to_dict(self) -> dict[str, Any]:
        return {
            "difference": self.difference.to_dict(),
            "first_only": self.first_only,
            "second_only": self.second_only,
            "p_value": self.p_value,
        }


async def evaluate(
    factory: EnvironmentFactory,
    make_policy: PolicyFactory,
    settings: EvaluationSettings,
    *,
    policy: str,
    on_episode: Callable[[], None] | None = None,
    keep: Path | None = None,
) -> Evaluation:
    """Play the episodes of `settings` with one policy.

    Args:
        policy: what it is called in the result.
        on_episode: called when one has ended.
        keep: folder for the trajectories, of this policy and these settings alone. Episodes that are there
            are not played again, so an evaluation that was stopped goes on.

    Raises:
        ConfigError: there is no such split.
        RolloutsFailingError: too many episodes cannot be played.
    """
    began = time.perf_counter()
    metered = StepCounter(factory, on_end=on_episode)
    tasks = await tasks_of(factory, settings)
    with gc_frozen(), nullcontext() if keep is None else TrajectoryWriter(keep) as writer:
        kept = (
            []
            if keep is None or not (writer and writer.ids)
            else list(map(_episode, read_trajectories(keep)))
        )
        behind = {episode.number: episode for episode in kept if episode.number < len(tasks)}
        missing = [number for number in range(len(tasks)) if number not in behind]
        for _ in behind:
            metered.on_end()
        report = await run_groups(
            metered,
            make_policy,
            [tasks[number] for number in missing],
            name="evaluation",
            seed=settings.seed,
            settings=GroupSettings(
                size=1,
                concurrency=settings.concurrency,
                retries=settings.retries,
                limits=Limits(seconds=settings.seconds),
            ),
            numbers=missing,
            on_group=None if writer is None else lambda group: _keep(writer, group.trajectories[0]),
        )
    played = {episode.number: episode for episode in (_episode(g.trajectories[0]) for g in report.groups)}
    return Evaluation(
        policy=policy,
        environment=factory.name,
        settings=settings,
        episodes=tuple(episode for _, episode in sorted((behind | played).items())),
        failures={str(kind): count for kind, count in report.failures.items()},
        real_steps=metered.steps + sum(episode.steps for episode in behind.values()),
        seconds=time.perf_counter() - began,
    )


async def tasks_of(factory: EnvironmentFactory, settings: EvaluationSettings) -> list[Task]:
    """One task per episode; a split with fewer tasks than episodes is gone through again."""
    try:
        found = await factory.tasks(settings.split, settings.episodes, seed=settings.seed)
    except ConfigError:
        # Fewer tasks than episodes; a split that does not exist raises again, without a count.
        found = await factory.tasks(settings.split, None, seed=settings.seed)
    if not found:
        raise ConfigError(f"split {settings.split!r} of {factory.name!r} holds no tasks")
    return [found[number % len(found)] for number in range(settings.episodes)]


def compare(first: Evaluation, second: Evaluation) -> Comparison:
    """
    Raises:
        ConfigError: they did not play the same episodes.
    """
    mine, theirs = first.settings, second.settings
    if (first.environment, mine.split, mine.seed) != (second.environment, theirs.split, theirs.seed):
        raise ConfigError(
            f"expected evaluations of the same episodes, got {first.environment}/{mine.split} with seed "
            f"{mine.seed} and {second.environment}/{theirs.split} with seed {theirs.seed}"
        )
    others = {(episode.number, episode.task): episode for episode in second.episodes}
    pairs = [
        (episode.success, others[episode.number, episode.task].success)
        for episode in first.episodes
        if (episode.number, episode.task) in others
    ]
    return Comparison(
        difference=paired_difference(pairs),
        first_only=sum(one and not two for one, two in pairs),
        second_only=sum(two and not one for one, two in pairs),
    )


def evaluation_rows(evaluations: Sequence[Evaluation]) -> list[tuple[str, ...]]:
    """(policy, family, episodes, success with its interval, steps per episode); all families first."""
    rows: list[tuple[str, ...]] = []
    for each in evaluations:
        steps = sum(e.steps for e in each.episodes) / max(1, len(each.episodes))
        rows.append((each.policy, "all", str(len(each.episodes)), str(each.success), f"{steps:.1f}"))
        families = each.by_family()
        if len(families) > 1:
            rows += [("", family, str(share.count), str(share), "") for family, share in families.items()]
    return rows


def _keep(writer: TrajectoryWriter, trajectory: Trajectory) -> None:
    """Without the tokens: nobody learns from an evaluation, and prompts grow with every turn."""
    turns = tuple(replace(turn, completion=None) for turn in trajectory.transitions)
    writer.append([replace(trajectory, transitions=turns)])


def _episode(trajectory: Trajectory) -> Episode:
    return Episode(
        number=int(trajectory.id.split("-")[-2]),
        task=trajectory.task.id,
        family=trajectory.task.family,
        success=trajectory.success,
        steps=len(trajectory),
    )
