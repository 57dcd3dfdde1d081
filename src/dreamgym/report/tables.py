"""Tables and charts of runs, shared by terminal, JSON and page."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from dreamgym.charts import Chart, Line, Point, short
from dreamgym.printable import printable, short_names
from dreamgym.report.run_reader import Evaluated, Run, estimate
from dreamgym.report.safe_reading import Row, items, number, row_at

NOTHING = "–"
_LATEST = 10
"""Steps in the mean of the latest success: one step has too few episodes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sheet:
    """A titled table with a note."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    note: str = ""


_SERIES: tuple[tuple[str, tuple[str, ...], str, str], ...] = (
    (
        *("Reward entropy", ("reward_entropy",), "Mean variance of the returns in a rollout group."),
        "No run here has metrics with the reward entropy of its rollout groups.",
    ),
    ("Turns per episode", ("episode_turns",), "", ""),
    ("Refused actions", ("refused_share",), "Share of the turns that the environment refused.", ""),
    ("Entropy of the policy", ("learner", "entropy"), "Nats per token, where the learner reports it.", ""),
)
"""(title, path of the metric in a row, note, text if no run has it)."""


def learning_charts(runs: Sequence[Run]) -> Iterator[Chart]:
    """Success in the dream and in reality, return, reward entropy and the pool, over the steps."""
    yield Chart(
        title="Success while learning",
        note="Thin lines: share of the episodes of each step, in the dream or, where a run trains there, "
        "in reality; rollouts of one task are correlated, so no interval is given. Thick: running mean. "
        "Points with bars: real evaluation on held-out tasks with its 95% interval.",
        percent=True,
        lines=tuple(_success_lines(runs)),
        absent="No run here has trained: there is no metrics.jsonl with steps in it.",
    )
    yield Chart(
        title="Real success against real steps spent",
        note="Each point is an evaluation, placed at the real steps that training had used by then; "
        "steps of evaluation itself are not counted here.",
        across="real steps of training",
        percent=True,
        lines=tuple(_by_real_steps(runs)),
    )
    for title, names, note, absent in _SERIES:
        lines = [
            Line(label=run.name, points=run.series(*names), colour=place, smooth=True)
            for place, run in enumerate(runs)
        ]
        percent = names[-1].endswith("_share")
        yield Chart(title=title, note=note, lines=tuple(lines), percent=percent, absent=absent)
    yield Chart(
        title="Task pool",
        note="Solid: generated tasks. Dashed: given tasks.",
        lines=tuple(_pool_lines(runs)),
        absent="No run here has generated tasks: there is no tasks.jsonl with any.",
    )
    yield Chart(
        title="Reward entropy of the pool's tasks",
        note="Mean over the tasks played in a step, as the curriculum counted it (per group or per cluster).",
        lines=tuple(
            Line(label=run.name, points=tuple(run.pool.entropy), colour=place, smooth=True)
            for place, run in enumerate(runs)
            if run.pool is not None
        ),
    )


def fidelity_charts(runs: Sequence[Run]) -> Iterator[Chart]:
    lines: list[Line] = []
    for name, measured in _measured(runs):
        points = items(measured.get("drift"), dict)
        for key, what in (("unbroken", "every state so far"), ("exact", "this state")):
            found = [
                known[0]
                for row in points
                if (known := estimate(row.get(key), x=number(row.get("step")) or 0.0)) is not None
            ]
            lines.append(
                Line(
                    label=f"{name}: {what}",
                    points=tuple(found),
                    colour=len(lines) // 2,
                    style="dashed" if key == "exact" else "line",
                )
            )
    yield Chart(
        title="Drift",
        note="Share of recorded episodes whose synthetic states equal the real ones, by the number of "
        "actions. Solid: every state so far, with its 95% interval; dashed: this state.",
        across="actions",
        percent=True,
        lines=tuple(lines),
        absent="No fidelity was measured in these runs: run `dreamgym experience eval RUN`; "
        "and add that run to the report.",
    )
    for key, title in (("loss", "Fine-tuning: loss"), ("agreement", "Fine-tuning: agreement")):
        lines = [
            Line(label=run.name, points=tuple(_points(run.fine_tuning, key)), colour=place)
            for place, run in enumerate(runs)
        ]
        yield Chart(title=title, lines=tuple(lines), note="On held-out examples of the experience model.")


def overview(runs: Sequence[Run]) -> Sheet:
    """One line per run: what the terminal shows."""
    rows = []
    for run in runs:
        newest = next(reversed([*run.validation, *run.evaluations]), None)  # those were made afterwards
        spent = run.spent
        fidelity = run.fidelity[0][1] if run.fidelity else {}
        rows.append(
            (
                run.name,
                run.world if run.steps else NOTHING,
                str(len(run.steps)) if run.steps else NOTHING,
                _latest(run.series("success"), percent=True),
                share(newest.success, newest.episodes) if newest else NOTHING,
                _latest(run.series("reward_entropy")),
                _amount(spent["real_steps"], run),
                _amount(spent["synthetic_steps"], run),
                _amount(spent["seconds"], run),
                _percent(row_at(fidelity, "steps", "next_state_exact").get("value")),
                _percent(row_at(fidelity, "dream_to_real", "share").get("value")),
            )
        )
    return Sheet(
        title="Runs",
        columns=(
            *("run", "trained in", "steps", f"success, last {_LATEST}", "real success [95%]"),
            *("reward entropy", "real steps", "synthetic steps", "seconds", "next state exact"),
            "dream → real",
        ),
        rows=tuple(rows),
        note=f"Success and reward entropy of training are means of the last {_LATEST} steps; real success is "
        "the newest evaluation. Real steps include those of evaluation.",
    )


def turned(sheet: Sheet) -> Sheet:
    """The transposed table: a few runs with many columns fit a terminal better.

    >>> turned(Sheet(title="", columns=("run", "steps"), rows=(("a", "1"), ("b", "2")))).rows
    (('steps', '1', '2'),)
    """
    head, *rows = zip(sheet.columns, *sheet.rows, strict=True)
    return Sheet(title=sheet.title, columns=head, rows=tuple(rows), note=sheet.note)


def evaluation_sheet(runs: Sequence[Run]) -> Sheet:
    rows: list[tuple[str, ...]] = []
    evaluated = {each.policy for run in runs for each in [*run.evaluations, *run.compared]}
    labels = dict(zip(evaluated, short_names(list(evaluated)), strict=True))
    for run in runs:
        for each in [*run.evaluations, *run.compared] or run.validation[-1:]:
            steps = NOTHING if each.real_steps is None else str(each.real_steps)
            seconds = NOTHING if each.seconds is None else f"{each.seconds:.0f}"
            policy = labels.get(each.policy, each.policy)
            name = (run.name, policy, " ".join((each.environment, each.split)).strip())
            rows.append((*name, "all", share(each.success, each.episodes), steps, seconds))
            if len(each.families) > 1:
                for family, found, episodes in each.families:
                    rows.append(("", "", "", family, share(found, episodes), "", ""))
        for pair in run.comparisons:
            names = f"difference, paired: {labels[pair.after.policy]} − {labels[pair.before.policy]}"
            difference = share(pair.difference, pair.episodes, sign=True)
            rows.append((run.name, names, "", "all", difference, "", ""))
    return Sheet(
        title="Evaluation in the real environment",
        columns=("run", "policy", "split", "family", "success [95%] (episodes)", "real steps", "seconds"),
        rows=tuple(rows),
    )


def cost_sheet(runs: Sequence[Run]) -> Sheet:
    rows: list[tuple[str, ...]] = []
    for run in runs:
        for stage in run.stages:
            amounts = (NOTHING if each is None else f"{each:,.0f}" for each in stage.amounts.values())
            rows.append((run.name, stage.name, *amounts))
        if len(run.stages) > 1:
            rows.append((run.name, "together", *(f"{amount:,.0f}" for amount in run.spent.values())))
    return Sheet(
        title="What it cost",
        columns=("run", "stage", "real steps", "synthetic steps", "seconds"),
        rows=tuple(rows),
        note="A dash: this stage does not count that.",
    )


def pool_sheets(runs: Sequence[Run]) -> Iterator[Sheet]:
    made = [(run.name, run.pool) for run in runs if run.pool is not None]
    yield Sheet(
        title="Generated tasks",
        columns=("run", "given tasks", "generated tasks", "candidates by result"),
        rows=tuple(
            (
                name,
                str(pool.seeds),
                short(pool.generated[-1].y) if pool.generated else "0",
                ", ".join(f"{what} {amount}" for what, amount in pool.candidates.most_common(20)) or NOTHING,
            )
            for name, pool in made
        ),
    )
    yield Sheet(
        title="Tasks of highest reward entropy",
        columns=("run", "instruction", "origin", "successes", "reward entropy"),
        rows=tuple(
            (
                name,
                each.task.instruction,
                each.task.origin,
                f"{each.successes} of {each.episodes}",
                NOTHING if each.entropy is None else short(each.entropy),
            )
            for name, pool in made
            for each in pool.examples
        ),
    )


def fidelity_sheet(runs: Sequence[Run]) -> Sheet:
    """A column per experience model: the tables of `dreamgym experience eval` side by side."""
    measured = [(name, _cells(found.get("table"))) for name, found in _measured(runs)]
    measures = dict.fromkeys(measure for _, cells in measured for measure in cells)
    return Sheet(
        title="Fidelity of the experience model",
        columns=("measure", *(name for name, _ in measured)),
        rows=tuple((each, *(cells.get(each, NOTHING) for _, cells in measured)) for each in measures),
        note="Value [95% interval] (rows behind it).",
    )


def _cells(table: object) -> dict[str, str]:
    found = [row for row in items(table, list) if len(row) == 3]
    return {str(what): f"{value} ({count})" if count else str(value) for what, value, count in found}


def as_json(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """The tables as JSON."""
    return [
        {
            "run": printable(run.name),
            "path": printable(str(run.path)),
            "world": run.world,
            "steps": len(run.steps),
            "training_success": [[point.x, point.y] for point in run.series("success")],
            "reward_entropy": [[point.x, point.y] for point in run.series("reward_entropy")],
            "validation": [_evaluated(each) for each in run.validation],
            "evaluations": [_evaluated(each) for each in run.evaluations],
            "stages": {printable(stage.name): stage.amounts for stage in run.stages},
            "spent": run.spent,
            "trajectories": {"total": run.kept.total, "successes": run.kept.successes},
            "fidelity": [printable(name or "whole") for name, _ in run.fidelity],
            "problems": {"count": run.problems.count, "messages": run.problems.messages},
        }
        for run in runs
    ]


def share(found: Point, episodes: int, *, sign: bool = False) -> str:
    """
    >>> share(Point(x=0, y=0.5, low=0.4, high=0.6), 100)
    '50.0% [40.0, 60.0] (100)'
    """
    plus = "+" if sign else ""
    interval = ""
    if found.low is not None and found.high is not None:
        interval = f" [{found.low * 100:{plus}.1f}, {found.high * 100:{plus}.1f}]"
    return f"{found.y * 100:{plus}.1f}{'' if sign else '%'}{interval} ({episodes})"


def _success_lines(runs: Sequence[Run]) -> Iterator[Line]:
    for place, run in enumerate(runs):
        where = "dream" if run.world == "dream" else "the real environment"
        yield Line(
            label=f"{run.name}, training in {where}",
            points=run.series("success"),
            colour=place,
            style="line" if run.world == "dream" else "dashed",
            smooth=True,
        )
        yield Line(
            label=f"{run.name}, real evaluation",
            points=_real_points(run),
            colour=place,
            style="marks",
        )


def _real_points(run: Run) -> tuple[Point, ...]:
    """Real success by training step: validation, and evaluations of policies that the run saved."""
    own = {each.run for each in run.evaluations} - {""}  # not its path: it may have been moved since
    after = [each for each in [*run.evaluations, *run.compared] if each.run in own]
    return tuple(sorted((each.success for each in [*run.validation, *after]), key=lambda point: point.x))


def _by_real_steps(runs: Sequence[Run]) -> Iterator[Line]:
    """Includes runs without real steps, if there is one with them."""
    if all(run.world == "dream" for run in runs):
        return
    for place, run in enumerate(runs):
        spent = {
            number(row.get("step")): number(row_at(row, "spent").get("real_steps")) or 0.0
            for row in run.steps
        }
        points = []
        for each in run.validation:
            found = each.success
            used = spent.get(found.x - 1, 0.0)
            points.append(Point(x=used, y=found.y, low=found.low, high=found.high))
        yield Line(label=run.name, points=tuple(points), colour=place, style="marks")


def _pool_lines(runs: Sequence[Run]) -> Iterator[Line]:
    for place, run in enumerate(runs):
        if run.pool is None or not run.pool.generated:
            continue
        made = run.pool.generated
        seeds = tuple(Point(x=point.x, y=run.pool.seeds) for point in (made[0], made[-1]))
        yield Line(label=f"{run.name}, generated", points=tuple(made), colour=place)
        yield Line(label=f"{run.name}, given", points=seeds, colour=place, style="dashed")


def _measured(runs: Sequence[Run]) -> Iterator[tuple[str, Row]]:
    for run in runs:
        for left_out, found in run.fidelity:
            yield f"{run.name} without {left_out.replace('-no-', ', ')}" if left_out else run.name, found


def _points(rows: Sequence[Row], key: str) -> Iterator[Point]:
    for row in rows:
        x, y = number(row.get("step")), number(row.get(key))
        if x is not None and y is not None:
            yield Point(x=x, y=y)


def _latest(points: Sequence[Point], *, percent: bool = False) -> str:
    if not points:
        return NOTHING
    recent = [point.y for point in points[-_LATEST:]]
    mean = sum(recent) / len(recent)
    return f"{mean:.1%}" if percent else f"{mean:.3f}"


def _percent(value: object) -> str:
    found = number(value)
    return NOTHING if found is None else f"{found:.1%}"


def _amount(value: float, run: Run) -> str:
    return f"{value:,.0f}" if run.stages else NOTHING


def _evaluated(each: Evaluated) -> dict[str, Any]:
    return {
        "policy": printable(each.policy),
        "split": printable(each.split),
        "step": each.success.x,
        "success": each.success.y,
        "low": each.success.low,
        "high": each.success.high,
        "episodes": each.episodes,
    }
