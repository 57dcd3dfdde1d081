"""The gate before practice: a dream that is too wrong or too forgiving is refused before the first update."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from dreamgym.errors import ConfigError, DreamRefusedError
from dreamgym.evaluation.gate import check_dream, check_policy
from dreamgym.evaluation.worst import AdviceSettings
from dreamgym.experience.annotate import PlainAnnotator
from dreamgym.training.run_dir import GATE, WARM_START, RunDir
from dreamgym.training.trainer import train
from dreamgym.types import (
    Outcome,
    Prediction,
    Provenance,
    State,
    Task,
    Trajectory,
    Transition,
    WorldSheet,
)
from tests.training.training_run import CorridorDream, record, run, settings

SHORT = ("train.mode=dream", "train.warm_start_steps=2", "train.steps=1", "train.monitors=off")
ADVICE = AdviceSettings(environment="vending", exchange_numbers=True)


@pytest.fixture
async def folder(tmp_path: Path) -> Path:
    await record(tmp_path / "offline")
    return tmp_path / "runs"


class Forgiving(CorridorDream):
    """Grants success for whatever is done, in the words of the environment."""

    async def predict(
        self, task: Task, sheet: WorldSheet, history: Sequence[Transition], state: State, action: str
    ) -> Prediction:
        found = await super().predict(task, sheet, history, state, action)
        return replace(found, outcome=replace(found.outcome, reward=1.0, terminated=True, success=True))


async def test_a_faithful_dream_passes_and_the_run_says_so(folder: Path) -> None:
    summary = await run(settings(folder, *SHORT))
    assert summary["gate"] == {"verdict": "passed", "reasons": []}
    found = json.loads((folder / "run" / GATE).read_text())
    assert found["dream"]["exact"]["value"] == 1.0
    assert found["dream"]["transitions"] == 22
    assert found["policy"]["success"]["count"] == 4, "half of a training step"
    assert found["policy"]["recorded_success"]["value"] == 1.0


async def test_a_dream_in_which_everything_succeeds_is_refused_before_anything_is_learnt(
    folder: Path,
) -> None:
    config = settings(folder, *SHORT)
    with pytest.raises(
        DreamRefusedError,
        match=r"(?s)does not have: 63\.6%.*`go east`: 100% of 7 replies exact, 7 false.*gate=warn",
    ) as refused:
        await train(config, experience_model=Forgiving())
    assert refused.value.exit_code == 9
    assert json.loads((folder / "run" / GATE).read_text())["verdict"] == "refused"
    assert not (folder / "run" / "policies").exists()


async def test_with_warn_it_trains_and_says_so_and_a_resumed_run_does_not_measure_again(folder: Path) -> None:
    with pytest.raises(DreamRefusedError):
        await train(settings(folder, *SHORT), experience_model=Forgiving())
    warnings: list[str] = []
    summary = await train(
        settings(folder, *SHORT, "train.gate=warn"),
        experience_model=Forgiving(),
        on_progress=lambda progress: warnings.extend(progress.warnings),
    )
    assert summary["gate"]["verdict"] == "warned"
    assert any("a policy should not train in this dream" in warning for warning in warnings)
    measured = (folder / "run" / GATE).read_text()
    await train(settings(folder, *SHORT, "train.gate=warn", "train.steps=2"), experience_model=Forgiving())
    assert (folder / "run" / GATE).read_text() == measured


async def test_a_mended_dream_is_measured_again_and_off_measures_nothing(folder: Path) -> None:
    with pytest.raises(DreamRefusedError):
        await train(settings(folder, *SHORT), experience_model=Forgiving())
    assert (await run(settings(folder, *SHORT)))["gate"]["verdict"] == "passed"
    other = await train(
        settings(folder.with_name("others"), *SHORT, "train.gate=off"), experience_model=Forgiving()
    )
    assert other["gate"]["verdict"] == "off"


async def test_a_refused_run_starts_again_with_corrected_settings_and_a_trained_one_does_not(
    folder: Path,
) -> None:
    with pytest.raises(DreamRefusedError):
        await train(settings(folder, *SHORT, "agent.max_tokens=3"), experience_model=Forgiving())
    refused = RunDir(folder / "run")  # the gate may also refuse after the warm start
    refused.save_policy(0, {"weights": torch.zeros(2)})
    refused.save(WARM_START, {"steps": 9})
    words = (*SHORT, "agent.max_tokens=4", "seed=1")
    assert (await run(settings(folder, *words)))["gate"]["verdict"] == "passed"
    fresh = folder.with_name("fresh")
    await run(settings(fresh, *words))
    weights, expected = (RunDir(each / "run").policy_weights(1) for each in (folder, fresh))
    assert weights.keys() == expected.keys()
    assert all(torch.equal(weights[name], expected[name]) for name in expected)
    with pytest.raises(ConfigError, match="was started with seed=1, got 2"):
        await run(settings(folder, *words, "seed=2"))


# --- the bounds, on a vending machine ---


def episode(number: int, actions: Sequence[str], *, success: bool, source: str = "real") -> Trajectory:
    """Coins are counted down from 9; the last action decides."""
    states = [State(text=f"coins left {9 - done}") for done in range(len(actions) + 1)]
    turns = tuple(
        Transition(
            state=states[place],
            action=action,
            outcome=Outcome(
                next_state=states[place + 1],
                reward=float(won := success and place == len(actions) - 1),
                terminated=won,
                success=won,
            ),
        )
        for place, action in enumerate(actions)
    )
    return Trajectory(
        id=f"{source}-{number}",
        task=Task(id=f"task {number}", instruction="Get the nuts.", environment="vending"),
        start=states[0],
        transitions=turns,
        provenance=Provenance(source="real" if source == "real" else "synthetic", policy="p"),
    )


PLAYED = ("look", "insert coin", "press A", "take nuts")
RECORDED = [episode(number, PLAYED, success=number % 4 == 0) for number in range(64)]


class Machine:
    """Knows every recorded reply, except that coins are often miscounted, or that `take` always succeeds."""

    name = "machine"

    def __init__(self, *, right_coins: int = 64, generous: bool = False) -> None:
        self.right_coins = right_coins
        self.generous = generous
        self.known = {
            (each.task.id, turn.state.text, turn.action): turn.outcome
            for each in RECORDED
            for turn in each.transitions
        }

    async def imagine_start(self, task: Task, sheet: WorldSheet) -> State:
        return RECORDED[0].start

    async def predict(
        self, task: Task, sheet: WorldSheet, history: Sequence[Transition], state: State, action: str
    ) -> Prediction:
        nothing = Outcome(next_state=State(text="Nothing."), reward=0.0, terminated=False)
        outcome = self.known.get((task.id, state.text, action), nothing)
        if action == "insert coin" and int(task.id.split()[1]) >= self.right_coins:
            outcome = replace(outcome, next_state=State(text="coins left 1"))
        if self.generous and not history and action == "take nuts":
            outcome = replace(outcome, success=True, reward=1.0, terminated=True)
        return Prediction(outcome=outcome, sheet=sheet)


async def problems(machine: Machine) -> list[str]:
    found = await check_dream(machine, PlainAnnotator(), RECORDED, RECORDED, ADVICE, transitions=256)
    return found.problems(least_exact=0.5, most_false=0.2)


async def test_a_machine_that_knows_its_replies_passes() -> None:
    assert await problems(Machine()) == []


async def test_one_frequent_action_that_is_mostly_wrong_is_enough_and_is_named() -> None:
    """31% of `insert coin`, while 83% of all replies are right."""
    found = await check_dream(
        Machine(right_coins=20), PlainAnnotator(), RECORDED, RECORDED, ADVICE, transitions=256
    )
    assert found.exact.value == pytest.approx(1 - 44 / 256)
    (problem,) = found.problems(least_exact=0.5, most_false=0.2)
    assert problem.startswith("replies to `insert coin`: 31.2%")
    assert "exchange_numbers=false" in str(found.worst[0])
    assert found.problems(least_exact=None, most_false=0.2) == [], "texts of a prompted model may differ"


async def test_recorded_successes_that_are_lost_in_the_dream_are_a_reason_to_refuse() -> None:
    """Each step is asked alone above; here an error in the middle of an episode costs its success."""
    for machine, won in ((Machine(), 1.0), (Machine(right_coins=0), 0.0)):
        found = await check_dream(
            *(machine, PlainAnnotator(), RECORDED, RECORDED, ADVICE), transitions=256, episodes=RECORDED
        )
        assert found.won_again.value == won
        assert found.lost_again.value == 1.0
        reasons = found.problems(least_exact=None, most_false=0.2, least_won=0.3)
        assert [each.startswith("recorded successes: 0.0% ") for each in reasons] == [True] * (won == 0)


async def test_a_dream_that_grants_the_last_action_first_is_refused_although_every_record_agrees() -> None:
    (problem,) = await problems(Machine(generous=True))
    assert "near misses" in problem
    assert "100.0%" in problem


def test_episodes_that_succeed_at_the_first_action_are_too_quick_to_be_true() -> None:
    """97% in the dream at once, 25% in the recordings, of which none has fewer than 4 actions."""
    dreamt = [episode(n, ("take nuts",), success=n > 0, source="dreamt") for n in range(32)]
    found = check_policy(dreamt, RECORDED)
    (problem,) = found.problems(most_false=0.2)
    assert "96.9%" in problem
    assert "25.0%" in problem
    proper = [episode(n, PLAYED, success=True, source="dreamt") for n in range(32)]
    assert check_policy(proper, RECORDED).problems(most_false=0.2) == []


def test_successes_without_support_are_not_counted() -> None:
    quick = episode(0, ("take nuts",), success=True, source="dreamt")
    turn = quick.transitions[0]
    guessed = replace(turn, outcome=replace(turn.outcome, info={"supported": False}))
    found = check_policy([replace(quick, transitions=(guessed,))] * 32, RECORDED)
    assert found.success.value == 0.0
    assert found.problems(most_false=0.2) == []
