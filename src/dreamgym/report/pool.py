"""The task pool of a run over its steps, from the pool's own lines."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from dreamgym.report.charts import Point
from dreamgym.report.safe_reading import Problems, Row, count, number, read_rows, row_at


@dataclass(slots=True, kw_only=True)
class Pool:
    """How many tasks there were, how much they still taught, and what became of what was generated."""

    seeds: int = 0
    generated: list[Point] = field(default_factory=list)
    """Generated tasks in the pool after each step that brought some."""
    entropy: list[Point] = field(default_factory=list)
    """Mean reward entropy of the tasks played in each step."""
    candidates: Counter[str] = field(default_factory=Counter)
    examples: list[tuple[str, str, int, int, float | None]] = field(default_factory=list)
    """(instruction, origin, tries, successes, newest reward entropy) of the tasks that teach most."""


@dataclass(slots=True, kw_only=True)
class _Played:
    tries: int = 0
    successes: int = 0
    entropy: float | None = None


def read_pool(path: Path, problems: Problems) -> Pool | None:
    """None where the run has no pool."""
    rows: list[Row] = []
    for row in read_rows(path, problems):
        if row.get("event") == "resumed":  # the run went on with this step: later lines are void
            step = number(row.get("step")) or 0.0
            rows = [each for each in rows if _step(each) < step]
        else:
            rows.append(row)
    return _pool(rows) if rows else None


def _step(row: Row) -> float:
    if row.get("event") == "seed":
        return -1.0
    return number(row.get("step")) or 0.0


def _pool(rows: list[Row]) -> Pool:
    pool = Pool()
    tasks: dict[str, Row] = {}
    played: dict[str, _Played] = {}
    generated = 0
    for row in rows:
        event = row.get("event")
        if event == "seed":
            task = row_at(row, "task")
            pool.seeds += str(task.get("id")) not in tasks
            tasks.setdefault(str(task.get("id")), task)
        elif event == "generated":
            fresh = [task for task in _list(row.get("tasks")) if str(task.get("id")) not in tasks]
            tasks.update((str(task.get("id")), task) for task in fresh)
            generated += len(fresh)
            pool.generated.append(Point(x=_step(row), y=generated))
            for name, amount in row_at(row, "counts").items():
                pool.candidates[str(name)] += count(amount)
        elif event == "played":
            _count(row, played, pool)
    best = sorted((name for name in played if name in tasks), key=lambda name: -(played[name].entropy or 0.0))
    for name in best[:12]:
        what, task = played[name], tasks[name]
        pool.examples.append(
            (str(task.get("instruction")), str(task.get("origin")), what.tries, what.successes, what.entropy)
        )
    return pool


def _count(row: Row, played: dict[str, _Played], pool: Pool) -> None:
    worth = []
    for result in _list(row.get("results")):
        known = played.setdefault(str(result.get("task")), _Played())
        known.tries += count(result.get("tries"))
        known.successes += count(result.get("successes"))
        entropy = number(result.get("entropy"))
        if entropy is not None:
            known.entropy = entropy
            worth.append(entropy)
    if worth:
        pool.entropy.append(Point(x=_step(row), y=sum(worth) / len(worth)))


def _list(value: object) -> list[Row]:
    return [each for each in value if isinstance(each, dict)] if isinstance(value, list) else []
