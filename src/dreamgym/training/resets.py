"""Rollout groups of a dream that begin within a known episode: a backward curriculum over recorded successes,
or branches of the policy's own episodes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from random import Random
from typing import Any

from dreamgym.config import Config, TrainConfig
from dreamgym.data.schema import decode_trajectory, encode_trajectory
from dreamgym.envs.registry import EnvironmentSpec
from dreamgym.envs.wrappers import StepCounter
from dreamgym.errors import ConfigError
from dreamgym.protocols import TaskSource
from dreamgym.training.dream_loading import Dream
from dreamgym.training.warm_start import with_thoughts
from dreamgym.types import JsonValue, RolloutGroup, Task, Trajectory, Transition

_BACK = 0.5
"""Below this share of `train.reset_success`, groups begin one turn later again."""


class Resets:
    """A `TaskSource` around another one. It also says after which turns the episodes of a task begin."""

    def __init__(
        self,
        tasks: TaskSource,
        settings: TrainConfig,
        successes: Mapping[str, Trajectory] | None = None,
        *,
        seed: int = 0,
    ) -> None:
        """
        Args:
            successes: recorded ones by task id, for ``train.resets=backward``.
        """
        self.distance = 1
        """Backward: turns before the end of a recorded success at which episodes begin."""
        self._tasks = tasks
        self._settings = settings
        self._successes = successes or {}
        self._seed = seed
        self._steps = 0
        self._branches: list[Trajectory] = []
        """Own episodes of the step before, each cut off where its branch begins."""
        self._turns: dict[str, tuple[Transition, ...]] = {}
        """By task id, in the step that was sampled last."""

    def begin_after(self, task: Task) -> tuple[Transition, ...]:
        return self._turns.get(task.id, ())

    async def sample(self, count: int) -> Sequence[Task]:
        most = round(count * self._settings.reset_fraction)
        if self._settings.resets == "branch":
            chosen = self._branches[: min(most, count - 1)]
            self._turns = {each.task.id: each.transitions for each in chosen}
            return [*await self._tasks.sample(count - len(chosen)), *(each.task for each in chosen)]
        tasks, self._turns = await self._tasks.sample(count), {}
        for task in tasks:
            success = self._successes.get(task.id)
            if success is not None and len(success) > self.distance and len(self._turns) < most:
                self._turns[task.id] = success.transitions[: -self.distance]
        return tasks

    async def record(self, groups: Sequence[RolloutGroup]) -> dict[str, JsonValue]:
        """Groups that began within an episode say little about their task, so only the others are passed
        on."""
        within = [group for group in groups if group.trajectories[0].given]
        whole = [group for group in groups if not group.trajectories[0].given]
        metrics = dict(await self._tasks.record(whole))
        members = [each for group in within for each in group.trajectories]
        metrics |= {"reset_groups": len(within), "given_turns": sum(each.given for each in members)}
        if members:
            success = sum(each.success for each in members) / len(members)
            metrics |= {"reset_success": round(success, 4), "reset_distance": self.distance}
            if self._settings.resets == "backward":
                self._move(success)
        self._steps += 1
        if self._settings.resets == "branch":
            self._branches = self._cut(whole)
        return metrics

    def _move(self, success: float) -> None:
        bound = self._settings.reset_success
        if success >= bound:
            self.distance += 1
        elif success < _BACK * bound:
            self.distance = max(1, self.distance - 1)

    def _cut(self, groups: Sequence[RolloutGroup]) -> list[Trajectory]:
        """A random member of each group, cut off at a random turn; groups whose members are about evenly
        successes and failures first, none of those that are all alike."""
        random = Random(f"branches/{self._seed}/{self._steps}")
        found: dict[str, tuple[float, Trajectory]] = {}
        for group in groups:
            share = sum(each.success for each in group.trajectories) / len(group.trajectories)
            member = random.choice(group.trajectories)
            if 0 < share < 1 and len(member) > 1:
                turns = member.transitions[: random.randrange(1, len(member))]
                cut = Trajectory(
                    id=member.id,
                    task=group.task,
                    start=member.start,
                    transitions=turns,
                    provenance=member.provenance,
                )
                found[group.task.id] = (abs(share - 0.5), cut)
        return [cut for _, cut in sorted(found.values(), key=lambda each: each[0])]

    def state_dict(self) -> dict[str, JsonValue]:
        return {
            "tasks": self._tasks.state_dict(),
            "distance": self.distance,
            "steps": self._steps,
            "branches": [encode_trajectory(each) for each in self._branches],
        }

    def load_state_dict(self, stored: Mapping[str, Any]) -> None:
        try:
            self._tasks.load_state_dict(stored["tasks"])
            self.distance, self._steps = int(stored["distance"]), int(stored["steps"])
            self._branches = [decode_trajectory(line) for line in stored["branches"]]
        except KeyError as missing:
            raise ConfigError(
                f"expected the state of a run with train.resets, found none of {missing}: use the settings "
                "that the run was started with"
            ) from None


def with_resets(
    tasks: TaskSource,
    config: Config,
    factory: StepCounter,
    offline: Sequence[Trajectory],
    spec: EnvironmentSpec | None,
) -> TaskSource:
    """The tasks as they are without ``train.resets``; else with resets in the dream of `factory`."""
    if config.train.resets == "none":
        return tasks
    dream = factory.inner
    assert isinstance(dream, Dream)
    found: dict[str, Trajectory] = {}
    for each in offline if config.train.resets == "backward" else ():
        if (
            each.success
            and each.graded
            and (each.task.id not in found or len(each) < len(found[each.task.id]))
        ):
            found[each.task.id] = each
    if config.agent.thought and spec is not None and spec.think is not None:
        found = {name: with_thoughts(each, spec.think) for name, each in found.items()}
    resets = Resets(tasks, config.train, found, seed=config.seed)
    dream.begin_after = resets.begin_after
    return resets
