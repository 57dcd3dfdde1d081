"""One-step fidelity: given the true past, does the experience model predict what really came next?

Every transition of a held-out trajectory is asked for on its own, with the real history and a sheet that the
annotator's notes keep true, so that one wrong answer never spoils the next question. A prediction that failed
counts as wrong wherever it could have been right.
"""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from dreamgym.errors import EpisodeFailedError
from dreamgym.evaluation.async_map import OnCount, ask_all
from dreamgym.evaluation.statistics import Estimate, auroc, calibration_error, mean_of_steps, share_of_steps
from dreamgym.experience.known_replies import holds_replies
from dreamgym.experience.world_sheet import with_sheet
from dreamgym.protocols import Annotator, ExperienceModel
from dreamgym.types import Change, Fact, FailureKind, Outcome, Task, Trajectory, Transition, WorldSheet

_NAME_LIKE = re.compile(r"\b[a-z]+ \d+\b")


@dataclass(frozen=True, slots=True, kw_only=True)
class StepQuestion:
    """One transition to predict, with all that the model may know of it."""

    trajectory_id: str
    task: Task
    sheet: WorldSheet
    """As it truly is before the action."""
    history: tuple[Transition, ...]
    transition: Transition
    names: frozenset[str]
    """What any sheet of this episode speaks of."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRecord:
    """One transition, as it was and as it was predicted."""

    trajectory_id: str
    action: str
    state: str = ""
    """Before the action."""
    facts: tuple[Fact, ...] = ()
    """Of the world sheet before the action."""
    real: Outcome
    predicted: Outcome | None
    failure: FailureKind | None = None
    object_f1: float | None = 0.0
    """None where no sheet of the episode names anything."""
    hallucinated: tuple[str, ...] = ()

    @property
    def exact(self) -> bool:
        return self.predicted is not None and self.predicted.next_state.text == self.real.next_state.text

    @property
    def right(self) -> bool:
        """The text is exact, and no success is invented."""
        return self.exact and not self.false_success

    @property
    def false_success(self) -> bool:
        """Success is predicted, and the record has none."""
        predicted = self.predicted is not None and self.predicted.success
        return predicted and self.real.graded and not self.real.success


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreement:
    """How well a yes-or-no of the outcome is predicted."""

    agreement: Estimate
    precision: Estimate
    """Of those predicted, how many were real."""
    recall: Estimate
    """Of the real ones, how many were predicted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """Whether the stated confidence tells right predictions from wrong ones."""

    error: float | None
    auroc: float | None
    count: int
    """Predictions that stated a confidence."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepFidelity:
    """The one-step numbers; see ``docs/guides/fidelity.md`` for what each means."""

    trajectories: int
    predictions: int
    next_state_exact: Estimate
    object_f1: Estimate
    """Over the episodes whose sheets name anything."""
    terminated: Agreement
    success: Agreement
    hallucinated_objects: Estimate
    """Per answered state."""
    failures: dict[str, int]
    calibration: Calibration
    reward_error: Estimate
    """Mean absolute error of answered predictions: an estimate of ε_R on the sampled states."""
    largest_reward_error: float | None
    transition_error: Estimate
    """Share of wrong next states: an estimate of ε_P."""
    seconds: float = field(compare=False)
    records: tuple[StepRecord, ...] = field(default=(), compare=False, repr=False)
    """Every transition behind the numbers."""

    @property
    def predictions_per_second(self) -> float | None:
        return self.predictions / self.seconds if self.seconds > 0 else None

    def to_dict(self) -> dict[str, Any]:
        found = asdict(replace(self, records=()))
        del found["records"]
        return found | {"predictions_per_second": self.predictions_per_second}


async def measure_steps(
    experience_model: ExperienceModel,
    annotator: Annotator,
    trajectories: Sequence[Trajectory],
    *,
    in_flight: int = 64,
    on_count: OnCount | None = None,
) -> StepFidelity:
    """Predict every transition of these real trajectories and compare."""
    questions = await step_questions(annotator, trajectories)
    began = time.perf_counter()
    records = await predict_steps(experience_model, questions, in_flight=in_flight, on_count=on_count)
    return step_fidelity(records, seconds=time.perf_counter() - began)


async def step_questions(annotator: Annotator, trajectories: Iterable[Trajectory]) -> list[StepQuestion]:
    """Every transition with the sheet as it truly was, in hindsight where none was recorded."""
    questions: list[StepQuestion] = []
    for trajectory in map(with_sheet, trajectories):
        sheet = trajectory.sheet or WorldSheet(facts=())
        changes = await _changes(annotator, trajectory)
        facts = [*sheet.facts, *(fact for change in changes for fact in change.begun)]
        names = frozenset(name for fact in facts for name in fact[1:])
        if holds_replies(sheet):  # texts, not names
            names = frozenset()
        for position, (transition, change) in enumerate(zip(trajectory.transitions, changes, strict=True)):
            questions.append(
                StepQuestion(
                    trajectory_id=trajectory.id,
                    task=trajectory.task,
                    sheet=sheet,
                    history=trajectory.transitions[:position],
                    transition=transition,
                    names=names,
                )
            )
            sheet = sheet.after(change)
    return questions


async def predict_steps(
    experience_model: ExperienceModel,
    questions: Sequence[StepQuestion],
    *,
    in_flight: int = 64,
    on_count: OnCount | None = None,
) -> list[StepRecord]:
    """Answers in the order of the questions, however they came in."""

    async def ask(question: StepQuestion) -> StepRecord:
        step = question.transition
        try:
            prediction = await experience_model.predict(
                question.task, question.sheet, question.history, step.state, step.action
            )
        except EpisodeFailedError as error:
            return _record(question, None, error.kind)
        return _record(question, prediction.outcome, None)

    return await ask_all(ask, questions, in_flight=in_flight, on_count=on_count)


def step_fidelity(records: Sequence[StepRecord], *, seconds: float) -> StepFidelity:
    """The numbers of these records, which depend on nothing but them."""
    answered = [(each, each.predicted) for each in records if each.predicted is not None]
    graded = [each for each in records if each.real.graded]
    errors = [
        (each.trajectory_id, abs(imagined.reward - each.real.reward))
        for each, imagined in answered
        if each.real.graded
    ]
    confident = [
        (imagined.confidence, each.exact) for each, imagined in answered if imagined.confidence is not None
    ]
    return StepFidelity(
        trajectories=len({each.trajectory_id for each in records}),
        predictions=len(records),
        next_state_exact=share_of_steps((each.trajectory_id, each.exact) for each in records),
        object_f1=mean_of_steps(
            (each.trajectory_id, each.object_f1) for each in records if each.object_f1 is not None
        ),
        terminated=_agreement(graded, "terminated"),
        success=_agreement(graded, "success"),
        hallucinated_objects=mean_of_steps(
            (each.trajectory_id, float(len(each.hallucinated))) for each, _ in answered
        ),
        failures=dict(sorted(Counter(str(each.failure) for each in records if each.failure).items())),
        calibration=Calibration(
            error=calibration_error(confident), auroc=auroc(confident), count=len(confident)
        ),
        reward_error=mean_of_steps(errors),
        largest_reward_error=max((error for _, error in errors), default=None),
        transition_error=share_of_steps((each.trajectory_id, not each.exact) for each in records),
        seconds=seconds,
        records=tuple(records),
    )


def mentioned(text: str, names: Iterable[str]) -> frozenset[str]:
    """Which of the names a text speaks of, as whole words and in any case.

    >>> sorted(mentioned("You see a mug 1, and a Mug 12.", ["mug 1", "mug 12", "mug 2"]))
    ['mug 1', 'mug 12']
    """
    text = text.lower()
    return frozenset(
        name
        for name in names
        if name.lower() in text and re.search(rf"(?<!\w){re.escape(name.lower())}(?!\w)", text)
    )


def set_f1(found: frozenset[str], wanted: frozenset[str]) -> float:
    """Harmonic mean of precision and recall of a set; two empty sets agree.

    >>> set_f1(frozenset({"mug 1"}), frozenset({"mug 1", "pen 2", "pen 3"}))
    0.5
    """
    return 2 * len(found & wanted) / (len(found) + len(wanted)) if found or wanted else 1.0


def _record(question: StepQuestion, predicted: Outcome | None, failure: FailureKind | None) -> StepRecord:
    step = question.transition
    f1, invented = 0.0 if question.names else None, set[str]()
    if predicted is not None:
        imagined, real = predicted.next_state.text, step.outcome.next_state.text
        if question.names:
            f1 = set_f1(mentioned(imagined, question.names), mentioned(real, question.names))
        # What the environment itself says is no invention, whatever the sheet leaves out.
        known = {name.lower() for name in question.names} | _name_like(real) | _name_like(step.state.text)
        invented = _name_like(imagined) - known
    return StepRecord(
        trajectory_id=question.trajectory_id,
        action=step.action,
        state=step.state.text,
        facts=question.sheet.facts,
        real=step.outcome,
        predicted=predicted,
        failure=failure,
        object_f1=f1,
        hallucinated=tuple(sorted(invented)),
    )


async def _changes(annotator: Annotator, trajectory: Trajectory) -> list[Change]:
    notes = (await annotator.annotate(trajectory)).notes
    if len(notes) != len(trajectory):
        raise ValueError(
            f"expected {len(trajectory)} notes for trajectory {trajectory.id!r}, got {len(notes)}"
        )
    return [note.change for note in notes]


def _name_like(text: str) -> set[str]:
    return set(_NAME_LIKE.findall(text.lower()))


def _agreement(records: Sequence[StepRecord], what: str) -> Agreement:
    rows = [
        (each.trajectory_id, bool(getattr(each.real, what)), each.predicted and getattr(each.predicted, what))
        for each in records
    ]
    return Agreement(
        agreement=share_of_steps((trajectory, imagined == real) for trajectory, real, imagined in rows),
        precision=share_of_steps((trajectory, real) for trajectory, real, imagined in rows if imagined),
        recall=share_of_steps((trajectory, bool(imagined)) for trajectory, real, imagined in rows if real),
    )
