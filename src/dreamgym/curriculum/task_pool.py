"""The task pool: seed tasks and generated ones, what came of each, and which are played next.

A pool is a file that only grows. What a method returned from is on disk; a line torn by a crash was never
acknowledged and is cut off when the pool is opened again. Everything else (statistics, samples, what to vary)
follows from the lines alone, so a resumed run samples what it would have sampled.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from types import TracebackType
from typing import Self

from dreamgym.curriculum.entropy import group_entropy, returns_by_task
from dreamgym.curriculum.pool_events import (
    GeneratedRow,
    Played,
    PlayedRow,
    PoolRow,
    ResumedRow,
    SeedRow,
    decode,
    encoded,
    task_row,
)
from dreamgym.errors import ConfigError
from dreamgym.files import AppendLog, read_log
from dreamgym.types import JsonValue, RolloutGroup, Task

FILE = "tasks.jsonl"
"""The pool's name in the folder of a run."""

LINEAGE = "lineage"
"""Where a generated task's parameters say where it comes from."""

_UNTRIED = 0.25
"""What an untried task may be worth: the highest reward entropy that 0/1 returns can have."""
_FLOOR = 0.01
"""What a task without reward entropy keeps: what it teaches changes with the policy, so it is asked again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lineage:
    """Where a generated task comes from."""

    parent: str
    """Id of the task that it varies."""
    generator: str
    """Who wrote it."""
    seed: int = 0
    reason: str = ""
    """Why it was chosen among its siblings, in the generator's words."""

    def as_parameter(self) -> dict[str, JsonValue]:
        return {
            "parent": self.parent,
            "generator": self.generator,
            "seed": self.seed,
            "reason": self.reason,
        }


def lineage(task: Task) -> Lineage | None:
    """What a task's parameters say of its origin; None where they say nothing that can be read."""
    told = task.parameters.get(LINEAGE)
    if not isinstance(told, Mapping):
        return None
    parent, generator = told.get("parent"), told.get("generator")
    seed, reason = told.get("seed", 0), told.get("reason", "")
    if not isinstance(parent, str) or not isinstance(generator, str):
        return None
    return Lineage(
        parent=parent,
        generator=generator,
        seed=seed if isinstance(seed, int) else 0,
        reason=reason if isinstance(reason, str) else "",
    )


@dataclass(slots=True, kw_only=True)
class Standing:
    """A task of the pool, and what came of it so far."""

    task: Task
    step: int | None
    """When it was generated; None for a seed task."""
    tries: int = 0
    successes: int = 0
    history: list[tuple[int, Played]] = field(default_factory=list)
    """What came of it in each step in which it was played, oldest first."""

    @property
    def entropy(self) -> float | None:
        """Its newest reward entropy; None until it was played."""
        return self.history[-1][1].entropy if self.history else None

    @property
    def weight(self) -> float:
        """How likely a generated task is drawn, relative to others."""
        return _UNTRIED if self.entropy is None else max(self.entropy, _FLOOR)


class PoolView:
    """What can be asked of a pool. Made from its lines; nothing is written."""

    def __init__(self, rows: Iterable[PoolRow] = ()) -> None:
        self._rows: list[PoolRow] = []
        self._standings: dict[str, Standing] = {}
        for row in rows:
            self._take(row)

    def __contains__(self, task_id: object) -> bool:
        return task_id in self._standings

    def __len__(self) -> int:
        return len(self._standings)

    def __getitem__(self, task_id: str) -> Standing:
        return self._standings[task_id]

    @property
    def standings(self) -> Collection[Standing]:
        """Every task with what came of it, in the order in which they were added."""
        return self._standings.values()

    @property
    def tasks(self) -> list[Task]:
        return [standing.task for standing in self.standings]

    @property
    def generated(self) -> list[Standing]:
        return [standing for standing in self.standings if standing.task.origin == "generated"]

    @property
    def counts(self) -> Counter[str]:
        """What became of all candidates that the task generator wrote, by reason."""
        total: Counter[str] = Counter()
        for row in self._rows:
            if isinstance(row, GeneratedRow):
                total.update(row.counts)
        return total

    def sample(self, count: int, *, step: int, seed: int, generated_fraction: float) -> list[Task]:
        """The tasks of one step, the same for the same pool, step and seed.

        Seed tasks are drawn evenly, generated ones by their reward entropy (untried ones as if they had the
        most). Where the seed tasks do not suffice, they come again: the same task twice makes two groups.

        Args:
            generated_fraction: at most this share of them is generated (the paper's λ).

        Raises:
            ConfigError: there is no seed task to fill the rest with.
        """
        rng = Random(f"{seed}/{step}")
        generated = self.generated
        wanted = min(math.floor(generated_fraction * count + 1e-9), len(generated))
        # Weighted drawing without replacement: the largest of u^(1/w) (Efraimidis and Spirakis, 2006).
        drawn = sorted(generated, key=lambda each: rng.random() ** (1.0 / each.weight), reverse=True)
        chosen = [standing.task for standing in drawn[:wanted]]
        seeds = [standing.task for standing in self.standings if standing.task.origin == "seed"]
        if not seeds and len(chosen) < count:
            raise ConfigError("expected seed tasks in the pool, found none; add some before sampling")
        while len(chosen) < count:
            chosen += rng.sample(seeds, min(count - len(chosen), len(seeds)))
        rng.shuffle(chosen)
        return chosen

    def to_vary(self, count: int, *, above: float = 0.0) -> list[Task]:
        """The tasks of highest reward entropy, best first: hard and well-defined, since they do go both ways.

        Args:
            above: only tasks whose newest reward entropy exceeds this.
        """
        found = [each for each in self.standings if each.entropy is not None and each.entropy > above]
        found.sort(key=lambda each: (-(each.entropy or 0.0), -each.history[-1][0], each.task.id))
        return [each.task for each in found[:count]]

    def ancestry(self, task_id: str) -> list[Task]:
        """A task, what it varies, and so on to the seed task."""
        line: list[Task] = []
        known: set[str] = set()
        name: str | None = task_id
        while name is not None and name in self._standings and name not in known:
            known.add(name)
            task = self._standings[name].task
            line.append(task)
            told = lineage(task)
            name = told.parent if told else None
        return line

    def before(self, step: int) -> PoolView:
        """The pool as it was before a step."""
        return PoolView(row for row in self._rows if _step(row) < step)

    @property
    def played(self) -> bool:
        """Whether any step has left its mark."""
        return any(_step(row) >= 0 for row in self._rows)

    def _take(self, row: PoolRow) -> None:
        if isinstance(row, ResumedRow):
            then = self.before(row.step)
            self._rows, self._standings = then._rows, then._standings
        elif isinstance(row, SeedRow):
            self._add(row.task.task(), None)
        elif isinstance(row, GeneratedRow):
            for told in row.tasks:
                self._add(told.task(), row.step)
        else:
            for played in row.results:
                standing = self._standings.get(played.task)
                if standing is not None:
                    standing.tries += played.tries
                    standing.successes += played.successes
                    standing.history.append((row.step, played))
        self._rows.append(row)

    def _add(self, task: Task, step: int | None) -> None:
        self._standings.setdefault(task.id, Standing(task=task, step=step))


class TaskPool(PoolView):
    """A pool that is written, by one process at a time.

    Raises:
        StoreError: the file cannot be written, or another process is writing it.
        DataError: a line before the tail is damaged; nothing is cut off then.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._log = AppendLog(path, decode)
        super().__init__(self._log.rows)

    def add_seeds(self, tasks: Iterable[Task]) -> int:
        """Add given tasks; those whose id is there already are passed over. Returns how many were new."""
        fresh = self._fresh(tasks, "seed")
        self._append([SeedRow(task=task_row(task)) for task in fresh])
        return len(fresh)

    def add_generated(
        self, tasks: Iterable[Task], *, step: int, counts: Mapping[str, int] | None = None
    ) -> int:
        """Add what one round of a task generator brought, with what became of its candidates."""
        fresh = self._fresh(tasks, "generated")
        self._append(
            [GeneratedRow(step=step, tasks=[task_row(task) for task in fresh], counts=dict(counts or {}))]
        )
        return len(fresh)

    def record(
        self, groups: Sequence[RolloutGroup], *, step: int, entropy: Mapping[str, float] | None = None
    ) -> None:
        """Keep what the rollouts of one step came to.

        Args:
            entropy: the reward entropy of each task by its id; by default that of its own group.
        """
        worth = group_entropy(groups) if entropy is None else entropy
        results: list[Played] = []
        for name, returns in returns_by_task(groups).items():
            if name not in self:
                raise ValueError(
                    f"expected rollouts of tasks of the pool, got some of {name!r}: add it first"
                )
            won = sum(e.success for group in groups if group.task.id == name for e in group.trajectories)
            results.append(Played(task=name, tries=len(returns), successes=won, entropy=worth[name]))
        self._append([PlayedRow(step=step, results=results)])

    def go_on(self, step: int) -> None:
        """Be the pool that it was before this step: a run that resumes there plays it again."""
        if any(_step(row) >= step for row in self._rows):
            self._append([ResumedRow(step=step)])

    def close(self) -> None:
        self._log.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
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
        if not rows:
            return
        self._log.append(encoded(rows))
        for row in rows:
            self._take(row)


def pool_path(run_or_file: Path) -> Path:
    """The pool's file, given that or the folder of a run."""
    return run_or_file / FILE if run_or_file.is_dir() else run_or_file


def read_pool(path: Path) -> PoolView:
    """A pool as it is on disk, also while a run is writing it.

    Raises:
        DataError: there is none, or it is damaged.
    """
    return PoolView(read_log(path, decode))


def _step(row: PoolRow) -> int:
    return row.step if isinstance(row, GeneratedRow | PlayedRow) else -1
