"""Training on worker processes: equal to one process to the bit, also when workers die."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from dreamgym.config import Config
from dreamgym.errors import BudgetSpentError, ConfigError
from dreamgym.evaluation.evaluate import Evaluation
from dreamgym.evaluation.runs import evaluate_runs
from dreamgym.training.metrics import read_metrics
from dreamgym.training.progress import Progress
from dreamgym.training.trainer import train
from dreamgym.types import Prediction, State, Task, Transition, WorldSheet
from tests.killable import started
from tests.processes import with_word
from tests.training.test_loop import same_end
from tests.training.training_run import FACTORY, CorridorDream, record, run, settings

DREAM = "train.mode=dream"
STEPS = 4
FEW = (f"train.steps={STEPS}", "train.save_policy_every=1")


class SlowDream(CorridorDream):
    """Takes its time, so that a worker can be stopped in the middle of a step."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    async def predict(
        self, task: Task, sheet: WorldSheet, history: Sequence[Transition], state: State, action: str
    ) -> Prediction:
        await asyncio.sleep(self.seconds)
        return await super().predict(task, sheet, history, state, action)


class SpentDream(CorridorDream):
    """Has no budget left after a few predictions."""

    left = 20

    async def predict(
        self, task: Task, sheet: WorldSheet, history: Sequence[Transition], state: State, action: str
    ) -> Prediction:
        self.left -= 1
        if self.left < 0:
            raise BudgetSpentError("the budget of 20 requests is used")
        return await super().predict(task, sheet, history, state, action)


class StuckDream(CorridorDream):
    """One prediction never ends, in whichever worker is first."""

    def __init__(self, once: Path) -> None:
        self.once = once

    async def predict(
        self, task: Task, sheet: WorldSheet, history: Sequence[Transition], state: State, action: str
    ) -> Prediction:
        if self.once.exists():
            self.once.unlink()
            await asyncio.sleep(3600)
        return await super().predict(task, sheet, history, state, action)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Recorded corridors, and undisturbed runs of one process to compare with."""
    home = tmp_path_factory.mktemp("workers")
    asyncio.run(record(home / "offline"))
    asyncio.run(run(settings(home / "dream", DREAM, *FEW)))
    return home


def begun(home: Path, name: str) -> Path:
    """A folder whose run has its warm start behind it."""
    folder = home / name
    for part in ("base", "policies/000000.pt"):
        source, target = home / "dream" / "run" / part, folder / "run" / part
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copytree(source, target) if source.is_dir() else shutil.copy(source, target)
    return folder


async def played(config: Config, seconds: float = 0.0) -> None:
    await train(config, real=FACTORY, experience_model=SlowDream(seconds))


async def when(worker: int, begun: asyncio.Event, does: Callable[[psutil.Process], None]) -> None:
    """Do this to a worker in the middle of the second step."""
    await begun.wait()
    await asyncio.sleep(0.15)
    does(workers_of(os.getpid())[worker])


def workers_of(pid: int) -> list[psutil.Process]:
    """The processes below the one that forks workers."""
    found = with_word(psutil.Process(pid).children(recursive=True), "dreamgym.distributed.worker_process")
    known = {process.pid for process in found}
    workers = list[psutil.Process]()
    for process in found:
        with contextlib.suppress(psutil.NoSuchProcess):
            if process.ppid() in known:
                workers.append(process)
    return workers


async def no_worker_is_left() -> None:
    """A killed process needs a moment to end on a busy machine."""
    async with asyncio.timeout(300):
        while workers_of(os.getpid()):  # noqa: ASYNC110
            await asyncio.sleep(0.05)


@pytest.mark.parametrize("mode", ["dream", "real"])
async def test_two_workers_learn_what_one_process_learns_to_the_bit(home: Path, mode: str) -> None:
    whole = home / mode
    if mode == "real":
        await run(settings(begun(home, mode), *FEW))
    folder = begun(home, f"{mode} on workers")
    await run(settings(folder, f"train.mode={mode}", *FEW, "train.workers=2"))
    same_end(whole / "run", folder / "run", STEPS)
    await no_worker_is_left()


@pytest.mark.parametrize("fault", ["killed", "frozen"])
async def test_a_run_ends_the_same_when_a_worker_is_lost_in_the_middle(home: Path, fault: str) -> None:
    folder = begun(home, fault)
    deadline = ["cluster.group_seconds=8"] if fault == "frozen" else []
    config = settings(folder, DREAM, *FEW, "train.workers=2", *deadline)
    warnings, first_done = list[str](), asyncio.Event()

    def on_progress(progress: Progress) -> None:
        warnings.extend(progress.warnings)
        if progress.row.get("kind") == "train":
            first_done.set()

    stop = psutil.Process.kill if fault == "killed" else psutil.Process.suspend
    async with asyncio.TaskGroup() as group:
        group.create_task(train(config, experience_model=SlowDream(0.1), on_progress=on_progress))
        group.create_task(when(1, first_done, stop))
    same_end(home / "dream" / "run", folder / "run", STEPS)
    assert any("was lost" in warning for warning in warnings)


async def test_a_late_group_is_dropped_and_counted_if_the_settings_say_so(home: Path) -> None:
    folder = begun(home, "late")
    (home / "once").touch()
    late = ("train.workers=2", "train.gate=off", "cluster.group_seconds=4", "cluster.late_groups=drop")
    await train(settings(folder, DREAM, *FEW, *late), experience_model=StuckDream(home / "once"))
    rows = read_metrics(folder / "run" / "metrics.jsonl", "train")
    assert len(rows) == STEPS
    [first] = [row for row in rows if row["dropped"]]
    assert (first["dropped"], first["groups"]) == ({"timeout": 1}, 1)
    assert "was not done on worker" in first["last_failure"]


async def test_a_run_resumes_on_another_number_of_workers(home: Path) -> None:
    folder = begun(home, "resumed")
    await run(settings(folder, DREAM, *FEW, "train.workers=2", "train.steps=1"))
    await run(settings(folder, DREAM, *FEW, "train.workers=1", "train.steps=2"))
    await run(settings(folder, DREAM, *FEW))
    same_end(home / "dream" / "run", folder / "run", STEPS)


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
async def test_a_stopped_driver_leaves_no_worker_and_its_run_resumes(home: Path, how: signal.Signals) -> None:
    folder = begun(home, f"driver {how.name}")
    out = folder / "run"
    driver = started(folder / "errors", _train_slowly, folder)
    try:
        deadline = time.monotonic() + 600
        while not (out / "metrics.jsonl").exists() or not read_metrics(out / "metrics.jsonl", "train"):
            assert driver.is_alive(), (folder / "errors").read_text()
            assert time.monotonic() < deadline
            await asyncio.sleep(0.02)
        assert driver.pid is not None
        found = workers_of(driver.pid)
        assert len(found) == 2
        os.kill(driver.pid, how)
        await asyncio.to_thread(driver.join, 300)
        assert not driver.is_alive()
    finally:
        driver.kill()
    gone, left = await asyncio.to_thread(psutil.wait_procs, found, 120)
    assert not left
    assert len(gone) == 2
    await run(settings(folder, DREAM, *FEW))
    same_end(home / "dream" / "run", out, STEPS)


def _train_slowly(folder: Path) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    asyncio.run(played(settings(folder, DREAM, *FEW, "train.workers=2"), 0.3))


STALE = ("train.workers=2", "train.max_staleness=1", "learner.old_logprobs=recorded")


async def test_rollouts_of_the_next_step_begin_before_the_update(home: Path) -> None:
    folder = begun(home, "stale")
    await run(settings(folder, DREAM, *FEW, *STALE))
    rows = read_metrics(folder / "run" / "metrics.jsonl", "train")
    assert [row["step"] for row in rows] == list(range(STEPS))
    updates = [row["learner"]["updates"] for row in rows]
    assert any(updates[:-1]), "no weights changed, so nothing could be stale"
    assert [row["staleness"] for row in rows] == [0, *updates[:-1]], (
        "by the update that they did not wait for"
    )
    await no_worker_is_left()


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ("train.workers=0", "set train.workers"),
        ("learner.old_logprobs=recomputed", "old_logprobs=recorded"),
        ("agent.temperature=0.7", "agent.temperature=1"),
        ("train.real_steps=1000", "real_steps"),
    ],
)
async def test_stale_rollouts_need_workers_and_the_log_probs_of_sampling(
    home: Path, changed: str, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        await run(settings(home / "refused", *FEW, *STALE, changed))


async def evaluated(folder: Path, workers: int, *words: str) -> Evaluation:
    """Nine real episodes of the run in this folder."""
    run = folder / "run"
    found = await evaluate_runs(
        *(settings(folder, *words), [str(run)]), split="test", episodes=9, factory=FACTORY, workers=workers
    )
    shutil.rmtree(run / "evaluations")
    return replace(found.evaluations[0], seconds=0.0)


async def test_workers_evaluate_as_one_process_does(home: Path, tmp_path: Path) -> None:
    shutil.copytree(home / "dream" / "run", tmp_path / "run")
    one = await evaluated(tmp_path, 0)
    assert one == await evaluated(tmp_path, 2)
    assert one.real_steps > 9
    assert len(one.episodes) == 9


async def test_an_error_in_a_worker_ends_the_run_as_it_would_in_one_process(home: Path) -> None:
    folder = begun(home, "spent")
    summary = await train(
        settings(folder, DREAM, *FEW, "train.workers=1", "train.gate=off"), experience_model=SpentDream()
    )
    assert "the budget of 20 requests is used" in summary["ended"]


async def test_an_object_that_exists_only_in_this_process_is_refused(home: Path) -> None:
    class Local(CorridorDream): ...

    with pytest.raises(ConfigError, match=r"workers are processes of their own.*train\.workers=0"):
        await train(settings(begun(home, "local"), DREAM, *FEW, "train.workers=1"), experience_model=Local())
