"""Results of episodes that another trainer plays: they reach the task pool, the curriculum and the replay
buffer, as those of our own training loop do."""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dreamgym.curriculum.curriculum import Curriculum
from dreamgym.curriculum.task_pool import FILE, TaskPool
from dreamgym.data.trajectories import TrajectoryWriter
from dreamgym.seeding import derive_seed
from dreamgym.training.curriculum_setup import curriculum_of, generates
from dreamgym.training.dream_loading import Dream
from dreamgym.training.experience_run import known_environment
from dreamgym.training.metrics import MetricsLog
from dreamgym.training.run_dir import METRICS, TRAJECTORIES
from dreamgym.types import RolloutGroup, Task, Trajectory

logger = logging.getLogger("dreamgym.serve")
_MAX_OPEN = 1024
"""Incomplete groups that are kept; beyond them the oldest is recorded as it is."""


@dataclass(slots=True, kw_only=True)
class _OpenGroup:
    task: Task
    started: int = 0
    finished: list[Trajectory] = field(default_factory=list)


class ServedResults:
    """Puts episodes of one task and seed together as rollout groups, and records them by steps.

    A trainer plays each task `group_size` times. Where it names no seed, those episodes get the same one, so
    that they start alike and their returns can be compared. A step is recorded when `tasks_per_step` groups
    are complete: reward entropies, generated tasks, fresh transitions in the replay buffer.
    """

    def __init__(self, dream: Dream, curriculum: Curriculum, *, out: Path | None = None) -> None:
        """With `out`, trajectories and metrics are also written to this directory."""
        config = dream.config
        self.pool = curriculum.pool
        self.group_size, self.tasks_per_step = config.train.group_size, config.train.tasks_per_step
        self.steps = self.groups = self.fresh_rows = 0
        self.metrics: dict[str, Any] = {}
        """Of the last recorded step."""
        self._dream = dream
        self._curriculum = curriculum
        self._seed = config.seed
        self._open: OrderedDict[tuple[str, int], _OpenGroup] = OrderedDict()
        self._numbers: dict[str, int] = {}
        self._complete: list[RolloutGroup] = []
        self._drawn: list[Task] = []
        self._current: tuple[Task, int] | None = None
        self._recording: asyncio.Task[None] | None = None
        self._files = ExitStack()
        self._files.callback(self.pool.close)
        self._writer: TrajectoryWriter | None = None
        self._log: MetricsLog | None = None
        if out is not None:
            self._writer = self._files.enter_context(TrajectoryWriter(out / TRAJECTORIES))
            self._log = self._files.enter_context(MetricsLog(out / METRICS))

    async def draw(self, *, anew: bool = False) -> tuple[Task, int]:
        """The task and seed of an episode for which the client names neither: the curriculum's choice, the
        same `group_size` times; with `anew`, those of another group."""
        if self._current is not None and not anew:
            task, seed = self._current
            group = self._open.get((task.id, seed))
            if group is not None and group.started < self.group_size:
                return self._current
        if not self._drawn:
            self._drawn = list(await self._curriculum.sample(self.tasks_per_step))[::-1]
        task = self._drawn.pop()
        self._current = task, self.seed_for(task)
        return self._current

    def seed_for(self, task: Task) -> int:
        """The seed of an episode for which the client names none: that of the task's open group."""
        group = self._open.get((task.id, self._group_seed(task)))
        if group is not None and group.started >= self.group_size:
            self._numbers[task.id] += 1
        return self._group_seed(task)

    def started(self, task: Task, seed: int) -> None:
        group = self._open.setdefault((task.id, seed), _OpenGroup(task=task))
        group.started += 1
        if len(self._open) > _MAX_OPEN:
            self._close(next(iter(self._open)))

    def dropped(self, task: Task, seed: int) -> None:
        """An episode failed or was never finished: another one takes its place in the group."""
        group = self._open.get((task.id, seed))
        if group is not None:
            group.started -= 1

    def finished(self, trajectory: Trajectory) -> None:
        key = (trajectory.task.id, trajectory.seed)
        group = self._open.setdefault(key, _OpenGroup(task=trajectory.task))
        group.finished.append(trajectory)
        if len(group.finished) >= self.group_size:
            self._close(key)
        if len(self._complete) >= self.tasks_per_step and (self._recording is None or self._recording.done()):
            self._recording = asyncio.create_task(self._record_all())

    async def flush(self) -> None:
        """Record everything, incomplete groups too."""
        for key in list(self._open):
            self._close(key)
        if self._recording is not None:
            await self._recording
        if self._complete:
            await self._record(self._take(len(self._complete)))

    async def aclose(self) -> None:
        await self.flush()
        self._files.close()

    def status(self) -> dict[str, Any]:
        generated = len(self.pool.generated)
        return {
            "steps": self.steps,
            "groups": self.groups,
            "open_groups": len(self._open),
            "fresh_rows": self.fresh_rows,
            "tasks": len(self.pool),
            "generated_tasks": generated,
            "last_step": self.metrics,
        }

    def _group_seed(self, task: Task) -> int:
        number = self._numbers.setdefault(task.id, 0)
        return derive_seed(self._seed, "served", task.id, number) % 2**31

    def _close(self, key: tuple[str, int]) -> None:
        group = self._open.pop(key)
        if key[1] == self._group_seed(group.task):  # further episodes of the task are another group
            self._numbers[group.task.id] += 1
        if group.finished:
            self._complete.append(RolloutGroup(task=group.task, trajectories=tuple(group.finished)))

    def _take(self, count: int) -> list[RolloutGroup]:
        taken, self._complete = self._complete[:count], self._complete[count:]
        return taken

    async def _record_all(self) -> None:
        while len(self._complete) >= self.tasks_per_step:
            await self._record(self._take(self.tasks_per_step))

    async def _record(self, groups: Sequence[RolloutGroup]) -> None:
        """One step. A failure of the task generator or of a store costs the step, not the server."""
        try:
            known = [each for each in groups if each.task.id in self.pool]
            self.metrics = dict(await self._curriculum.record(known))
            if self._dream.buffer is not None and self._dream.config.train.update_replay_buffer:
                self.fresh_rows += await self._dream.remember(groups)
            if self._writer is not None and self._log is not None:
                self._writer.append([each for group in groups for each in group.trajectories])
                self._log.append({"kind": "served", "step": self.steps, **self.metrics})
        except Exception:
            logger.exception("a step of %d groups was not recorded", len(groups))
            return
        self.steps += 1
        self.groups += len(groups)


async def open_results(dream: Dream, folder: Path, *, keep: bool = False) -> ServedResults:
    """The task pool and curriculum of a served dream, in a directory where they resume; with `keep`,
    trajectories and metrics are written there too."""
    config = dream.config
    spec = known_environment(config.environment.name)
    planned = None
    if spec is not None and generates(config, spec):
        given = (config, spec, folder, dream.trajectories, dream.known_tasks)
        planned = await curriculum_of(*given, dream.experience_model, dream.models)
    if planned is None:
        pool = TaskPool(dream.known_tasks, folder / FILE, seed=config.seed)
        curriculum = Curriculum(pool, None, settings=config.curriculum)
    else:
        curriculum, dream.start_for = planned
    pool = curriculum.pool
    curriculum.load_state_dict({"step": pool.step, "tasks": len(pool.before(pool.step))})
    return ServedResults(dream, curriculum, out=folder if keep else None)
