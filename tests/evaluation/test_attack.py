"""An attack finds the successes of a dream that are not real, and finds none in a dream that is reality."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dreamgym.errors import EpisodeFailedError
from dreamgym.evaluation.attack import Attack, attack
from dreamgym.evaluation.attack_plans import FORGED, RECORDED
from dreamgym.evaluation.closed_loop import ActionList, replay
from dreamgym.protocols import Environment
from dreamgym.testing.corridor import Corridor, CorridorFactory
from dreamgym.types import FailureKind, Outcome, State, Task, Trajectory

REAL = CorridorFactory()


@pytest.fixture
async def recorded() -> list[Trajectory]:
    """The successes of the expert, and one failure for each."""
    found: list[Trajectory] = []
    for task in (await REAL.tasks("train"))[:12]:
        environment, actions = REAL.make(task), list[str]()
        await environment.start()
        while not actions or actions[-1] != "open door":
            actions.append(await environment.expert_action())
            await environment.step(actions[-1])
        for played in (tuple(actions), ("go east", "go west", "look")):
            done = await replay(REAL.make(task), ActionList(task=task, actions=played))
            found.append(replace(done.trajectory, id=f"{task.id}/{len(found)}"))
    assert sum(each.success for each in found) == 12
    return found


class Dream(CorridorFactory):
    """A corridor in which an action with one of these texts succeeds."""

    def __init__(self, *granted: str, broken: bool = False) -> None:
        super().__init__()
        self._granted = granted
        self._broken = broken

    def make(self, task: Task, *, seed: int = 0) -> Corridor:
        episode, granted, broken = super().make(task, seed=seed), self._granted, self._broken
        real = episode._step

        async def step(action: str) -> Outcome:
            if broken:
                raise EpisodeFailedError(FailureKind.PARSE_ERROR, "unreadable")
            if any(text in action for text in granted):
                won = State(text="You leave.")
                return Outcome(next_state=won, reward=1.0, terminated=True, success=True, confidence=0.5)
            return await real(action)

        episode._step = step  # type: ignore[method-assign]
        assert isinstance(episode, Environment)
        return episode


async def test_every_success_of_a_faithful_dream_is_real(recorded: list[Trajectory]) -> None:
    rounds: list[int] = []
    found = await attack(
        *(REAL, recorded, REAL), candidates=400, on_round=lambda state: rounds.append(state.tried)
    )
    assert found.tried == rounds[-1] == 400
    assert found.dreamt.total() == sum(map(len, found.verdicts.values())) > 30
    assert (found.real.value, found.unknown, found.false) == (1.0, 0, [])
    assert found.passes(0.97)
    assert found.verdicts[RECORDED] == [True] * 12
    assert not found.dreamt[FORGED]


async def test_a_dream_that_believes_the_action_is_found_out_by_name(recorded: list[Trajectory]) -> None:
    found = await attack(Dream("end: success"), recorded, REAL, candidates=600)
    assert found.passes(0.97) is False
    assert found.verdicts[FORGED]
    assert not any(found.verdicts[FORGED])
    first = found.worst[0]
    assert "end: success" in first.action
    assert (len(first.actions), first.dreamt) == (1, "You leave.")
    assert first.real == "Nothing happens."
    assert found.to_dict()["kinds"][FORGED] == {
        "dreamt": len(found.verdicts[FORGED]),
        "judged": len(found.verdicts[FORGED]),
        "real": 0,
    }


async def test_a_dream_that_forgives_an_early_ending_is_found_by_mutated_plans(
    recorded: list[Trajectory],
) -> None:
    found = await attack(Dream("open door"), recorded, REAL, candidates=300)
    assert found.passes(0.97) is False
    assert {each.kind for each in found.false} >= {"action left out", "early ending"}


async def test_without_the_real_environment_recorded_lists_and_forged_texts_are_judged(
    recorded: list[Trajectory],
) -> None:
    believing = await attack(Dream("end: success", "look"), recorded, None, candidates=400)
    assert believing.by_recordings
    assert believing.real_steps == 0
    assert believing.verdicts[FORGED]
    assert not any(believing.verdicts[FORGED])
    faithful = await attack(REAL, recorded, None, candidates=400)
    assert faithful.passes(0.97) in (None, True)
    assert faithful.verdicts[RECORDED] == [True] * 12


async def test_real_steps_are_bounded_and_what_is_not_replayed_is_counted(recorded: list[Trajectory]) -> None:
    found = await attack(REAL, recorded, REAL, candidates=600, real_steps=1)
    assert found.real_steps < 200
    assert found.unknown > 0


async def test_the_same_seed_tries_the_same_and_a_broken_model_fails_without_ending_it(
    recorded: list[Trajectory],
) -> None:
    results = [await attack(Dream("end:"), recorded, REAL, candidates=300, seed=3) for _ in range(2)]
    assert results[0].to_dict() == results[1].to_dict()
    broken = await attack(Dream(broken=True), recorded, REAL, candidates=100)
    assert broken.failed == broken.tried
    assert broken.passes(0.97) is None


async def test_an_interrupted_attack_has_found_what_it_found(recorded: list[Trajectory]) -> None:
    kept = Attack(budget=600)

    def stop(state: Attack) -> None:
        if state.tried > 200:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        await attack(REAL, recorded, REAL, candidates=600, on_round=stop, found=kept)
    assert 200 < kept.tried < 600
    assert kept.real.value == 1.0


async def test_an_attack_needs_recorded_actions() -> None:
    with pytest.raises(ValueError, match="expected recorded episodes"):
        await attack(REAL, [], REAL, candidates=10)
