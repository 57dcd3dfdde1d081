"""The headline of a report: what was trained, how it did in reality before and after, and what that cost."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from dreamgym.charts import Point
from dreamgym.config import Config, settings
from dreamgym.evaluation.sim_real_gap import MAX_GAP
from dreamgym.report.run_reader import Evaluated, Run
from dreamgym.report.tables import NOTHING, Sheet, share

_LAST = 3
"""Steps in the mean of success in the dream, as in the warning of `dreamgym evaluate`."""
_PLACES = ("train.out", "train.data", "train.experience", "collect.out", "replay.store")
"""Settings that name files: they differ between runs without making a difference."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Headline:
    """One run in a few lines."""

    run: str
    about: str
    """Environment, seed, date."""
    before: str
    after: str
    """Real success in percent; empty where it was not evaluated."""
    difference: str
    verdict: str
    good: bool | None
    """Whether practice helped; None where nothing shows it."""
    facts: tuple[tuple[str, str], ...]
    """(name, text): steps by stage, the gap between dream and reality, the audit."""


def headlines(runs: Sequence[Run]) -> list[Headline]:
    """Of every run that trained."""
    return [_headline(run) for run in runs if run.steps]


def _headline(run: Run) -> Headline:
    before, after, difference = _compared(run)
    verdict, good = _verdict(run, difference)
    return Headline(
        run=run.name,
        about=" · ".join(_about(run)),
        before=_percent(before),
        after=_percent(after),
        difference=_points(*difference) if difference else "",
        verdict=verdict,
        good=good,
        facts=tuple(_facts(run, after)),
    )


def _about(run: Run) -> Iterator[str]:
    evaluated = next((each.environment for each in run.evaluations if each.environment), None)
    yield str(run.settings.get("environment.name") or evaluated or "unknown environment")
    if "seed" in run.settings:
        yield f"seed {run.settings['seed']}"
    model = run.settings.get("agent.model")
    if model and not str(model).startswith("hf:/"):
        yield f"agent {model}"
    if run.changed:
        yield f"{datetime.fromtimestamp(run.changed, UTC):%d %B %Y}"


def _compared(run: Run) -> tuple[Evaluated | None, Evaluated | None, tuple[Point, int] | None]:
    """The newest comparison with an earlier policy of the run; else the first and the last validation."""
    own = [each for each in run.comparisons if each.before.run == each.after.run]
    if own:
        return own[-1].before, own[-1].after, (own[-1].difference, own[-1].episodes)
    if run.evaluations:
        return None, run.evaluations[-1], None
    if len(run.validation) > 1:
        return run.validation[0], run.validation[-1], None
    return None, next(iter(run.validation), None), None


def _verdict(run: Run, difference: tuple[Point, int] | None) -> tuple[str, bool | None]:
    where = "the dream" if run.world == "dream" else "the real environment"
    if difference is None or difference[0].low is None or difference[0].high is None:
        if run.evaluations or run.validation:
            return "Evaluated, but not paired with its start: evaluate --against RUN@0 shows the gain.", None
        return "Not evaluated in reality yet: dreamgym evaluate RUN --against RUN@0", None
    if difference[0].low > 0:
        return f"Training in {where} improved the agent in reality.", True
    if difference[0].high < 0:
        return f"Training in {where} made the agent worse in reality.", False
    return "No difference is shown: the interval contains 0.", None


def _facts(run: Run, after: Evaluated | None) -> Iterator[tuple[str, str]]:
    for name, title in (("real_steps", "Real steps"), ("synthetic_steps", "Synthetic steps")):
        parts = [(stage.name, stage.amounts[name] or 0.0) for stage in run.stages]
        told = [
            f"{'training' if stage == 'rollout' else stage} {amount:,.0f}"
            for stage, amount in parts
            if amount or stage == "rollout"
        ]
        yield title, f"{run.spent[name]:,.0f}" + (f" ({', '.join(told)})" if told else "")
    dreamt = [point.y for point in run.series("success")[-_LAST:]]
    if run.world == "dream" and dreamt and after is not None:
        success = sum(dreamt) / len(dreamt)
        gap = success - after.success.y
        warning = " The dream is not like reality: audit it." if abs(gap) > MAX_GAP else ""
        last, real = f"{success:.1%} in the last steps", f"{after.success.y:.1%} in reality"
        yield "Dream against reality", f"{last}, {real}: {gap * 100:+.1f} points.{warning}"
    if run.audit is not None:
        yield "Audit", f"{run.audit[1]} of {run.audit[0]} dreamt successes that were replayed are real."


def _points(difference: Point, episodes: int) -> str:
    """
    >>> _points(Point(x=0, y=0.7, low=0.619, high=0.768), 150)
    '+70.0 points [+61.9, +76.8], paired over 150 episodes'
    """
    interval = share(difference, episodes, sign=True).partition(" ")[2].rpartition(" ")[0]
    return f"{difference.y * 100:+.1f} points {interval}, paired over {episodes} episodes"


def _percent(found: Evaluated | None) -> str:
    return "" if found is None else f"{found.success.y:.1%}"


def settings_sheet(runs: Sequence[Run]) -> Sheet:
    """Settings that differ between the runs that trained; of a single run, those that are not the default."""
    trained = [run for run in runs if run.steps and run.settings]
    default: dict[str, object] = {name: value for name, _, value, _ in settings(Config)}
    rows = []
    for name in dict.fromkeys(name for run in trained for name in run.settings):
        values = [_cell(run.settings.get(name)) for run in trained]
        known = [_cell(default.get(name)), *values] if len(trained) == 1 else values
        if len(set(known)) > 1 and name not in _PLACES:
            rows.append((name, *values, *([_cell(default.get(name))] if len(trained) == 1 else [])))
    title = "Settings that are not the default" if len(trained) == 1 else "Settings that differ"
    columns = ("setting", *(run.name for run in trained), *(["default"] if len(trained) == 1 else []))
    return Sheet(title=title, columns=columns, rows=tuple(rows))


def _cell(value: object) -> str:
    if isinstance(value, tuple):  # in a file it is a list
        value = list(value)
    return NOTHING if value is None else f"{value:g}" if isinstance(value, float) else str(value)
