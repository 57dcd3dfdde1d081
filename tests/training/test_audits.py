"""Audits during practice: imagined episodes replayed in reality, counted, remembered and learnt from."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from dreamgym.config import Config
from dreamgym.data.trajectories import read_trajectories
from dreamgym.envs.wrappers import FactoryWrapper
from dreamgym.errors import ConfigError, DreamExploitedError
from dreamgym.experience.annotate import PlainAnnotator
from dreamgym.protocols import Environment
from dreamgym.replay.buffer import ReplayBuffer
from dreamgym.training.audits import LOG, AuditLog, Audits
from dreamgym.training.experience import fine_tune
from dreamgym.training.experience_loading import OWN_BUFFER, load_experience_model
from dreamgym.training.experience_run import ExperienceRun
from dreamgym.training.experience_update import UPDATES, VERSIONS, ExperienceUpdater
from dreamgym.training.metrics import read_metrics
from dreamgym.training.run_dir import METRICS, RunDir
from dreamgym.training.settings_check import check
from dreamgym.training.trainer import train
from dreamgym.types import Outcome, Prediction, RolloutGroup, State, Task, Trajectory, Transition, WorldSheet
from tests.training.training_run import FACTORY, CorridorDream, record, settings

SHORT = (
    *("train.mode=dream", "train.gate=off", "train.monitors=off", "train.warm_start_steps=80"),
    *("train.steps=4", "train.tasks_per_step=4", "train.audit_every=2", "train.audit_steps=30"),
)


@pytest.fixture
async def folder(tmp_path: Path) -> Path:
    await record(tmp_path / "offline")
    return tmp_path / "runs"


class Eastward(CorridorDream):
    """Every step to the east is a success, which is never true."""

    async def predict(
        self, task: Task, sheet: WorldSheet, history: Sequence[Transition], state: State, action: str
    ) -> Prediction:
        found = await super().predict(task, sheet, history, state, action)
        if action != "go east":
            return found
        won = Outcome(next_state=State(text="You are out."), reward=1.0, terminated=True, success=True)
        return replace(found, outcome=won)


def audits_of(folder: Path) -> list[dict[str, Any]]:
    return read_metrics(folder / "run" / METRICS, "audit")


async def test_a_lying_dream_is_found_out_and_what_really_happened_is_remembered(folder: Path) -> None:
    summary = await train(settings(folder, *SHORT), real=FACTORY, experience_model=Eastward())
    rows = audits_of(folder)
    assert [row["step"] for row in rows] == [2, 4]
    for row in rows:
        assert row["successes"]["value"] < 1, "a step to the east is none"
        assert set(row["departures"]) <= {"go east", "go …"}
        assert row["departures"]
        assert 0 < row["real_steps"] <= 30
        assert row["experience_model"] == {}, "an object has no weights to update"
    spent = sum(row["real_steps"] for row in rows)
    assert summary["real_steps"] == summary["spent"]["real_steps"] == spent
    with ReplayBuffer.open(folder / "run" / "replay.sqlite", read_only=True) as buffer:
        assert buffer.stats().real == sum(row["transitions"] for row in rows)


async def test_in_a_faithful_dream_every_success_is_real(folder: Path) -> None:
    summary = await train(settings(folder, *SHORT), real=FACTORY, experience_model=CorridorDream())
    for row in audits_of(folder):
        assert row["successes"]["value"] in (1.0, None)
        assert row["faithful"]["value"] == 1.0
        assert row["departures"] == {}
    assert summary["real_steps"] > 0


async def test_audits_never_exceed_the_budget_and_practice_goes_on_without_them(folder: Path) -> None:
    words = (*SHORT, "train.audit_every=1", "train.real_steps=40")
    summary = await train(settings(folder, *words), real=FACTORY, experience_model=CorridorDream())
    assert summary["steps"] == 4
    assert 30 <= summary["real_steps"] <= 40


class Dying(FactoryWrapper):
    """Counts real steps, and dies once in the middle of an episode."""

    def __init__(self, after: int) -> None:
        super().__init__(FACTORY)
        self.after, self.steps = after, 0

    def make(self, task: Task, *, seed: int = 0) -> Environment:
        inner, outer = super().make(task, seed=seed), self
        step = inner.step

        async def counted(action: str) -> Outcome:
            outer.steps += 1
            if outer.steps == outer.after:
                raise RuntimeError("the machine is switched off")
            return await step(action)

        inner.step = counted  # type: ignore[method-assign]
        return inner


@pytest.mark.parametrize("after", [1, 9])
async def test_an_interrupted_audit_is_finished_later_and_no_real_step_is_lost_or_counted_twice(
    folder: Path, after: int
) -> None:
    whole = settings(folder.with_name("whole"), *SHORT)
    await train(whole, real=FACTORY, experience_model=Eastward())
    real = Dying(after)
    with pytest.raises(RuntimeError, match="switched off"):
        await train(settings(folder, *SHORT), real=real, experience_model=Eastward())
    taken = real.steps
    summary = await train(settings(folder, *SHORT), real=real, experience_model=Eastward())
    expected = sum(row["transitions"] for row in audits_of(whole.train.out.parent))
    played = sum(row["transitions"] for row in audits_of(folder))
    assert played >= expected - 30, "the interrupted audit found what was left"
    assert real.steps <= summary["real_steps"] <= real.steps + 30, (
        "interrupted episodes count at their longest"
    )
    assert taken <= summary["real_steps"]
    ids = [json.loads(line)["episode"] for line in _ends(folder / "run" / LOG)]
    assert len(ids) == len(set(ids)), "no episode was played to its end twice"
    successes = [row["success"] for row in read_metrics(folder / "run" / METRICS, "train")]
    others = [row["success"] for row in read_metrics(whole.train.out / METRICS, "train")]
    assert successes == others


def _ends(path: Path) -> list[str]:
    return [line for line in path.read_text().splitlines() if '"reserved"' not in line]


def test_settings_that_cannot_work_are_named(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"train\.audit_every audits a dream"):
        check(settings(folder, "train.audit_every=1"))
    with pytest.raises(ConfigError, match=r"train\.real_steps needs train\.mode=real or train\.audit_every"):
        check(settings(folder, "train.mode=dream", "train.real_steps=5"), has_experience_model=True)


# --- fine-tuning on what really happened ---


def contents(folder: Path) -> dict[str, str]:
    """Without the extra files of an open database."""
    files = (path for path in sorted(folder.rglob("*")) if path.is_file() and "sqlite-" not in path.name)
    return {str(path): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


async def test_the_experience_model_learns_from_an_audit_and_its_run_stays_as_it_was(tmp_path: Path) -> None:
    await record(tmp_path / "offline")
    recorded = list(read_trajectories(tmp_path / "offline"))
    home = tmp_path / "experience"
    config = Config.model_validate(
        {
            "environment": {"name": "corridor"},
            "experience": {"model": "nano", "steps": 60, "batch": 8, "vocabulary": 400, "validation": 0.2},
        }
    )
    await fine_tune(config, recorded, PlainAnnotator(), home)
    before = contents(home)
    dreamt = [_wrong(each, number) for number, each in enumerate(recorded)]
    groups = [RolloutGroup(task=each.task, trajectories=(each,)) for each in dreamt]
    run_dir = RunDir(tmp_path / "run")
    with ReplayBuffer.open(home / OWN_BUFFER, read_only=True) as buffer:
        loaded = load_experience_model(home, retriever=buffer, cached_replies=100)
        model: Any = loaded.model
        updater = ExperienceUpdater(
            model, ExperienceRun.read(home), PlainAnnotator(), buffer, recorded, run_dir
        )
        weights = {name: w.detach().clone() for name, w in model.language_model.model.named_parameters()}
        audits = Audits(
            FACTORY, AuditLog(run_dir.path / LOG), every=1, steps=100, recorded=recorded, updater=updater
        )
        row = await audits.run(1, groups, None)
        learnt = dict(model.language_model.model.named_parameters())
        assert row["experience_model"]["updates"] == UPDATES
        assert row["experience_model"]["kept"], row["experience_model"]
        assert any(not torch.equal(learnt[name], old) for name, old in weights.items())
        again: Any = load_experience_model(home, retriever=buffer).model
        other = ExperienceUpdater(
            again, ExperienceRun.read(home), PlainAnnotator(), buffer, recorded, run_dir
        )
        resumed = Audits(FACTORY, AuditLog(run_dir.path / "other.jsonl"), every=1, steps=100, updater=other)
        resumed.load_state_dict(audits.state_dict())
        restored = dict(again.language_model.model.named_parameters())
        assert all(torch.equal(restored[name], weight) for name, weight in learnt.items())
        await model.language_model.aclose()
        await again.language_model.aclose()
    assert [file.name for file in (run_dir.path / VERSIONS).iterdir()] == ["000001.pt"]
    assert contents(home) == before


def _wrong(recorded: Trajectory, number: int) -> Trajectory:
    """A dream that goes wrong at its first step."""
    turn = recorded.transitions[0]
    invented = replace(turn.outcome, next_state=State(text="You are on the moon."))
    first = replace(turn, outcome=invented)
    return replace(recorded, id=f"dream-{number}", transitions=(first, *recorded.transitions[1:]))


# --- a dream that is exploited ---


class Tempting(CorridorDream):
    """Success for every step to the east, without support."""

    async def predict(
        self, task: Task, sheet: WorldSheet, history: Sequence[Transition], state: State, action: str
    ) -> Prediction:
        won = action == "go east"
        outcome = Outcome(
            next_state=State(text="You are elsewhere."),
            reward=float(won),
            terminated=True,
            success=won,
            info={"supported": not won},
        )
        return Prediction(outcome=outcome, sheet=sheet)


async def test_an_exploited_dream_stops_the_run_and_the_policy_before_it_is_selected(folder: Path) -> None:
    words = (
        *("train.mode=dream", "train.gate=off", "train.warm_start_steps=80", "train.steps=40"),
        *("train.tasks_per_step=4", "train.monitor_patience=2", "train.save_policy_every=1"),
        *("learner.learning_rate=0.003", "learner.epochs=2"),
    )
    with pytest.raises(DreamExploitedError, match="stands for its policy of step") as stopped:
        await train(settings(folder, *words), experience_model=Tempting())
    summary = json.loads((folder / "run" / "summary.json").read_text())
    since = stopped.value.since
    assert summary["stopped"] == {"reason": "exploited", "since": since}
    assert summary["policy"] == since < summary["steps"] < 40
    assert summary["policy"] in summary["policies"]
    assert RunDir(folder / "run").selected_policy() == since
    rows = read_metrics(folder / "run" / METRICS, "train")
    assert all(row["supported_success"] == 0.0 for row in rows)
