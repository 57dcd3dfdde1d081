"""One-step fidelity: a faithful model is perfect, and each planted fault costs exactly what it should."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import islice

import pytest

from dreamgym.data.datasets import builtin_dataset
from dreamgym.data.trajectories import read_trajectories
from dreamgym.envs.alfworld.annotator import HouseholdAnnotator
from dreamgym.evaluation.closed_loop import ActionList
from dreamgym.evaluation.fidelity import markdown_table, measure_fidelity
from dreamgym.evaluation.one_step import (
    StepFidelity,
    StepRecord,
    measure_steps,
    step_fidelity,
    step_questions,
)
from dreamgym.experience.annotate import PlainAnnotator
from dreamgym.experience.world_sheet import hindsight_sheet, with_sheet
from dreamgym.protocols import ExperienceModel
from dreamgym.types import (
    Annotation,
    Note,
    Outcome,
    Prediction,
    State,
    Task,
    Trajectory,
    Transition,
    WorldSheet,
)
from tests.training.dreaming import confident, recited


@pytest.fixture(scope="module")
def recorded() -> list[Trajectory]:
    """Six real episodes, of which five succeed."""
    return list(islice(read_trajectories(builtin_dataset()), 6, 12))


async def measured(model: ExperienceModel, trajectories: Sequence[Trajectory]) -> StepFidelity:
    return await measure_steps(model, HouseholdAnnotator(), trajectories)


async def test_a_model_that_answers_as_it_really_went_is_perfect(recorded: list[Trajectory]) -> None:
    found = await measured(await recited(recorded), recorded)
    total = sum(map(len, recorded))
    assert (found.trajectories, found.predictions) == (6, total)
    for estimate in (
        found.next_state_exact,
        found.object_f1,
        found.terminated.agreement,
        found.terminated.precision,
        found.terminated.recall,
        found.success.agreement,
        found.success.precision,
        found.success.recall,
    ):
        assert estimate.value == 1.0
    assert found.success.recall.count == 5
    assert found.hallucinated_objects.value == 0.0
    assert (found.reward_error.value, found.largest_reward_error) == (0.0, 0.0)
    assert found.transition_error.value == 0.0
    assert found.failures == {}
    assert found.calibration.count == 0
    assert found.seconds > 0


async def test_an_invented_object_costs_agreement_and_is_counted(recorded: list[Trajectory]) -> None:
    def fault(trajectory: Trajectory, position: int, reply: str) -> str:
        if position == 0:
            head, _, rest = reply.partition("\nnext: ")
            return f"{head}\nnext: A unicorn 7 and a unicorn 8 stand here.\n{rest.partition(chr(10))[2]}"
        return reply

    found = await measured(await recited(recorded, fault), recorded)
    total = sum(map(len, recorded))
    assert found.next_state_exact.value == pytest.approx(1 - 6 / total)
    assert found.transition_error.value == pytest.approx(6 / total)
    assert found.hallucinated_objects.value == pytest.approx(12 / total)
    assert found.object_f1.value == pytest.approx(1 - 6 / total)  # every first state names what it shows
    assert found.success.agreement.value == 1.0


async def test_a_success_too_early_costs_precision_and_reward(recorded: list[Trajectory]) -> None:
    winners = [each for each in recorded if each.success]

    def fault(trajectory: Trajectory, position: int, reply: str) -> str:
        return reply.replace("end: no", "end: success") if position == 0 else reply

    found = await measured(await recited(winners, fault), winners)
    total = sum(map(len, winners))
    assert found.next_state_exact.value == 1.0
    assert found.success.agreement.value == pytest.approx(1 - 5 / total)
    assert found.success.precision.value == found.terminated.precision.value == 0.5
    assert found.success.recall.value == found.terminated.recall.value == 1.0
    assert found.reward_error.value == pytest.approx(5 / total)
    assert found.largest_reward_error == 1.0


async def test_unreadable_replies_are_failures_that_agree_with_nothing(recorded: list[Trajectory]) -> None:
    def fault(trajectory: Trajectory, position: int, reply: str) -> str:
        return "I would rather not." if position == len(trajectory) - 1 else reply

    found = await measured(await recited(recorded, fault), recorded)
    total = sum(map(len, recorded))
    assert found.failures == {"parse_error": 6}
    assert found.next_state_exact.value == pytest.approx(1 - 6 / total)
    assert found.terminated.agreement.value == pytest.approx(1 - 6 / total)
    assert found.success.recall.value == 0.0
    assert found.success.precision.value is None
    assert found.reward_error.count == total - 6
    assert json.loads(json.dumps(found.to_dict(), allow_nan=False))["failures"] == {"parse_error": 6}


async def test_confidence_is_held_against_what_was_right(recorded: list[Trajectory]) -> None:
    def fault(trajectory: Trajectory, position: int, reply: str) -> str:
        return reply.replace("next: ", "next: Oh! ") if position == 0 else reply

    def logprob(reply: str) -> float:
        return math.log(0.25) if "Oh!" in reply else math.log(1.0)

    found = await measured(await confident(recorded, fault, logprob), recorded)
    total = sum(map(len, recorded))
    assert found.calibration.auroc == 1.0
    assert found.calibration.error == pytest.approx(0.25 * 6 / total)
    assert found.calibration.count == total


class BusyModel:
    """Counts how many questions it holds at once, and answers late ones first."""

    name = "busy"

    def __init__(self, inner: ExperienceModel) -> None:
        self._inner = inner
        self._asked = 0
        self.now = self.most = 0

    async def imagine_start(self, task: Task, sheet: WorldSheet) -> State:
        return await self._inner.imagine_start(task, sheet)

    async def predict(
        self, task: Task, sheet: WorldSheet, history: Sequence[Transition], state: State, action: str
    ) -> Prediction:
        self._asked += 1
        self.now += 1
        self.most = max(self.most, self.now)
        for _ in range(7 - self._asked % 7):
            await asyncio.sleep(0)
        self.now -= 1
        return await self._inner.predict(task, sheet, history, state, action)


async def test_many_are_in_flight_but_no_more_than_allowed_and_the_result_is_the_same(
    recorded: list[Trajectory],
) -> None:
    model = BusyModel(await recited(recorded))
    many = await measure_steps(model, HouseholdAnnotator(), recorded, in_flight=16)
    assert model.most == 16
    assert many == await measure_steps(model, HouseholdAnnotator(), recorded, in_flight=1)


async def test_what_holds_no_sheet_is_measured_on_the_one_it_would_be_fine_tuned_with(
    recorded: list[Trajectory],
) -> None:
    bare = replace(recorded[0], sheet=None)
    reported = hindsight_sheet(bare)
    assert reported.facts
    assert reported != recorded[0].sheet
    first, *later = await step_questions(PlainAnnotator(), [bare])
    assert first.sheet == with_sheet(bare).sheet == ActionList.of(bare).sheet == reported
    assert any(question.sheet != reported for question in later)  # the annotator's notes keep it current
    assert with_sheet(recorded[0]) is recorded[0]


async def test_where_no_sheet_names_anything_there_is_no_f1_of_objects(recorded: list[Trajectory]) -> None:
    """Two texts that mention none of no names would agree for nothing."""
    nameless = [replace(recorded[0], sheet=WorldSheet(facts=()))]

    class Silent:
        name = "silent"

        async def annotate(self, trajectory: Trajectory) -> Annotation:
            notes = (Note(reasoning="it is so."),) * len(trajectory)
            return Annotation(plan="p", success_mode="s", failure_mode="f", notes=notes)

    found = await measure_fidelity(await recited(recorded), Silent(), nameless)
    assert found.steps.predictions == len(nameless[0])
    assert (found.steps.object_f1.value, found.steps.object_f1.count) == (None, 0)
    assert set(found.to_dict()["left_out"]) == {"object_f1", "dream_to_real"}
    table = markdown_table(found)
    assert "| objects, set-F1 | left out: no world sheet names anything | 0 |" in table
    assert "| dream → real (WM2Real) | left out: the real environment is not installed | 0 |" in table


@pytest.mark.parametrize(
    "wrong", ["[p7] item: Red Mug, $8.0", "[p8] item: Red Mug, $8.5", "[p8] item: Mug, $8.0"]
)
def test_a_page_with_another_id_price_or_name_is_wrong(wrong: str) -> None:
    def outcome(text: str) -> Outcome:
        return Outcome(next_state=State(text=text), reward=0.0, terminated=False, success=False)

    real = outcome("[p8] item: Red Mug, $8.0")
    records = [
        StepRecord(trajectory_id="one", action="search[mug]", real=real, predicted=outcome(text))
        for text in (real.next_state.text, wrong)
    ]
    assert step_fidelity(records, seconds=1.0).next_state_exact.value == 0.5
