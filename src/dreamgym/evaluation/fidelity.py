"""Measures an experience model against the real environment: a table, a plot and JSON.

    real trajectories ─┬─ step by step, true past ──▶ StepFidelity ──▶ Theorem 1
                       └─ their actions in the dream ─┬─▶ drift, real → dream, replay spread
                          (and near misses of them)   └─ successes in reality ──▶ dream → real (WM2Real)

``docs/guides/fidelity.md`` explains each number.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, TypeAlias

from dreamgym.charts import Chart, Line, Point, draw_file
from dreamgym.evaluation.async_map import OnCount
from dreamgym.evaluation.closed_loop import (
    ActionList,
    DriftPoint,
    ReplaySpread,
    Transfer,
    arrived,
    dream_successes,
    drift_by_step,
    near_miss,
    real_to_dream,
    replay_in_dream,
    replay_in_reality,
    replay_spread,
)
from dreamgym.evaluation.one_step import StepFidelity, measure_steps
from dreamgym.evaluation.rubrics import Judged, judge_trajectories
from dreamgym.evaluation.statistics import Estimate, Theorem1, theorem1
from dreamgym.evaluation.worst import AdviceSettings, Worst, worst_kinds
from dreamgym.experience.rubric_judge import RubricJudge
from dreamgym.files import write_text
from dreamgym.protocols import Annotator, EnvironmentFactory, ExperienceModel
from dreamgym.types import Trajectory

OnStage: TypeAlias = Callable[[str, int, int], None]
"""Takes the name of a stage, how many of its predictions or episodes are done, and of how many."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fidelity:
    """All measurements of one experience model."""

    experience_model: str
    episodes: int
    steps: StepFidelity
    drift: tuple[DriftPoint, ...]
    real_to_dream: Transfer
    dream_to_real: Transfer | None
    """None without a real environment. Includes near misses."""
    near_misses: Transfer | None
    """The near misses alone: of those that succeed in the dream, how many do in reality."""
    replay_spread: ReplaySpread
    theorem: Theorem1 | None
    """None if no prediction was readable."""
    left_out: dict[str, str] = field(default_factory=dict)
    """Fields that could not be measured, with the reason."""
    judged: Judged | None = None
    worst: Worst = field(default_factory=Worst)
    """The worst kinds of action and of state, with what to do about each."""

    def to_dict(self) -> dict[str, Any]:
        steps = self.steps.to_dict()
        return {
            **asdict(replace(self, steps=replace(self.steps, records=()))),
            "steps": steps,
            "worst": self.worst.to_dict(),
            "theorem": self.theorem.to_dict() if self.theorem else None,
            "table": list(_rows(self)),
        }


async def measure_fidelity(
    experience_model: ExperienceModel,
    annotator: Annotator,
    trajectories: Sequence[Trajectory],
    *,
    factory: EnvironmentFactory | None = None,
    judge: RubricJudge | None = None,
    gamma: float = 0.99,
    repeats: int = 2,
    seed: int = 0,
    advice: AdviceSettings | None = None,
    on_stage: OnStage | None = None,
) -> Fidelity:
    """All measurements. `trajectories` are real and of tasks that the model was not fine-tuned on.

    Args:
        judge: scores synthetic episodes by the paper's rubrics, if given.
        repeats: synthetic episodes per action list, for the replay spread.
        advice: how the model was made, for what to do about its worst actions.
    """

    def counter(stage: str) -> OnCount | None:
        return functools.partial(on_stage, stage) if on_stage is not None else None

    steps = await measure_steps(experience_model, annotator, trajectories, on_count=counter("single steps"))
    lists = [ActionList.of(trajectory) for trajectory in trajectories]
    missed: list[ActionList] = []
    if factory is not None:
        missed = [near_miss(ActionList.of(each), seed=seed) for each in trajectories if each.success]
    played = await replay_in_dream(experience_model, [*lists * repeats, *missed], on_count=counter("dreams"))
    repeated, tried = played[: len(lists) * repeats], played[len(lists) * repeats :]
    dreams = repeated[: len(lists)]
    back: Transfer | None = None
    back_from_near: Transfer | None = None
    if factory is not None:
        promising = dream_successes([*dreams, *tried])
        replays = await replay_in_reality(factory, promising, on_count=counter("in reality"))
        back = arrived(replays)
        if missed:
            back_from_near = arrived(replays[len(dream_successes(dreams)) :])
    return Fidelity(
        experience_model=experience_model.name,
        episodes=len(trajectories),
        steps=steps,
        drift=drift_by_step(trajectories, dreams),
        real_to_dream=real_to_dream(trajectories, dreams),
        dream_to_real=back,
        near_misses=back_from_near,
        replay_spread=replay_spread(repeated, repeats=repeats),
        theorem=_theorem(steps, gamma),
        judged=None if judge is None else await judge_trajectories(judge, [d.trajectory for d in dreams]),
        left_out=_left_out(steps, factory),
        worst=worst_kinds(steps.records, advice or _unknown_settings(trajectories)),
    )


def _unknown_settings(trajectories: Sequence[Trajectory]) -> AdviceSettings:
    return AdviceSettings(environment=trajectories[0].task.environment if trajectories else "NAME")


def save_fidelity(fidelity: Fidelity, folder: Path, how: dict[str, Any]) -> dict[str, Any]:
    """Write fidelity.json, fidelity.md and drift.svg; returns the content of the first. The parts left
    out, ``how["without"]``, are also in the file names."""
    suffix = "".join(f"-no-{part}" for part in how["without"])
    names = {"table": f"fidelity{suffix}.md", "plot": f"drift{suffix}.svg"}
    result = {**fidelity.to_dict(), "asked": how, "files": names}
    write_text(folder / names["table"], markdown_table(fidelity))
    write_text(folder / names["plot"], drift_svg(fidelity.drift))
    write_text(folder / f"fidelity{suffix}.json", json.dumps(result, indent=2, default=str) + "\n")
    return result


def _left_out(steps: StepFidelity, factory: EnvironmentFactory | None) -> dict[str, str]:
    found = {}
    if steps.predictions and not steps.object_f1.count:
        found["object_f1"] = "no world sheet names anything"
    if factory is None:
        found["dream_to_real"] = "the real environment is not installed"
    return found


def _theorem(steps: StepFidelity, gamma: float) -> Theorem1 | None:
    reward, transition = steps.reward_error.value, steps.transition_error.value
    return None if reward is None or transition is None else theorem1(reward, transition, gamma=gamma)


def markdown_table(fidelity: Fidelity) -> str:
    """The numbers as one Markdown table (what, value with its 95% interval, how many it rests on), and the
    worst actions and states."""
    rows = [("measure", "value [95% interval]", "n"), ("---", "---", "---:"), *_rows(fidelity)]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in rows) + fidelity.worst.markdown()


def _rows(fidelity: Fidelity) -> Iterator[tuple[str, str, str]]:
    steps = fidelity.steps

    def row(what: str, estimate: Estimate) -> tuple[str, str, str]:
        return (what, str(estimate), str(estimate.count))

    yield row("next state exact", steps.next_state_exact)
    if "object_f1" in fidelity.left_out:
        yield ("objects, set-F1", f"left out: {fidelity.left_out['object_f1']}", "0")
    else:
        yield row("objects, set-F1", steps.object_f1)
    for name, found in (("terminated", steps.terminated), ("success", steps.success)):
        yield row(f"{name}: agreement", found.agreement)
        yield row(f"{name}: precision", found.precision)
        yield row(f"{name}: recall", found.recall)
    yield row("hallucinated objects per state", steps.hallucinated_objects)
    failed = ", ".join(f"{kind} {count}" for kind, count in steps.failures.items())
    yield ("failed predictions", failed or "none", str(steps.predictions))
    count = str(steps.calibration.count)
    yield ("confidence: calibration error", _number(steps.calibration.error), count)
    yield ("confidence: AUROC", _number(steps.calibration.auroc), count)
    yield row("real → dream", fidelity.real_to_dream.share)
    if fidelity.dream_to_real is not None:
        yield row("dream → real (WM2Real)", fidelity.dream_to_real.share)
        if fidelity.near_misses is not None:
            yield row("– of these, near misses", fidelity.near_misses.share)
    elif "dream_to_real" in fidelity.left_out:
        yield ("dream → real (WM2Real)", f"left out: {fidelity.left_out['dream_to_real']}", "0")
    spread = fidelity.replay_spread
    yield ("replay spread", _number(spread.mean_deviation), str(spread.all_equal.count))
    yield row("replays alike in every state", spread.all_equal)
    yield row("ε_R, mean", steps.reward_error)
    yield ("ε_R, largest", _number(steps.largest_reward_error), str(steps.reward_error.count))
    yield row("ε_P, share of wrong next states", steps.transition_error)
    if fidelity.theorem is not None:
        bound = f"{fidelity.theorem.return_gap:.3f}{' (vacuous)' if fidelity.theorem.vacuous else ''}"
        yield (f"Lemma 1: largest return gap at γ = {fidelity.theorem.gamma:g}", bound, "")
    if fidelity.judged is not None:
        for name, estimate in fidelity.judged.scores.items():
            yield row(f"{name} (0–2, judge {fidelity.judged.judge})", estimate)
    yield ("predictions per second", _number(steps.predictions_per_second), str(steps.predictions))


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.3f}"


def drift_svg(points: Sequence[DriftPoint], *, title: str = "Drift by step") -> str:
    """`drift_by_step` as an SVG file; the band is the interval of the unbroken share."""
    unbroken = [(point.step, point.unbroken) for point in points]
    exact = [(point.step, point.exact) for point in points]
    return draw_file(
        Chart(
            title=title,
            across="actions",
            percent=True,
            lines=(
                Line(label="every state so far exact", points=tuple(_points(unbroken, interval=True))),
                Line(label="this state exact", points=tuple(_points(exact)), colour=1, style="dashed"),
            ),
        )
    )


def _points(estimates: Sequence[tuple[int, Estimate]], *, interval: bool = False) -> Iterator[Point]:
    for step, found in estimates:
        if found.value is not None:
            low, high = (found.low, found.high) if interval else (None, None)
            yield Point(x=step, y=found.value, low=low, high=high)
