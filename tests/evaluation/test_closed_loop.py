"""Closed loop against the real household engine: what crosses between dream and reality, and what not."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from itertools import count, islice
from xml.etree import ElementTree

import pytest

from dreamgym.data.datasets import builtin_dataset
from dreamgym.data.trajectories import read_trajectories
from dreamgym.envs.alfworld.annotator import HouseholdAnnotator
from dreamgym.envs.registry import open_environment
from dreamgym.evaluation.closed_loop import (
    ActionList,
    arrived,
    dream_successes,
    drift_by_step,
    near_miss,
    real_to_dream,
    replay_in_dream,
    replay_in_reality,
    replay_spread,
)
from dreamgym.evaluation.fidelity import drift_svg, markdown_table, measure_fidelity
from dreamgym.experience.model import ReasoningExperienceModel
from dreamgym.protocols import EnvironmentFactory
from dreamgym.testing.scripted import ScriptedLanguageModel
from dreamgym.types import CompletionRequest, Trajectory
from tests.training.dreaming import SETTINGS, faithful, recited

FLATTERY = "think: it went well.\nchange:\nnext: You have done it.\nend: success"


@pytest.fixture(scope="module")
def recorded() -> list[Trajectory]:
    """Six short real successes."""
    found = read_trajectories(builtin_dataset())
    return list(islice((each for each in found if each.success and 4 < len(each) < 12), 6))


@pytest.fixture
async def household() -> AsyncIterator[EnvironmentFactory]:
    factory = open_environment("alfworld", {"processes": 2})
    yield factory
    await factory.aclose()


def lists(trajectories: list[Trajectory]) -> list[ActionList]:
    return [ActionList.of(trajectory) for trajectory in trajectories]


async def test_a_faithful_dream_crosses_both_ways(
    recorded: list[Trajectory], household: EnvironmentFactory
) -> None:
    found = await measure_fidelity(
        await recited(recorded),
        HouseholdAnnotator(),
        recorded,
        factory=household,
    )
    assert found.real_to_dream.share.value == 1.0
    assert found.dream_to_real is not None
    assert (found.dream_to_real.share.value, found.dream_to_real.share.count) == (1.0, 6)
    assert all(point.unbroken.value == point.exact.value == 1.0 for point in found.drift)
    assert found.drift[0].unbroken.count == 6
    assert (found.replay_spread.largest_deviation, found.replay_spread.all_equal.value) == (0.0, 1.0)
    assert found.theorem is not None
    assert found.theorem.return_gap == 0.0
    reported = json.loads(json.dumps(found.to_dict(), allow_nan=False))
    assert reported["experience_model"] == "recited"
    table = markdown_table(found)
    assert "| dream → real (WM2Real) | 1.000 [0.610, 1.000] | 6 |" in table
    assert len({line.count("|") for line in table.splitlines()}) == 1


async def test_wm2real_falls_by_every_success_that_is_declared_too_early(
    recorded: list[Trajectory], household: EnvironmentFactory
) -> None:
    flattered = {each.id for each in recorded[:4]}

    def fault(trajectory: Trajectory, position: int, reply: str) -> str:
        return FLATTERY if trajectory.id in flattered and position == 1 else reply

    dreams = await replay_in_dream(await recited(recorded, fault), lists(recorded))
    assert real_to_dream(recorded, dreams).share.value == 1.0  # flattery passes this test, hence the other
    assert [len(dream.outcomes) for dream in dreams[:4]] == [2] * 4
    back = arrived(await replay_in_reality(household, dream_successes(dreams), in_flight=2))
    assert back.share.value == pytest.approx(2 / 6)
    assert (back.share.count, back.failures) == (6, {})


async def test_near_misses_catch_a_dream_that_forgives(
    recorded: list[Trajectory], household: EnvironmentFactory
) -> None:
    missed = [near_miss(each) for each in lists(recorded[:3])]
    assert [len(each.actions) for each in missed] == [len(each) - 1 for each in recorded[:3]]
    forgiving = await recited(recorded, faithful, unknown=lambda request: FLATTERY)
    dreams = await replay_in_dream(forgiving, [*lists(recorded[:3]), *missed])
    assert all(dream.success for dream in dreams)
    replays = await replay_in_reality(household, dream_successes(dreams), in_flight=2)
    assert arrived(replays).share.value == 0.5


async def test_drift_counts_the_step_at_which_a_dream_leaves_reality(recorded: list[Trajectory]) -> None:
    def fault(trajectory: Trajectory, position: int, reply: str) -> str:
        return reply.replace("next: ", "next: Oh! ") if trajectory is recorded[0] and position == 1 else reply

    model = await recited(recorded, fault)
    dreams = await replay_in_dream(model, lists(recorded))
    points = drift_by_step(recorded, dreams)
    assert [point.step for point in points] == list(range(1 + max(map(len, recorded))))
    assert [point.unbroken.value for point in points[:2]] == [1.0, 1.0]
    assert points[2].unbroken.value == points[2].exact.value == pytest.approx(5 / 6)
    assert real_to_dream(recorded, dreams).share.value == pytest.approx(5 / 6)  # lost, it never finds back
    picture = ElementTree.fromstring(drift_svg(points, title="Drift <of> a & b"))
    lines = [part for part in picture.iter() if part.tag.endswith("polyline")]
    assert [len(line.attrib["points"].split()) for line in lines] == [len(points)] * 2


async def test_a_failed_prediction_ends_the_dream_and_is_counted(recorded: list[Trajectory]) -> None:
    def fault(trajectory: Trajectory, position: int, reply: str) -> str:
        return "I would rather not." if trajectory is recorded[0] and position == 2 else reply

    dreams = await replay_in_dream(await recited(recorded, fault), lists(recorded))
    found = real_to_dream(recorded, dreams)
    assert found.failures == {"parse_error": 1}
    assert found.share.value == pytest.approx(5 / 6)
    assert drift_by_step(recorded, dreams)[3].exact.value == pytest.approx(5 / 6)


async def test_a_world_that_changes_from_dream_to_dream_has_a_spread(recorded: list[Trajectory]) -> None:
    numbers = count()

    def moody(request: CompletionRequest) -> str:
        if "action: start" in request.prompt:
            return "next: A room."
        return FLATTERY if next(numbers) % 2 else FLATTERY.replace("success", "yes")

    model = ReasoningExperienceModel(ScriptedLanguageModel(moody), name="moody", settings=SETTINGS)
    dreams = await replay_in_dream(model, lists(recorded[:1]) * 4)
    spread = replay_spread(dreams, repeats=4)
    assert (spread.mean_deviation, spread.largest_deviation) == (0.5, 0.5)
    assert spread.all_equal.value == 1.0  # the states agree, only the luck differs
    with pytest.raises(ValueError, match="at least 2 times"):
        replay_spread(dreams, repeats=1)
