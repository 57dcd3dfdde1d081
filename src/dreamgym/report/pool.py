"""The task pool of a run over its steps."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from dreamgym.charts import Point
from dreamgym.curriculum.task_pool import TaskPool, TaskRecord, read_pool
from dreamgym.errors import DataError
from dreamgym.report.safe_reading import Problems

_EXAMPLES = 12


@dataclass(slots=True, kw_only=True)
class PoolSummary:
    """The size of a pool, its reward entropy over time, and the candidates of the task generator."""

    seeds: int
    generated: list[Point]
    """Generated tasks in the pool after each step that added some."""
    entropy: list[Point]
    """Mean reward entropy of the tasks of each step."""
    candidates: Counter[str] = field(default_factory=Counter)
    examples: list[TaskRecord] = field(default_factory=list)
    """The tasks of highest reward entropy."""


def summarize_pool(path: Path, problems: Problems) -> PoolSummary | None:
    """None where the run has no pool; a damaged one is reported in `problems`."""
    if not path.exists():
        return None
    try:
        pool = read_pool(path)
    except DataError as error:
        problems.add(error)
        return None
    played = sorted((each for each in pool.records if each.history), key=lambda each: -(each.entropy or 0.0))
    return PoolSummary(
        seeds=len(pool) - len(pool.generated),
        generated=_growth(pool),
        entropy=_mean_entropy(pool),
        candidates=pool.counts,
        examples=played[:_EXAMPLES],
    )


def _growth(pool: TaskPool) -> list[Point]:
    added = Counter(each.step for each in pool.generated if each.step is not None)
    total, points = 0, []
    for step in sorted(added):
        total += added[step]
        points.append(Point(x=step, y=total))
    return points


def _mean_entropy(pool: TaskPool) -> list[Point]:
    of_step: dict[int, list[float]] = {}
    for record in pool.records:
        for step, result in record.history:
            of_step.setdefault(step, []).append(result.entropy)
    return [Point(x=step, y=sum(found) / len(found)) for step, found in sorted(of_step.items())]
