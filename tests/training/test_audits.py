"""Audits during practice: imagined episodes replayed in reality, counted, remembered and learnt from."""

from __future__ import annotations

import asyncio
import functools
import hashlib
import json
import shutil
import string
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from dreamgym.config import Config
from dreamgym.data.trajectories import read_trajectories
from dreamgym.envs.wrappers import FactoryWrapper
from dreamgym.errors import ConfigError, DreamExploitedError
from dreamgym.experience.annotate import PlainAnnotator
from dreamgym.models.tiny import make_model, make_tokenizer
from dreamgym.protocols import Environment
from dreamgym.replay.buffer import ReplayBuffer
from dreamgym.training.audits import LOG, AuditLog, Audits, replay
from dreamgym.training.experience import fine_tune
from dreamgym.training.experience_loading import OWN_BUFFER, load_experience_model
from dreamgym.training.experience_run import ExperienceRun
from dreamgym.training.experience_update import FORGOTTEN, UPDATES, ExperienceUpdater
from dreamgym.training.experience_versions import VERSIONS, ExperienceVersions
from dreamgym.training.metrics import read_metrics
from dreamgym.training.run_dir import METRICS, RunDir
from dreamgym.training.settings_check import check
from dreamgym.training.trainer import train
from dreamgym.types import Outcome, Prediction, RolloutGroup, State, Task, Trajectory, Transition, WorldSheet
from tests.training.training_run import FACTORY, CorridorDream, record, run, settings

SHORT = (
    *("train.mode=dream", "train.gate=off", "train.monitors=off", "train.warm_start_steps=60"),
    *("train.steps=4", "train.tasks_per_step=4", "train.audit_every=2", "train.audit_steps=30"),
)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Recorded corridors, and a run whose warm start is behind it."""
    home = tmp_path_factory.mktemp("audits")
    asyncio.run(record(home / "offline"))
    asyncio.run(run(settings(home / "begun", *SHORT, "train.steps=0")))
    return home


@pytest.fixture
def folder(home: Path, request: pytest.FixtureRequest) -> Path:
    return begun(home / f"{request.node.name}")


def begun(folder: Path) -> Path:
    for part in ("base", "policies"):
        shutil.copytree(folder.parent / "begun" / "run" / part, folder / "run" / part)
    return folder


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


@pytest.mark.parametrize("after", [pytest.param(1, marks=pytest.mark.exhaustive), 9])
async def test_an_interrupted_audit_is_finished_later_and_no_real_step_is_lost_or_counted_twice(
    folder: Path, after: int
) -> None:
    whole = settings(folder.with_name("whole"), *SHORT)
    if not whole.train.out.exists():
        begun(whole.train.out.parent)
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


@dataclass
class Audited:
    """A fine-tuned experience model of corridors, and the run directory of an agent that trains in it."""

    home: Path
    recorded: list[Trajectory]
    run_dir: RunDir

    @asynccontextmanager
    async def opened(self) -> AsyncIterator[tuple[Any, Audits]]:
        """As a run begins or resumes: the language model behind the experience model, and its audits."""
        with ReplayBuffer.open(self.home / OWN_BUFFER, read_only=True) as buffer:
            model: Any = load_experience_model(self.home, retriever=buffer, cached_replies=100).model
            versions = ExperienceVersions(model, ExperienceRun.read(self.home), self.run_dir)
            updater = ExperienceUpdater(versions, PlainAnnotator(), buffer, self.recorded)
            log = AuditLog(self.run_dir.path / LOG)
            yield (
                model.language_model,
                Audits(
                    functools.partial(replay, FACTORY),
                    log,
                    every=1,
                    steps=100,
                    recorded=self.recorded,
                    updater=updater,
                ),
            )
            log.close()
            await model.language_model.aclose()

    async def audit(self, audits: Audits, step: int) -> dict[str, Any]:
        dreamt = [_wrong(each, number) for number, each in enumerate(self.recorded)]
        groups = [RolloutGroup(task=each.task, trajectories=(each,)) for each in dreamt]
        row = await audits.run(step, groups, None)
        found: dict[str, Any] = row["experience_model"]
        return found


@pytest.fixture
def case(fine_tuned: Path, home: Path, tmp_path: Path) -> Audited:
    """Of one experience model for several tests: an audit changes nothing in its directory."""
    return Audited(fine_tuned, list(read_trajectories(home / "offline")), RunDir(tmp_path / "run"))


@pytest.fixture(scope="module")
def fine_tuned(home: Path) -> Path:
    return asyncio.run(audited(home)).home


async def audited(folder: Path, **experience: Any) -> Audited:
    if not (folder / "offline").exists():
        await record(folder / "offline")
    recorded = list(read_trajectories(folder / "offline"))
    chosen = {"model": "nano", "steps": 60, "batch": 8, "vocabulary": 400, "validation": 0.2} | experience
    config = Config.model_validate({"environment": {"name": "corridor"}, "experience": chosen})
    await fine_tune(config, recorded, PlainAnnotator(), folder / "experience")
    return Audited(folder / "experience", recorded, RunDir(folder / "run"))


def weights(model: Any) -> dict[str, torch.Tensor]:
    return {name: weight.detach().clone() for name, weight in model.model.named_parameters()}


def same(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> bool:
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


async def test_the_experience_model_learns_from_an_audit_and_its_run_stays_as_it_was(case: Audited) -> None:
    before = contents(case.home)
    async with case.opened() as (model, audits):
        original = weights(model)
        found = await case.audit(audits, 1)
        assert found["updates"] == UPDATES
        assert found["kept"], found
        learnt, state = weights(model), audits.state_dict()
        assert not same(learnt, original)
    async with case.opened() as (model, audits):
        assert same(weights(model), original)
        audits.load_state_dict(state)
        assert same(weights(model), learnt)
    versions = sorted(file.name for file in (case.run_dir.path / VERSIONS).iterdir())
    assert versions == ["000001.pt", "original.json"]
    assert contents(case.home) == before


async def test_an_update_is_compared_with_the_original_version_also_after_a_resume(case: Audited) -> None:
    async with case.opened() as (model, audits):
        first = await case.audit(audits, 1)
        assert first["agreement_before"] == first["agreement_original"] > 0
        assert first["agreement_after"] >= first["agreement_original"] - FORGOTTEN
    async with case.opened() as (model, audits):
        with torch.no_grad():  # a version that has forgotten nearly everything, in many small losses
            for weight in model.model.parameters():
                weight.add_(0.5 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(0)))
        worse = weights(model)
        second = await case.audit(audits, 2)
        assert second["agreement_original"] == first["agreement_original"]
        assert second["agreement_before"] < second["agreement_original"] - FORGOTTEN
        assert not second["kept"], "it is not worse than the version before, but far worse than the original"
        assert same(weights(model), worse), "the weights before the update are served again"
    assert not (case.run_dir.path / VERSIONS / "000002.pt").exists()


async def test_of_a_model_with_an_adapter_audits_update_the_adapter_alone(tmp_path: Path) -> None:
    await record(tmp_path / "offline")
    texts = [turn.state.text for each in read_trajectories(tmp_path / "offline") for turn in each.transitions]
    tokenizer = make_tokenizer([*texts, *string.printable], vocab_size=400)
    base = tmp_path / "base"
    make_model("nano", tokenizer, family="llama").save_pretrained(base)
    tokenizer.save_pretrained(base)
    case = await audited(tmp_path / "lora", model=f"hf:{base}", adapter="lora", lora_rank=2, steps=5)
    async with case.opened() as (model, audits):
        original = weights(model)
        found = await case.audit(audits, 1)
        assert found["kept"], found
        learnt, state = weights(model), audits.state_dict()
        changed = {name for name in learnt if not torch.equal(learnt[name], original[name])}
        assert changed
        assert all("lora_" in name for name in changed)
    stored = torch.load(case.run_dir.path / VERSIONS / "000001.pt", weights_only=True)["weights"]
    assert all("lora_" in name for name in stored)
    async with case.opened() as (model, audits):
        audits.load_state_dict(state)
        assert same(weights(model), learnt)


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
        *("train.mode=dream", "train.gate=off", "train.warm_start_steps=60", "train.steps=40"),
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
