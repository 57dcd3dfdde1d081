"""The success rate of a policy in the real environment, and its difference to another one on the same
episodes: split, seed and number determine task and randomness of an episode for every policy."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from dreamgym.data.trajectories import TrajectoryWriter, read_trajectories
from dreamgym.distributed.player import GroupPlayer, GroupRequest, LocalPlayer
from dreamgym.envs.episode import first_tasks
from dreamgym.envs.wrappers import StepCounter
from dreamgym.errors import ConfigError
from dreamgym.evaluation.statistics import (
    Estimate,
    mcnemar,
    mean_of_steps,
    paired_difference,
    share_of_episodes,
)
from dreamgym.gc_pause import gc_frozen
from dreamgym.protocols import EnvironmentFactory
from dreamgym.rollouts import CircuitBreaker, GroupSettings, PolicyFactory
from dreamgym.types import RolloutGroup, Task, Trajectory


@dataclass(frozen=True, slots=True, kw_only=True)
class Episode:
    """The result of one episode."""

    number: int
    task: str
    family: str
    success: bool
    steps: int
    reward: float = 0.0
    """Of all steps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """The results of one policy on the episodes of a split."""

    policy: str
    environment: str
    split: str
    seed: int
    episodes: tuple[Episode, ...]
    failures: Mapping[str, int]
    """Episodes that could not be played, by kind; they count in no share."""
    real_steps: int
    """All of them, also in episodes that failed."""
    seconds: float

    @property
    def success(self) -> Estimate:
        return share_of_episodes(episode.success for episode in self.episodes)

    @property
    def mean_reward(self) -> Estimate:
        """Total reward of an episode; other than `success` where an environment grades (WebShop's score)."""
        return mean_of_steps((str(episode.number), episode.reward) for episode in self.episodes)

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
            "split": self.split,
            "episodes": len(self.episodes) + sum(self.failures.values()),
            "seed": self.seed,
            "success": self.success.to_dict(),
            "mean_reward": self.mean_reward.to_dict(),
            "by_family": {name: share.to_dict() for name, share in self.by_family().items()},
            "failures": dict(self.failures),
            "real_steps": self.real_steps,
            "steps_per_episode": sum(e.steps for e in self.episodes) / max(1, len(self.episodes)),
            "wall_seconds": round(self.seconds, 2),
            "outcomes": [asdict(episode) for episode in self.episodes],
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """The first policy against the second, on the episodes that both have played."""

    difference: Estimate
    """In success; positive if the first is better."""
    first_only: int
    second_only: int

    @property
    def p_value(self) -> float:
        return mcnemar(self.first_only, self.second_only)

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "p_value": self.p_value}


async def evaluate(
    factory: EnvironmentFactory,
    make_policy: PolicyFactory | None = None,
    *,
    split: str,
    episodes: int = 200,
    seed: int = 0,
    concurrency: int = 64,
    retries: int = 2,
    policy: str = "policy",
    on_episode: Callable[[], None] | None = None,
    keep: Path | None = None,
    player: GroupPlayer | None = None,
) -> Evaluation:
    """Play episodes of one split with one policy, that of `make_policy` or of the `player`. The directory
    `keep` holds the trajectories of this policy and these arguments: an interrupted evaluation resumes from
    it."""
    began = time.perf_counter()
    settings = GroupSettings(size=1, concurrency=concurrency, retries=retries, world_sheets=False)
    if player is None:
        assert make_policy is not None, "pass make_policy or player"
        player = LocalPlayer(StepCounter(factory), make_policy, CircuitBreaker(settings))
    notify = on_episode or (lambda: None)
    tasks = await tasks_of(factory, split, episodes, seed)
    with gc_frozen(), nullcontext() if keep is None else TrajectoryWriter(keep) as writer:
        kept = map(_episode, read_trajectories(keep)) if keep is not None and writer and writer.ids else ()
        behind = {episode.number: episode for episode in kept if episode.number < len(tasks)}
        missing = [number for number in range(len(tasks)) if number not in behind]
        for _ in behind:
            notify()

        def on_group(group: RolloutGroup) -> None:
            if writer is not None:
                _keep(writer, group.trajectories[0])
            notify()

        request = GroupRequest(
            tasks=[tasks[number] for number in missing],
            name="evaluation",
            seed=seed,
            settings=settings,
            numbers=missing,
            on_group=on_group,
        )
        report = await player.play(request)
    played = {episode.number: episode for episode in (_episode(g.trajectories[0]) for g in report.groups)}
    return Evaluation(
        policy=policy,
        environment=factory.name,
        split=split,
        seed=seed,
        episodes=tuple(episode for _, episode in sorted((behind | played).items())),
        failures={str(kind): count for kind, count in report.failures.items()},
        real_steps=report.taken + sum(episode.steps for episode in behind.values()),
        seconds=time.perf_counter() - began,
    )


async def tasks_of(factory: EnvironmentFactory, split: str, episodes: int, seed: int) -> list[Task]:
    """One task per episode; tasks repeat where a split has fewer."""
    if factory.splits and split not in factory.splits:
        raise ConfigError(f"unknown split {split!r} of {factory.name!r}; it has: {', '.join(factory.splits)}")
    found = await first_tasks(factory, split, episodes, seed=seed)
    if not found:
        raise ConfigError(f"split {split!r} of {factory.name!r} holds no tasks")
    return [found[number % len(found)] for number in range(episodes)]


def evaluation_split(splits: Sequence[str]) -> str:
    """The split for final evaluations: the last one that an environment names.

    >>> evaluation_split(("train", "valid_seen", "valid_unseen"))
    'valid_unseen'
    """
    return splits[-1]


def validation_split(splits: Sequence[str]) -> str:
    """The split that selects among policies: the one after the training split.

    >>> validation_split(("train", "valid_seen", "valid_unseen")), validation_split(("train",))
    ('valid_seen', 'train')
    """
    return splits[min(1, len(splits) - 1)]


def compare(first: Evaluation, second: Evaluation) -> Comparison:
    if (first.environment, first.split, first.seed) != (second.environment, second.split, second.seed):
        raise ConfigError(
            f"expected evaluations of the same episodes, got {first.environment}/{first.split} with seed "
            f"{first.seed} and {second.environment}/{second.split} with seed {second.seed}"
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


def evaluation_rows(
    evaluations: Sequence[Evaluation], labels: Sequence[str] | None = None
) -> list[tuple[str, ...]]:
    """(policy, family, episodes, success with its interval, steps per episode), all families first."""
    rows: list[tuple[str, ...]] = []
    for label, each in zip(labels or [each.policy for each in evaluations], evaluations, strict=True):
        steps = sum(e.steps for e in each.episodes) / max(1, len(each.episodes))
        rows.append((label, "all", str(len(each.episodes)), each.success.percent(), f"{steps:.1f}"))
        families = each.by_family()
        if len(families) > 1:
            rows += [
                ("", family, str(share.count), share.percent(), "") for family, share in families.items()
            ]
    return rows


def _keep(writer: TrajectoryWriter, trajectory: Trajectory) -> None:
    """Without tokens: no learner reads an evaluation, and prompts grow with every turn."""
    turns = tuple(replace(turn, completion=None) for turn in trajectory.transitions)
    writer.append([replace(trajectory, transitions=turns)])


def _episode(trajectory: Trajectory) -> Episode:
    return Episode(
        number=int(trajectory.id.split("-")[-2]),
        task=trajectory.task.id,
        family=trajectory.task.family,
        success=trajectory.success,
        steps=len(trajectory),
        reward=trajectory.total_reward,
    )
