"""A whole run with a curriculum: a real agent and learner, household tasks, a stand-in for the dream."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from dreamgym.config import Config, load_config
from dreamgym.curriculum.task_pool import FILE, read_pool
from dreamgym.data.datasets import builtin_dataset
from dreamgym.data.trajectories import TrajectoryWriter, read_trajectories
from dreamgym.envs.alfworld import SPEC, AlfworldOptions
from dreamgym.envs.alfworld.generate import generate_game
from dreamgym.envs.alfworld.instructions import can_succeed_here
from dreamgym.envs.textworld import SPEC as TEXTWORLD
from dreamgym.errors import ConfigError
from dreamgym.experience.reply_format import variation_text
from dreamgym.models.registry import LanguageModels
from dreamgym.testing.scripted import ScriptedLanguageModel
from dreamgym.training.curriculum_setup import curriculum_of, generates
from dreamgym.training.trainer import train
from dreamgym.types import (
    CompletionRequest,
    Outcome,
    Prediction,
    RolloutGroup,
    State,
    Task,
    Trajectory,
    Transition,
    WorldSheet,
)
from tests.scripted_server import ScriptedServer

RECORDED = list(islice(read_trajectories(builtin_dataset()), 300))
SMALL = [
    "agent.model=nano",
    "agent.vocabulary=320",
    "agent.max_tokens=4",
    "train.warm_start_steps=0",
    "train.horizon=2",
    "train.tasks_per_step=4",
    "train.group_size=4",
    "train.monitors=off",
    "train.gate=off",
    "curriculum.every=2",
    "curriculum.generated_fraction=0.5",
]


class CoinDream:
    """An experience model that lets an action succeed or not by its letters; its weights can vary tasks."""

    name = "coin"

    def __init__(self) -> None:
        others = sorted({each.task.instruction for each in RECORDED[20:]})
        self.language_model = ScriptedLanguageModel(
            lambda request: variation_text(others[request.seed % len(others)])
        )
        self.simulated: dict[str, tuple[Task, WorldSheet]] = {}

    async def imagine_start(self, task: Task, sheet: WorldSheet) -> State:
        return State(text="You are in a room.")

    async def predict(
        self, task: Task, sheet: WorldSheet, history: Sequence[Transition], state: State, action: str
    ) -> Prediction:
        self.simulated[task.id] = (task, sheet)
        won = sum(map(ord, action)) % 2 == 0
        outcome = Outcome(next_state=State(text="Done."), reward=float(won), terminated=True, success=won)
        return Prediction(outcome=outcome, sheet=sheet)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("curriculum") / "offline"
    with TrajectoryWriter(folder) as writer:
        writer.append(RECORDED[:20])
    return folder


@pytest.fixture(scope="module")
def whole(data: Path) -> tuple[Path, CoinDream]:
    """A run by GRPO that is never stopped, and its dream."""
    out, dream = data.parent / "whole", CoinDream()
    asyncio.run(train(settings(data, out, "train.steps=5"), experience_model=dream))
    return out, dream


def settings(data: Path, out: Path, *more: str) -> Config:
    return load_config(overrides=[*SMALL, f'train.data=["{data}"]', f'train.out="{out}"', *more])


def rows(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]


@pytest.mark.parametrize("algorithm", ["grpo", "ppo"])
async def test_generated_tasks_are_simulated_with_world_sheets_that_allow_them(
    algorithm: str, data: Path, whole: tuple[Path, CoinDream], tmp_path: Path
) -> None:
    out, dream = whole
    if algorithm != "grpo":
        out, dream = tmp_path / "run", CoinDream()
        config = settings(data, out, "train.steps=4", f"learner.algorithm={algorithm}")
        await train(config, experience_model=dream)
    generated = [standing for standing in read_pool(out / FILE).generated if standing.episodes]
    assert generated
    for standing in generated:
        task, sheet = dream.simulated[standing.task.id]
        assert can_succeed_here(task, sheet)
    reported = [row["tasks"] for row in rows(out) if row["kind"] == "train"]
    assert reported[0]["generated_share"] == 0
    assert max(step["generated_share"] for step in reported) == 0.5
    assert all(row["dropped"] == {} for row in rows(out) if row["kind"] == "train")


async def test_a_run_that_resumes_has_the_pool_of_one_that_never_stopped(
    data: Path, whole: tuple[Path, CoinDream], tmp_path: Path
) -> None:
    for steps in (3, 5):
        await train(settings(data, tmp_path / "cut", f"train.steps={steps}"), experience_model=CoinDream())
    one, cut = (read_pool(run / FILE) for run in (whole[0], tmp_path / "cut"))
    assert [each.task for each in cut.records] == [each.task for each in one.records]
    assert [each.history for each in cut.records] == [each.history for each in one.records]


async def test_without_a_generator_the_tasks_stay_as_they_are(data: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    config = settings(data, out, "train.steps=1", "curriculum.generator=none")
    await train(config, experience_model=CoinDream())
    assert not (out / FILE).exists()


def test_a_generator_that_cannot_be_had_is_said_before_anything_starts() -> None:
    with pytest.raises(ConfigError, match=r"expected curriculum\.generator auto, none, experience or hf:"):
        generates(load_config(overrides=["curriculum.generator=gpt"]), SPEC)
    asked = load_config(overrides=["curriculum.generator=experience", "environment.name=textworld"])
    with pytest.raises(ConfigError, match="cannot read and check new tasks"):
        generates(asked, TEXTWORLD)
    assert not generates(load_config(overrides=["environment.name=textworld"]), TEXTWORLD)
    assert not generates(load_config(overrides=["train.mode=real"]), SPEC)
    assert generates(load_config(), SPEC)


async def test_weights_that_cannot_be_asked_leave_auto_without_a_generator(tmp_path: Path) -> None:
    dream: Any = CoinDream()
    del dream.language_model
    tasks = [each.task for each in RECORDED[:3]]
    assert await curriculum_of(load_config(), SPEC, tmp_path, RECORDED[:3], tasks, dream) is None
    asked = load_config(overrides=["curriculum.generator=experience"])
    with pytest.raises(ConfigError, match="expected an experience model with a language_model"):
        await curriculum_of(asked, SPEC, tmp_path, RECORDED[:3], tasks, dream)


async def test_the_instructions_of_the_evaluation_are_reported_without_playing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("ALFWORLD_DATA", raising=False)
    assert SPEC.evaluation_instructions is not None
    reported = await SPEC.evaluation_instructions(AlfworldOptions())
    assert generate_game("valid_unseen", 0, 7, 0).instruction in reported
    assert generate_game("valid_seen", 0, 0, 0).instruction in reported
    assert len(reported) == 400


def luck(played: Trajectory) -> RolloutGroup:
    """A group that succeeds every other time."""
    last = played.transitions[-1]

    def ended(success: bool) -> Trajectory:
        outcome = replace(last.outcome, success=success, reward=float(success), terminated=True)
        return replace(played, transitions=(*played.transitions[:-1], replace(last, outcome=outcome)))

    return RolloutGroup(task=played.task, trajectories=(ended(True), ended(False)))


async def test_an_endpoint_writes_and_selects_new_tasks(tmp_path: Path) -> None:
    others = sorted({each.task.instruction for each in RECORDED[20:]})

    def author(request: CompletionRequest) -> str:
        if "Candidates:" in request.prompt:
            return json.dumps({"choice": 1, "reason": "It asks for one step more."})
        return json.dumps({"variations": others[request.seed % 40 :][:8]})

    seeds = [each.task for each in RECORDED[:3]]
    with ScriptedServer(author) as server:
        config = load_config(overrides=[f"curriculum.generator={server.name}", "curriculum.every=1"])
        assert generates(config, SPEC)
        async with LanguageModels(config) as models:
            planned = await curriculum_of(config, SPEC, tmp_path, RECORDED[:60], seeds, CoinDream(), models)
            assert planned is not None
            curriculum, _ = planned
            await curriculum.record([luck(each) for each in RECORDED[:3]])
            written = [each.task for each in curriculum.pool.records if each.task.origin == "generated"]
            curriculum.pool.close()
            [((_, role, _), row)] = models.usage.rows.items()
    assert written
    assert (role, row.failures) == ("task generator", 0)
    assert any("Candidates:" in request.prompt for request in server.requests)
