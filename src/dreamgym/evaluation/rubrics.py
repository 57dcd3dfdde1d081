"""The paper's four rubrics over many predictions: mean scores, with the name of the judge."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from dreamgym.errors import EpisodeFailedError
from dreamgym.evaluation.async_map import ask_all
from dreamgym.evaluation.statistics import Estimate, mean_of_steps
from dreamgym.experience.rubric_judge import RUBRICS, RubricJudge, Scores
from dreamgym.types import FailureKind, Trajectory, history


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """The scores of one judge over many transitions."""

    judge: str
    scores: dict[str, Estimate]
    """Mean score of each rubric, 0 to 2, higher is better for all."""
    failures: dict[str, int]
    """Transitions without readable scores, by kind; they count in no mean."""

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


async def judge_trajectories(
    judge: RubricJudge, trajectories: Sequence[Trajectory], *, in_flight: int = 16
) -> Judged:
    """Score every transition of these (usually synthetic) trajectories."""
    steps = [
        (trajectory, past, transition)
        for trajectory in trajectories
        for past, transition in history(trajectory)
    ]

    async def ask(place: int) -> Scores | FailureKind:
        trajectory, past, transition = steps[place]
        try:
            return await judge.score(trajectory.task, past, transition)
        except EpisodeFailedError as error:
            return error.kind

    answers = await ask_all(ask, range(len(steps)), in_flight=in_flight)
    scored = [
        (trajectory.id, answer)
        for (trajectory, _, _), answer in zip(steps, answers, strict=True)
        if isinstance(answer, Scores)
    ]
    failed = Counter(str(answer) for answer in answers if isinstance(answer, FailureKind))
    return Judged(
        judge=judge.name,
        scores={
            rubric: mean_of_steps(
                (trajectory, float(getattr(scores, rubric))) for trajectory, scores in scored
            )
            for rubric in RUBRICS
        },
        failures=dict(sorted(failed.items())),
    )
