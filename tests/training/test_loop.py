"""The loop on a very small model: what a run leaves, how it goes on, and when it stops."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from dreamgym.config import Config
from dreamgym.data.trajectories import read_trajectories
from dreamgym.errors import (
    ConfigError,
    EpisodeFailedError,
    RolloutsFailingError,
    StoreError,
    TrainingCollapsedError,
)
from dreamgym.models.local.language_model import LocalLanguageModel
from dreamgym.replay.buffer import ReplayBuffer
from dreamgym.training.agent import Agent
from dreamgym.training.metrics import Row, read_metrics
from dreamgym.training.progress import Progress
from dreamgym.training.run_dir import RunDir, read_config
from dreamgym.training.sim_to_real import sim_to_real
from dreamgym.training.trainer import train
from dreamgym.types import (
    CompletionRequest,
    FailureKind,
    Outcome,
    Prediction,
    State,
    Task,
    Transition,
    WorldSheet,
)
from tests.killable import started
from tests.training.training_run import FACTORY, CorridorDream, in_a_process, record, run, settings

DREAM = "train.mode=dream"


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the recorded corridors are, and every run of them."""
    home = tmp_path_factory.mktemp("training")
    asyncio.run(record(home / "offline"))
    return home


@pytest.fixture
def folder(home: Path) -> Path:
    made = home / f"test-{len(list(home.iterdir()))}"
    made.mkdir()
    return made


async def begun(folder: Path) -> Path:
    """The folder of a run whose warm start is behind it: made once, copied from then on."""
    template = folder.parent / "begun"
    if not template.exists():
        await run(settings(template, DREAM, "train.steps=0"))
    for part in ("base", "policies"):
        shutil.copytree(template / "run" / part, folder / "run" / part)
    return folder / "run"


async def never_stopped(folder: Path, *words: str) -> Path:
    """The same run without interruption, made once."""
    whole = folder.parent / f"whole {' '.join(words)}"
    if not whole.exists():
        if "seed=1" not in words:
            await begun(whole)
        await run(settings(whole, *words))
    return whole / "run"


def learnt(out: Path, step: int) -> dict[str, torch.Tensor]:
    return RunDir(out).policy_weights(step)


def practised(out: Path) -> list[Row]:
    """The metrics of the steps, without what the clock or a server decides."""
    rows = read_metrics(out / "metrics.jsonl", "train")
    for row in rows:
        row["spent"] = {name: n for name, n in row["spent"].items() if not name.endswith("seconds")}
        row["learner"].pop("seconds")
        row.pop("sampling_gap", None)
    return rows


def remembered(out: Path) -> set[tuple[str, int]]:
    with ReplayBuffer.open(out / "replay.sqlite") as buffer:
        return {(holding.environment, holding.rows) for holding in buffer.stats().holdings}


def same_end(one: Path, other: Path, step: int) -> None:
    """Both runs have learnt the same to the bit, in the same steps, and remember as much."""
    mine, theirs = learnt(one, step), learnt(other, step)
    assert mine.keys() == theirs.keys()
    assert all(torch.equal(mine[name], theirs[name]) for name in mine)
    rows = practised(one)
    assert rows == practised(other)
    assert any(row["learner"]["updates"] for row in rows), "nothing was learnt, so nothing was compared"
    assert remembered(one) == remembered(other)


async def test_a_run_leaves_metrics_policies_trajectories_and_a_model_that_others_can_open(
    folder: Path,
) -> None:
    summary = await run(settings(folder))
    out = folder / "run"
    assert (summary["steps"], summary["ended"], summary["policies"]) == (4, "4 steps are done", [0, 2, 4])
    assert json.loads((out / "summary.json").read_text(encoding="utf-8")) == summary
    rows = read_metrics(out / "metrics.jsonl")
    assert [row["step"] for row in rows if row["kind"] == "train"] == [0, 1, 2, 3]
    assert [row["step"] for row in rows if row["kind"] == "warm start"][-1] == 60
    steps = [row["turns"] for row in rows if row["kind"] == "train"]
    assert summary["spent"]["real_steps"] == sum(steps)
    kept = list(read_trajectories(out / "trajectories"))
    assert len(kept) == 4 * 4, "one group of four per step"
    assert {each.provenance.source for each in kept} == {"real"}
    model = LocalLanguageModel.load(out / "policy")
    reported = await model.complete(CompletionRequest(prompt="task: Leave", max_tokens=2))
    await model.aclose()
    assert reported.token_ids
    assert not all(torch.equal(learnt(out, 0)[name], weight) for name, weight in learnt(out, 4).items())


async def test_practice_in_the_dream_takes_no_real_step_and_is_remembered_as_synthetic(folder: Path) -> None:
    await begun(folder)
    config = settings(folder, DREAM)
    summary = await train(config, experience_model=CorridorDream())
    assert summary["spent"]["synthetic_steps"] > 0
    assert not any("real" in name for name in summary["spent"])
    kept = list(read_trajectories(folder / "run" / "trajectories"))
    assert {each.provenance.source for each in kept} == {"synthetic"}
    assert all(each.sheet is not None for each in kept)
    with ReplayBuffer.open(folder / "run" / "replay.sqlite") as buffer:
        stats = buffer.stats()
    assert (stats.real, stats.synthetic) == (0, summary["spent"]["synthetic_steps"])


async def test_without_updates_of_the_replay_buffer_nothing_fresh_enters_it(folder: Path) -> None:
    await begun(folder)
    await train(settings(folder, DREAM, "train.update_replay_buffer=false"), experience_model=CorridorDream())
    assert remembered(folder / "run") == set()


class _Eastward(CorridorDream):
    """An episode succeeds if its first action is to go east."""

    async def predict(
        self, task: Task, sheet: WorldSheet, history: Sequence[Transition], state: State, action: str
    ) -> Prediction:
        won = action == "go east"
        outcome = Outcome(next_state=state, reward=float(won), terminated=True, success=won)
        return Prediction(outcome=outcome, sheet=sheet)


@pytest.mark.parametrize("algorithm", ["grpo", "ppo"])
async def test_a_policy_learns_what_the_dream_rewards(folder: Path, algorithm: str) -> None:
    """Two seeds pooled, so that one lucky start does not decide it."""
    words = (
        DREAM,
        "train.gate=off",
        f"learner.algorithm={algorithm}",
        "learner.learning_rate=0.002",
        "learner.epochs=2",
    )
    first, last = [], []
    for seed in (0, 1):
        place = folder.with_name(f"{folder.name} seed {seed}")
        await begun(place)
        config = settings(place, *words, "train.steps=12", "train.tasks_per_step=6", f"seed={seed}")
        await train(config, experience_model=_Eastward())
        success = [row["success"] for row in practised(place / "run")]
        first += success[:3]
        last += success[-3:]
    assert sum(last) / 6 > max(0.8, sum(first) / 6 + 0.1)


async def test_evaluations_in_reality_choose_the_policy_and_are_counted_apart(folder: Path) -> None:
    await begun(folder)
    config = settings(
        folder,
        *(DREAM, "train.evaluate_every=2", "train.evaluate_episodes=8"),
    )
    summary = await run(config)
    rows = read_metrics(folder / "run" / "metrics.jsonl", "evaluation")
    assert [row["step"] for row in rows] == [0, 2, 4]
    best = max(row["success"]["value"] for row in rows)
    first = next(row["step"] for row in rows if row["success"]["value"] == best)
    assert summary["policy"] == first == RunDir(folder / "run").selected_policy()
    assert summary["spent"]["evaluation_real_steps"] > 0
    assert "real_steps" not in summary["spent"]
    assert rows[-1]["gap"] is not None


def killed_at(folder: Path, words: tuple[str, ...], reached: Callable[[list[Row]], bool]) -> None:
    """A run in a process of its own, and kill -9 as soon as the metrics say that a point was reached."""
    metrics, errors = folder / "run" / "metrics.jsonl", folder / "errors"
    process = started(errors, in_a_process, folder, words)
    limit = time.monotonic() + 300
    try:
        while not (metrics.exists() and reached(read_metrics(metrics))):
            assert process.is_alive(), errors.read_text(encoding="utf-8")
            assert time.monotonic() < limit
            time.sleep(0.002)
    finally:
        process.kill()
        process.join()
    assert process.exitcode == -signal.SIGKILL


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "kills"),
    [((DREAM,), (-1, 1, 3)), (("learner.algorithm=ppo", "learner.kl_coef=0.01"), (2,))],
    ids=["dream", "ppo"],
)
async def test_a_run_that_was_killed_again_and_again_ends_like_one_never_stopped(
    folder: Path, words: tuple[str, ...], kills: Sequence[int]
) -> None:
    words = (*words, "train.steps=6")
    out = folder / "run" if min(kills) < 0 else await begun(folder)  # -1 is during the warm start
    for step in kills:
        killed_at(
            folder,
            words,
            lambda rows, step=step: any(  # type: ignore[misc]
                row["step"] >= step if row["kind"] == "train" else step < 0 for row in rows
            ),
        )
    summary = await run(settings(folder, *words))
    assert summary["steps"] == 6
    same_end(out, await never_stopped(folder, *words), 6)


@pytest.mark.parametrize("after", [1, *(pytest.param(n, marks=pytest.mark.exhaustive) for n in (2, 3))])
async def test_a_run_that_was_interrupted_between_checkpoints_keeps_its_steps_and_ends_the_same(
    folder: Path, after: int
) -> None:
    words = (DREAM, "train.checkpoint_every=2")
    await begun(folder)

    def stop(reported: Progress) -> None:
        if reported.stage == "train" and reported.done == after:
            current.cancel()

    current = asyncio.ensure_future(run(settings(folder, *words), on_progress=stop))
    with pytest.raises(asyncio.CancelledError):
        await current
    state = RunDir(folder / "run").load("checkpoint.pt")
    assert state is not None
    assert state["done"] == after
    await run(settings(folder, *words))
    same_end(folder / "run", await never_stopped(folder, *words), 4)


async def test_the_same_seed_gives_the_same_run_and_another_seed_another(folder: Path) -> None:
    first = await never_stopped(folder, DREAM)
    await run(settings(folder, DREAM))
    same_end(folder / "run", first, 4)
    other = await never_stopped(folder, DREAM, "seed=1")
    assert practised(other) != practised(first)


async def test_a_finished_run_resumes_when_more_steps_are_asked_for(folder: Path) -> None:
    await begun(folder)
    for steps in (2, 4):
        assert (await run(settings(folder, DREAM, f"train.steps={steps}")))["steps"] == steps
    same_end(folder / "run", await never_stopped(folder, DREAM), 4)


async def test_a_folder_that_was_begun_with_other_settings_is_refused(folder: Path) -> None:
    RunDir.open(settings(folder, DREAM)).close()
    with pytest.raises(ConfigError, match=r"was started with learner.kl_coef=0.0, got 0.5"):
        await run(settings(folder, DREAM, "learner.kl_coef=0.5"))


async def test_a_run_that_was_moved_with_its_data_resumes(tmp_path: Path) -> None:
    await record(tmp_path / "before" / "offline")
    words = (DREAM, "train.warm_start_steps=0")
    await run(settings(tmp_path / "before" / "test", *words, "train.steps=1"))
    moved = (tmp_path / "before").rename(tmp_path / "after")
    assert (await run(settings(moved / "test", *words, "train.steps=2")))["steps"] == 2


async def test_two_processes_cannot_have_one_folder(folder: Path) -> None:
    held = RunDir.open(settings(folder))
    try:
        with pytest.raises(StoreError, match="another process is writing here"):
            await run(settings(folder))
    finally:
        held.close()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((DREAM, "agent.enforce_actions=true"), "which the dream does not have"),
        ((DREAM, "train.tasks_from=environment"), "needs train.mode=real"),
        ((DREAM, "train.real_steps=5"), "needs train.mode=real"),
        ((DREAM, "train.reward=sheet"), "sheet where the environment can check a goal"),
        ((DREAM, "train.start_states=recombined"), "no check that a task can succeed"),
        ((DREAM, "train.start_states=imagined"), "only a black box"),
        (("train.split=tran",), "to take tasks from"),
        (("agent.adapter=lora",), "adapts pretrained weights"),
        (("agent.model=huge",), "unknown preset 'huge'"),
        (
            ("agent.thought=true", "agent.enforce_actions=true"),
            "expected agent.thought or agent.enforce",
        ),
        (('train.data=["builtin:alfwrld"]',), "unknown dataset"),
    ],
)
async def test_settings_that_cannot_work_are_named_before_anything_is_learnt(
    folder: Path, words: tuple[str, ...], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        await run(settings(folder, *words))
    assert not (folder / "run" / "config.json").exists(), "it would refuse the right settings"


async def test_a_refused_run_removes_nothing_that_was_there_before(folder: Path) -> None:
    mine = folder / "run" / "replay.sqlite"  # as in the directory of an experience model
    mine.parent.mkdir()
    ReplayBuffer.open(mine, embedder="lexical").close()
    with pytest.raises(ConfigError, match="no check that a task can succeed"):
        await run(settings(folder, DREAM, "train.start_states=recombined"))
    assert mine.exists()


async def test_a_run_that_earns_nothing_is_warned_of_then_stopped_and_can_be_resumed(
    folder: Path,
) -> None:
    words = ("train.warm_start_steps=0", "train.steps=6", "train.monitor_patience=2")
    warned: list[tuple[int, str]] = []

    def listen(reported: Progress) -> None:
        warned.extend((reported.done, warning) for warning in reported.warnings)

    with pytest.raises(TrainingCollapsedError, match="no reward at all for 4 steps"):
        await run(settings(folder, *words), on_progress=listen)
    assert [done for done, warning in warned if warning.startswith("no reward")] == [2]
    assert (await run(settings(folder, *words, "train.monitors=warn")))["steps"] == 6


async def test_a_policy_is_carried_on_in_reality_until_its_real_steps_are_used(folder: Path) -> None:
    dream_run = await begun(folder)
    await run(settings(folder, DREAM, "train.steps=2"))
    config = sim_to_real(str(dream_run), real_steps=60, out=folder / "real")
    assert (config.train.mode, config.agent, config.train.group_size) == ("real", settings(folder).agent, 4)
    summary = await run(config)
    began = learnt(folder / "real", 0)
    assert all(torch.equal(began[name], weight) for name, weight in learnt(dream_run, 2).items())
    assert summary["real_steps"] == summary["spent"]["real_steps"] == 60
    assert summary["ended"].endswith("real steps are used")
    assert not read_metrics(folder / "real" / "metrics.jsonl", "warm start")
    other = sim_to_real(str(dream_run), None, ["agent.history=3"], real_steps=60, out=folder / "other")
    with pytest.raises(ConfigError, match="other agent settings"):
        await run(other)


async def test_the_first_step_too_keeps_to_the_budget_of_real_steps(folder: Path) -> None:
    await begun(folder)
    words = ("train.real_steps=20", "train.tasks_per_step=8", "train.steps=50", "train.monitors=off")
    spent = (await run(settings(folder, *words)))["spent"]["real_steps"]
    assert spent == 20, "no step more, although a rollout group may take 24"
    assert isinstance(spent, int)


async def test_a_run_whose_every_rollout_fails_is_an_error(folder: Path) -> None:
    await begun(folder)
    words = (DREAM, "train.tasks_per_step=1", "train.steps=2", "train.retries=0", "train.monitors=off")
    with pytest.raises(RolloutsFailingError, match=r"every rollout of 2 steps failed.*connection failed"):
        await train(settings(folder, *words), experience_model=_Dead())


async def test_a_policy_survives_moving_its_run_and_losing_the_model_that_it_started_from(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await begun(folder)
    source = folder / "source"
    await run(settings(folder, "train.steps=0"))
    (folder / "run" / "policy").rename(source)
    monkeypatch.chdir(folder)
    words = ("agent.model=hf:source", "train.warm_start_steps=2", "train.steps=1")
    await run(settings(folder / "second", *words, *_offline(folder)))
    assert read_config(folder / "second" / "run").agent.model == f"hf:{source}"
    (folder / "second" / "run").rename(folder / "moved")
    source.rename(folder / "gone")
    monkeypatch.chdir("/")
    async with Agent.load(str(folder / "moved")) as agent:
        assert agent.name == f"{folder / 'moved'}@1"


class _Dead(CorridorDream):
    """A server that is gone."""

    async def predict(self, *arguments: Any, **settings: Any) -> Prediction:
        raise EpisodeFailedError(FailureKind.SERVER_DOWN, "connection failed")


async def test_a_dead_experience_model_stops_the_run_with_its_reason_and_a_live_one_resumes(
    folder: Path,
) -> None:
    await begun(folder)
    config = settings(
        folder, DREAM, "train.failure_pause_seconds=0.01", "train.retries=0", "train.tasks_per_step=8"
    )
    with pytest.raises(RolloutsFailingError, match=r"rollout groups failed.*server_down.*connection failed"):
        await train(config, experience_model=_Dead())
    assert (await run(config))["steps"] == 4


@pytest.mark.slow
async def test_a_full_disk_ends_in_a_clear_message_and_the_run_resumes_when_there_is_room(
    folder: Path,
) -> None:
    await begun(folder)
    words = (DREAM,)
    cramped = started(folder / "errors", in_a_process, folder, words, 300_000)
    cramped.join(timeout=1200)
    reported = (folder / "errors").read_text(encoding="utf-8")
    assert cramped.exitcode == 1, reported
    assert re.search(r"StoreError: .*\.pt: cannot write: .*; free some space and run again", reported), (
        reported
    )
    assert (await run(settings(folder, *words)))["steps"] == 4


async def test_pretrained_weights_practise_by_lora_and_leave_a_plain_model(folder: Path) -> None:
    base = await begun(folder) / "base"
    words = (DREAM, f'agent.model="hf:{base}"', "agent.adapter=lora", "train.steps=2")
    await run(settings(folder / "lora", *words, "train.warm_start_steps=3", *_offline(folder)))
    out = folder / "lora" / "run"
    assert all("lora" in name for name in learnt(out, 2))
    assert not (out / "base").exists()
    assert not list((out / "policy").glob("adapter*"))
    model = LocalLanguageModel.load(out / "policy")
    assert (await model.complete(CompletionRequest(prompt="task: Leave", max_tokens=2))).token_ids
    await model.aclose()
    async with Agent.load(str(out)) as agent:
        assert agent.name == f"{out}@2"
        assert all(torch.equal(agent.weights()[key], weight) for key, weight in learnt(out, 2).items())


def _offline(folder: Path) -> list[str]:
    return [f'train.data=["{folder.parent / "offline"}"]']


async def test_tasks_may_come_from_the_real_environment(folder: Path) -> None:
    await begun(folder)
    config = settings(folder, "train.tasks_from=environment", "train.num_tasks=3", "train.steps=2")
    await run(config)
    kept = {each.task.id for each in read_trajectories(folder / "run" / "trajectories")}
    assert kept <= {task.id for task in await FACTORY.tasks("train", 3)}


def test_settings_of_a_run_are_read_back_as_they_were(tmp_path: Path) -> None:
    config: Config = settings(tmp_path)
    RunDir.open(config).close()

    assert read_config(tmp_path / "run") == config
