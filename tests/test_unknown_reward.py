"""A record that does not say how its episode ended is neither a success nor a failure anywhere."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import ModuleType
from unittest.mock import Mock

import pytest

from dreamgym.config import Config
from dreamgym.data.ingest import Defaults, atif, messages, otel
from dreamgym.data.ingest.json_reader import Record
from dreamgym.data.stats import stats
from dreamgym.data.trajectories import TrajectoryWriter
from dreamgym.errors import ConfigError
from dreamgym.evaluation.one_step import StepRecord, step_fidelity
from dreamgym.experience.annotate import PlainAnnotator
from dreamgym.experience.dataset import examples
from dreamgym.experience.reply_format import PromptSettings
from dreamgym.replay.buffer import ReplayBuffer
from dreamgym.rl.dpo import preference_pairs
from dreamgym.training.warm_start import make_sft
from dreamgym.types import UNKNOWN_REWARD, RetrievalFilter, Trajectory
from tests.replay.household import episode


def ungraded(number: int) -> Trajectory:
    trajectory = episode(number, task="task-0", reward=0.0)
    *steps, last = trajectory.transitions
    unknown = replace(last, outcome=replace(last.outcome, reward_source=UNKNOWN_REWARD))
    return replace(trajectory, transitions=(*steps, unknown))


SUCCESS, FAILURE = episode(1, task="task-0"), episode(2, task="task-0", reward=0.0)
UNGRADED = ungraded(3)


def test_a_warm_start_imitates_known_successes_only() -> None:
    agent = Mock()
    agent.tokenize.return_value = []
    with pytest.raises(ConfigError, match="of 3 trajectories 1 succeed"):
        make_sft(agent, [SUCCESS, FAILURE, UNGRADED], Config())
    agent.tokenize.assert_called_once_with([SUCCESS])


def test_a_preference_pair_never_rejects_a_trajectory_of_unknown_success() -> None:
    assert preference_pairs([SUCCESS, UNGRADED]) == []
    assert preference_pairs([SUCCESS, FAILURE, UNGRADED]) == [(SUCCESS, FAILURE)]


async def test_the_experience_model_is_not_fine_tuned_on_an_unknown_end() -> None:
    made = [
        each.position
        async for each in examples([UNGRADED], PlainAnnotator(), settings=PromptSettings(demonstrations=0))
    ]
    assert made == [-1, 0, 1, 2]  # the start and all but the last of four steps


@pytest.mark.parametrize("min_reward", [-1.0, 0.0, 1.0])
async def test_no_minimum_reward_admits_an_unknown_one(tmp_path: Path, min_reward: float) -> None:
    with ReplayBuffer.open(tmp_path / "replay.sqlite") as buffer:
        for each in (SUCCESS, FAILURE, UNGRADED):
            await buffer.add(each)
        step = UNGRADED.transitions[0]
        query = [(step.state.text, step.action)]
        plain = RetrievalFilter(environment="household")
        (found,) = await buffer.search(query, k=12, filters=[plain])
        assert {hit.trajectory_id for hit in found} == {SUCCESS.id, FAILURE.id, UNGRADED.id}
        (found,) = await buffer.search(query, k=12, filters=[replace(plain, min_reward=min_reward)])
        known = {each.id for each in (SUCCESS, FAILURE) if each.total_reward >= min_reward}
        assert {hit.trajectory_id for hit in found} == known


def test_fidelity_compares_reward_and_success_with_known_ones_only() -> None:
    records = [
        StepRecord(
            trajectory_id=trajectory.id,
            action=step.action,
            real=step.outcome,
            predicted=step.outcome,
            failure=None,
            object_f1=None,
            hallucinated=(),
        )
        for trajectory in (SUCCESS, UNGRADED)
        for step in trajectory.transitions
    ]
    found = step_fidelity(records, seconds=1.0)
    assert found.predictions == found.next_state_exact.count == 8
    assert found.success.agreement.count == found.terminated.agreement.count == 7
    assert found.reward_error.count == 7


@pytest.mark.parametrize("module", [messages, atif])
def test_an_exported_trajectory_of_unknown_success_is_read_as_one(module: ModuleType) -> None:
    record = Record(where="x:1", value=module.to_record(UNGRADED))
    assert not module.from_record(record, Defaults(environment="household")).graded


def test_spans_without_an_evaluation_are_of_unknown_success() -> None:
    said = [{"role": "assistant", "parts": [{"type": "text", "content": "look"}]}]
    asked = [{"role": "user", "parts": [{"type": "text", "content": "find the mug"}]}]
    span = {
        "context": {"trace_id": "1", "span_id": "2"},
        "attributes": {"gen_ai.input.messages": asked, "gen_ai.output.messages": said},
    }
    for label, graded in ((None, False), ("fail", True), ("pass", True)):
        event = {
            "name": "gen_ai.evaluation.result",
            "attributes": {"gen_ai.evaluation.score.label": label},
        }
        record = Record(where="x:1", value=span | {"events": [event] if label else []})
        ((_, found),) = otel.from_records([record], Defaults(environment="household"), None)
        assert (found.graded, found.success) == (graded, label == "pass")


def test_the_success_rate_of_a_dataset_is_that_of_known_ends(tmp_path: Path) -> None:
    with TrajectoryWriter(tmp_path) as writer:
        writer.append([SUCCESS, FAILURE, UNGRADED])
    total = stats(tmp_path).total
    assert (total.episodes, total.graded, total.success_rate) == (3, 2, 0.5)
