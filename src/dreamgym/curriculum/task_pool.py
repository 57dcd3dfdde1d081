"""The task pool: seed tasks and generated tasks, their results so far, and which are sampled next. All of it
is computed from the rows of its file, so a resumed run samples the same tasks."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Self

from pydantic import TypeAdapter, ValidationError

from dreamgym.curriculum.entropy import group_entropy, returns_by_task
from dreamgym.curriculum.pool_events import (
    GeneratedRow,
    PoolRow,
    ResumedRow,
    SeedRow,
    StepRow,
    TaskResult,
    decode,
    encode,
    task_of,
    task_row,
)
from dreamgym.errors import ConfigError
from dreamgym.files import AppendLog, read_log
from dreamgym.types import RolloutGroup, Task

FILE = "tasks.jsonl"
"""The pool's file in a run directory."""

LINEAGE = "lineage"
"""Key of a generated task's lineage in its parameters."""

_UNTRIED = 0.25
"""Sampling weight of an untried task: the highest reward entropy that 0/1 returns can have."""
_FLOOR = 0.01
"""Smallest sampling weight: a task without reward entropy now may have some for a later policy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lineage:
    """The origin of a generated task."""

    parent: str
    """Id of the task that it varies."""
    generator: str
    """Name of the model that wrote it."""
    seed: int = 0
    reason: str = ""
    """Why it was selected among the candidates, in the generator's words."""


def lineage(task: Task) -> Lineage | None:
    """The lineage in a task's parameters; None if it is missing or malformed."""
    try:
        return _LINEAGE.validate_python(task.parameters.get(LINEAGE))
    except ValidationError:
        return None


_LINEAGE = TypeAdapter(Lineage)


@dataclass(slots=True, kw_only=True)
class TaskRecord:
    """A task of the pool and its results so far."""

    task: Task
    step: int | None
    """The step after which it was generated; None for a seed task."""
    episodes: int = 0
    successes: int = 0
    history: list[tuple[int, TaskResult]] = field(default_factory=list)
    """(step, result) of every step in which it was sampled, oldest first."""

    @property
    def entropy(self) -> float | None:
        """Its newest reward entropy; None before its first rollouts."""
        return self.history[-1][1].entropy if self.history else None

    @property
    def weight(self) -> float:
        """Sampling weight of a generated task."""
        return _UNTRIED if self.entropy is None else max(self.entropy, _FLOOR)


class TaskPool:
    """Tasks with their results, in memory or in a file with one writer.

    Example::

        tasks = dg.TaskPool(await dream.tasks())
        groups = await dg.rollout(agent, dream, tasks.sample(16), group_size=8)
        tasks.record(groups)

    Raises:
        StoreError: the file cannot be written, or another process is writing it.
        DataError: a row before the tail is damaged; the file is left as it is.
    """

    def __init__(
        self,
        tasks: Iterable[Task] = (),
        path: Path | str | None = None,
        *,
        seed: int = 0,
        generated_fraction: float = 0.25,
    ) -> None:
        """
        Args:
            tasks: seed tasks; those that a file holds already are skipped.
            path: an append-only file; None keeps the pool in memory.
            generated_fraction: at most this share of a sample is generated (the paper's λ).
        """
        self.path = None if path is None else Path(path)
        self.seed = seed
        self.generated_fraction = generated_fraction
        self._rows: list[PoolRow] = []
        self._records: dict[str, TaskRecord] = {}
        self._log = None if self.path is None else AppendLog(self.path, decode)
        self._apply([] if self._log is None else self._log.rows)
        try:
            self.add_seeds(tasks)
        except BaseException:
            self.close()
            raise

    def __contains__(self, task_id: object) -> bool:
        return task_id in self._records

    def __len__(self) -> int:
        return len(self._records)

    def __getitem__(self, task_id: str) -> TaskRecord:
        return self._records[task_id]

    @property
    def records(self) -> Collection[TaskRecord]:
        """Every task with its results, in the order of addition."""
        return self._records.values()

    @property
    def tasks(self) -> list[Task]:
        return [record.task for record in self.records]

    @property
    def generated(self) -> list[TaskRecord]:
        return [record for record in self.records if record.task.origin == "generated"]

    @property
    def step(self) -> int:
        """The number of the next step."""
        return 1 + max((row.step for row in self._rows if isinstance(row, StepRow)), default=-1)

    @property
    def started(self) -> bool:
        """Whether any step was recorded."""
        return any(_step(row) >= 0 for row in self._rows)

    @property
    def counts(self) -> Counter[str]:
        """All candidates of the task generator by result."""
        total: Counter[str] = Counter()
        for row in self._rows:
            if isinstance(row, GeneratedRow):
                total.update(row.counts)
        return total

    def sample(self, count: int, *, step: int | None = None) -> list[Task]:
        """The tasks of one step. The same pool, step and seed give the same tasks.

        Seed tasks are drawn uniformly, generated ones by their reward entropy (untried ones as if they had
        the highest). If there are fewer seed tasks than needed, they repeat: each repetition is a group.

        Args:
            step: the next step by default.
        """
        rng = Random(f"{self.seed}/{self.step if step is None else step}")
        generated = self.generated
        wanted = min(math.floor(self.generated_fraction * count + 1e-9), len(generated))
        # Weighted sampling without replacement: the largest of u^(1/w) (Efraimidis and Spirakis, 2006).
        drawn = sorted(generated, key=lambda each: rng.random() ** (1.0 / each.weight), reverse=True)
        chosen = [record.task for record in drawn[:wanted]]
        seeds = [record.task for record in self.records if record.task.origin == "seed"]
        if not seeds and len(chosen) < count:
            raise ConfigError("expected seed tasks in the pool, found none; add some before sampling")
        while len(chosen) < count:
            chosen += rng.sample(seeds, min(count - len(chosen), len(seeds)))
        rng.shuffle(chosen)
        return chosen

    def record(
        self,
        groups: Sequence[RolloutGroup],
        *,
        step: int | None = None,
        entropy: Mapping[str, float] | None = None,
    ) -> dict[str, float]:
        """Store the results of one step; returns the reward entropy of each task by its id."""
        entropy = group_entropy(groups) if entropy is None else entropy
        results: list[TaskResult] = []
        for name, returns in returns_by_task(groups).items():
            if name not in self:
                raise ValueError(
                    f"expected rollouts of tasks of the pool, got some of {name!r}: add it first"
                )
            successes = sum(e.success for g in groups if g.task.id == name for e in g.trajectories)
            results.append(
                TaskResult(task=name, episodes=len(returns), successes=successes, entropy=entropy[name])
            )
        self._append([StepRow(step=self.step if step is None else step, results=results)])
        return dict(entropy)

    def most_informative(self, count: int) -> list[Task]:
        """The tasks of highest reward entropy, best first: hard, and possible since some rollouts succeed."""
        found = [each for each in self.records if each.entropy]
        found.sort(key=lambda each: (-(each.entropy or 0.0), -each.history[-1][0], each.task.id))
        return [each.task for each in found[:count]]

    def ancestry(self, task_id: str) -> list[Task]:
        """A task, the task that it varies, and so on to the seed task."""
        line: list[Task] = []
        seen: set[str] = set()
        name: str | None = task_id
        while name is not None and name in self._records and name not in seen:
            seen.add(name)
            line.append(self._records[name].task)
            origin = lineage(line[-1])
            name = origin.parent if origin else None
        return line

    def before(self, step: int) -> TaskPool:
        """The pool as it was before a step, in memory."""
        pool = TaskPool(seed=self.seed, generated_fraction=self.generated_fraction)
        pool._apply(row for row in self._rows if _step(row) < step)
        return pool

    def add_seeds(self, tasks: Iterable[Task]) -> int:
        """Add given tasks; those whose id is known are skipped. Returns the number of new ones."""
        fresh = self._fresh(tasks, "seed")
        self._append([SeedRow(task=task_row(task)) for task in fresh])
        return len(fresh)

    def add_generated(
        self, tasks: Iterable[Task], *, step: int | None = None, counts: Mapping[str, int] | None = None
    ) -> int:
        """Add the tasks of one round of a task generator, with the counts of its candidates."""
        fresh = self._fresh(tasks, "generated")
        rows = [task_row(task) for task in fresh]
        step = max(0, self.step - 1) if step is None else step
        self._append([GeneratedRow(step=step, tasks=rows, counts=dict(counts or {}))])
        return len(fresh)

    def rewind(self, step: int) -> None:
        """Return to the state before this step, from which a run resumes."""
        if any(_step(row) >= step for row in self._rows):
            self._append([ResumedRow(step=step)])

    def close(self) -> None:
        if self._log is not None:
            self._log.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _fresh(self, tasks: Iterable[Task], origin: str) -> list[Task]:
        fresh: dict[str, Task] = {}
        for task in tasks:
            if task.origin != origin:
                raise ValueError(f"expected {origin} tasks, got {task.id!r}, which is {task.origin}")
            if task.id not in self:
                fresh.setdefault(task.id, task)
        return list(fresh.values())

    def _append(self, rows: Sequence[PoolRow]) -> None:
        if rows and self._log is not None:
            self._log.append(encode(rows))
        self._apply(rows)

    def _apply(self, rows: Iterable[PoolRow]) -> None:
        for row in rows:
            if isinstance(row, ResumedRow):
                earlier = self.before(row.step)
                self._rows, self._records = earlier._rows, earlier._records
            elif isinstance(row, SeedRow):
                self._add(task_of(row.task), None)
            elif isinstance(row, GeneratedRow):
                for task in row.tasks:
                    self._add(task_of(task), row.step)
            else:
                self._count(row)
            self._rows.append(row)

    def _add(self, task: Task, step: int | None) -> None:
        self._records.setdefault(task.id, TaskRecord(task=task, step=step))

    def _count(self, row: StepRow) -> None:
        for result in row.results:
            record = self._records.get(result.task)
            if record is not None:
                record.episodes += result.episodes
                record.successes += result.successes
                record.history.append((row.step, result))


def pool_path(run_or_file: Path) -> Path:
    """The pool's file, given that file or its run directory."""
    return run_or_file / FILE if run_or_file.is_dir() else run_or_file


def read_pool(path: Path) -> TaskPool:
    """A copy of the pool on disk, in memory; works while a run is writing it."""
    pool = TaskPool()
    pool._apply(read_log(path, decode))
    return pool


def _step(row: PoolRow) -> int:
    return row.step if isinstance(row, GeneratedRow | StepRow) else -1
