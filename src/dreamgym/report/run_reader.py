"""Reads a run directory: curves, evaluations, task pool, fidelity, usage, and some episodes."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from dreamgym.charts import Point
from dreamgym.errors import DataError
from dreamgym.printable import short_names
from dreamgym.report.episodes import Kept, keep
from dreamgym.report.pool import PoolSummary, summarize_pool
from dreamgym.report.safe_reading import (
    Problems,
    Row,
    count,
    items,
    number,
    read_json,
    read_object,
    read_rows,
    row_at,
)

STAGES = "stages.json"
"""Of a directory of `learn`: what its stages cost; its runs are below it."""
METRICS, SUMMARY, CONFIG, CURVE = "metrics.jsonl", "summary.json", "config.json", "curve.json"
USAGE = "usage.json"
_SIGNS = (METRICS, SUMMARY, CURVE, "run.json", "fidelity.json", "tasks.jsonl", "trajectories")
"""Not config.json, which folders of weights have too."""
_MOST_FILES = 200
AMOUNTS = ("real_steps", "synthetic_steps", "seconds")


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluated:
    """Real success of one policy on one split."""

    policy: str
    split: str
    environment: str
    success: Point
    """`x` is the training step of the policy."""
    episodes: int
    real_steps: int | None = None
    seconds: float | None = None
    families: tuple[tuple[str, Point, int], ...] = ()

    @property
    def run(self) -> str:
        """The path of its run, as it was when it was evaluated; empty for a language model."""
        return self.policy.rpartition("@")[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """Two policies on the same episodes."""

    before: Evaluated
    after: Evaluated
    difference: Point
    episodes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """The cost of one stage of a run; None for what was not counted."""

    name: str
    amounts: dict[str, float | None]
    """`real_steps`, `synthetic_steps` and `seconds`."""


@dataclass(slots=True, kw_only=True)
class Run:
    """The content of one run directory."""

    name: str
    path: Path
    world: str = "dream"
    """Where it trained: `dream` or `real`."""
    settings: dict[str, object] = field(default_factory=dict)
    """By their full names."""
    changed: float = 0.0
    """When it last wrote metrics or a summary, in seconds since the epoch."""
    steps: list[Row] = field(default_factory=list)
    validation: list[Evaluated] = field(default_factory=list)
    """Evaluations while it trained, which choose the policy."""
    evaluations: list[Evaluated] = field(default_factory=list)
    """Evaluations afterwards, by `dreamgym evaluate`, oldest first."""
    compared: list[Evaluated] = field(default_factory=list)
    """Evaluations of the policies that this one was compared with."""
    comparisons: list[Compared] = field(default_factory=list)
    """Of the two, paired."""
    audit: tuple[int, int] | None = None
    """Successes in the dream that were replayed in reality, and how many of them are real."""
    stages: list[Stage] = field(default_factory=list)
    usage: Row | None = None
    """Usage of endpoints, if there is any."""
    pool: PoolSummary | None = None
    fidelity: list[tuple[str, Row]] = field(default_factory=list)
    """(parts left out of the experience model's prompt, measurements)."""
    fine_tuning: list[Row] = field(default_factory=list)
    kept: Kept = field(default_factory=Kept)
    problems: Problems = field(default_factory=Problems)

    def series(self, *names: str) -> tuple[Point, ...]:
        """One metric of every training step that has it."""
        found = []
        for row in self.steps:
            x, y = number(row.get("step")), number(row_at(row, *names[:-1]).get(names[-1]))
            if x is not None and y is not None:
                found.append(Point(x=x, y=y))
        return tuple(found)

    @property
    def spent(self) -> dict[str, float]:
        """Real steps, synthetic steps and seconds of all stages together."""
        return {name: sum(stage.amounts[name] or 0.0 for stage in self.stages) for name in AMOUNTS}


def find_runs(paths: Sequence[Path]) -> list[tuple[str, Path]]:
    """(name, directory) of every run: those given, and those in a given directory of runs.

    Raises:
        DataError: a path is no folder, or nothing in it looks like a run.
    """
    found: list[Path] = []
    for path in paths:
        if not path.is_dir():
            what = "a file" if path.exists() else "nothing"
            raise DataError(f"{path}: expected the folder of a run, found {what}")
        inner = [] if (path / METRICS).exists() else [each for each in _folders(path) if _is_run(each)]
        here = [path] if _is_run(path) and not (inner and (path / STAGES).exists()) else []
        if not here and not inner:
            raise DataError(
                f"{path}: expected the folder of a run, found none of {', '.join(_SIGNS)} in it; "
                "give what `dreamgym train` or `dreamgym experience train` wrote to"
            )
        found += [each for each in [*here, *inner] if each not in found]
    return list(zip(short_names([str(each.resolve()) for each in found]), found, strict=True))


def read_run(name: str, path: Path, *, episodes: int) -> Run:
    """The readable content of one run directory; the rest is in its problems."""
    problems = Problems()
    run = Run(name=name, path=path, problems=problems)
    rows = _last_of_each(read_rows(path / METRICS, problems))
    run.steps = [row for row in rows if row.get("kind") == "train"]
    run.validation = [
        found for row in rows if row.get("kind") == "evaluation" and (found := _evaluated(row)) is not None
    ]
    summary = read_object(path / SUMMARY, problems)
    recorded = (amounts for row in reversed(rows) if (amounts := row_at(row, "spent")))
    spent: Row = next(recorded, row_at(summary, "spent"))
    run.stages = _stages(spent)
    run.settings = _flat(read_object(path / CONFIG, problems) or {})
    run.changed = max(_changed(path / name)[0] for name in (METRICS, SUMMARY, CURVE))
    if run.settings.get("train.mode") == "real":
        run.world = "real"
    run.usage = read_object(path / USAGE, problems)
    _read_evaluations(run)
    run.pool = summarize_pool(path / "tasks.jsonl", problems)
    for file in sorted(path.glob("fidelity*.json"))[:_MOST_FILES]:
        measured = read_object(file, problems)
        if measured is not None:
            run.fidelity.append((file.stem.removeprefix("fidelity").removeprefix("-no-"), measured))
    run.fine_tuning = items(read_json(path / CURVE, problems), dict)
    run.kept = keep(path, episodes, problems)
    if run.steps:
        _add_stages_around(run)
    dreamt = [each for each in run.kept.episodes if each.success and each.id in run.kept.replays]
    if dreamt:
        run.audit = len(dreamt), sum(run.kept.replays[each.id].success for each in dreamt)
    return run


def estimate(value: object, *, x: float = 0.0) -> tuple[Point, int] | None:
    """A stored share or mean with its interval, and how many rows are behind it."""
    row = row_at(value)
    found = number(row.get("value"))
    if found is None:
        return None
    return (
        Point(x=x, y=found, low=number(row.get("low")), high=number(row.get("high"))),
        count(row.get("count")),
    )


def _is_run(path: Path) -> bool:
    return any((path / sign).exists() for sign in _SIGNS)


def _folders(path: Path) -> list[Path]:
    try:
        return sorted(each for each in path.iterdir() if each.is_dir() and not each.name.startswith("."))
    except OSError:
        return []


def _last_of_each(rows: Iterator[Row]) -> list[Row]:
    """The last row of each step: a step that a crash undid was run again."""
    last: dict[tuple[str, float], Row] = {}
    for row in rows:
        step = number(row.get("step"))
        if step is not None:
            last[str(row.get("kind")), step] = row
    return [last[key] for key in sorted(last, key=lambda key: (key[1], key[0]))]


def _stages(spent: Row) -> list[Stage]:
    """
    >>> _stages({"synthetic_steps": 900, "evaluation_real_steps": 40})[1]
    Stage(name='evaluation', amounts={'real_steps': 40.0, 'synthetic_steps': None, 'seconds': None})
    """
    found: dict[str, Stage] = {}
    for key, value in spent.items():
        amount = number(value)
        what = next((each for each in AMOUNTS if str(key).endswith(each)), None)
        if amount is not None and what is not None:
            name = (str(key).removesuffix(what).removesuffix("_") or "rollout").replace("_", " ")
            stage = found.setdefault(name, Stage(name=name, amounts=dict.fromkeys(AMOUNTS)))
            stage.amounts[what] = amount
    return list(found.values())


def _add_stages_around(run: Run) -> None:
    """What recording, fine-tuning, later evaluations and audits cost, which the run itself does not count."""
    stages = row_at(read_object(run.path.parent / STAGES, run.problems), "stages")
    for key, name in (("collect", "recording"), ("experience", "fine-tuning the experience model")):
        row = row_at(stages, key)
        amounts = {
            "real_steps": number(row.get("real_steps")),
            "synthetic_steps": None,
            "seconds": number(row.get("seconds")),
        }
        if amounts["real_steps"] or amounts["seconds"]:
            run.stages.insert(int(key == "experience"), Stage(name=name, amounts=amounts))
    steps = [each.real_steps or 0 for each in [*run.evaluations, *run.compared]]
    if steps:
        seconds = [each.seconds or 0.0 for each in [*run.evaluations, *run.compared]]
        amounts = {"real_steps": float(sum(steps)), "synthetic_steps": None, "seconds": sum(seconds)}
        run.stages.append(Stage(name="evaluation afterwards", amounts=amounts))
    if run.kept.audit_steps:
        amounts = {"real_steps": float(run.kept.audit_steps), "synthetic_steps": None, "seconds": None}
        run.stages.append(Stage(name="audit afterwards", amounts=amounts))


def _flat(row: Row, prefix: str = "") -> dict[str, object]:
    """
    >>> _flat({"seed": 1, "train": {"steps": 5}})
    {'seed': 1, 'train.steps': 5}
    """
    found: dict[str, object] = {}
    for key, value in row.items():
        found |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return found


def _read_evaluations(run: Run) -> None:
    files = [*run.path.glob("evaluation*.json"), *run.path.glob("evaluation*/*.json")]
    for file in sorted(files, key=_changed)[:_MOST_FILES]:
        stored = read_object(file, run.problems) or {}
        after, before = _evaluated(stored), _evaluated(row_at(stored, "other"))
        run.evaluations += [after] if after is not None else []
        run.compared += [before] if before is not None else []
        difference = estimate(row_at(stored, "comparison").get("difference"))
        if after is not None and before is not None and difference is not None:
            point, episodes = difference
            run.comparisons.append(Compared(before=before, after=after, difference=point, episodes=episodes))


def _changed(file: Path) -> tuple[float, str]:
    try:
        return file.stat().st_mtime, file.name
    except OSError:
        return 0.0, file.name


def _evaluated(row: Row) -> Evaluated | None:
    """Of an evaluation while the run trained, which has a step, or of `dreamgym evaluate`."""
    step = number(row.get("step"))
    policy = str(row.get("policy", ""))
    saved = re.search(r"@(\d{1,9})$", policy)
    found = estimate(row.get("success"), x=step if step is not None else float(saved[1]) if saved else 0.0)
    if found is None:
        return None
    families = ((name, estimate(share)) for name, share in row_at(row, "by_family").items())
    return Evaluated(
        policy=policy if step is None else f"step {step:.0f}",
        split=str(row.get("split", "")),
        environment=str(row.get("environment", "")),
        success=found[0],
        episodes=found[1],
        real_steps=None if step is not None else count(row.get("real_steps")),
        seconds=number(row.get("wall_seconds")),
        families=tuple((str(name), *known) for name, known in families if known is not None),
    )
