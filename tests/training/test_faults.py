"""What happens to a run when what it stands on breaks: really killed, really full, and gone on with."""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from dreamgym.config import Config, EndpointConfig, load_config
from dreamgym.data.datasets import builtin_dataset
from dreamgym.data.trajectories import TrajectoryWriter, read_trajectories
from dreamgym.errors import RolloutsFailingError
from dreamgym.experience.model import ReasoningExperienceModel
from dreamgym.experience.reply_format import PromptSettings
from dreamgym.models.endpoint.client import Endpoint, EndpointLanguageModel
from dreamgym.training.metrics import read_metrics
from dreamgym.training.progress import Progress
from dreamgym.training.run_dir import RunDir
from dreamgym.training.trainer import train
from tests.killable import started
from tests.processes import with_word
from tests.training import corridor_server, small_disk
from tests.training.training_run import record, run, settings

SHORT = ("train.mode=dream", "train.warm_start_steps=40", "train.checkpoint_every=3", "train.gate=off")


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Recorded corridors, and a run whose warm start is behind it."""
    home = tmp_path_factory.mktemp("faults")
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


def learnt(out: Path, step: int) -> dict[str, torch.Tensor]:
    return RunDir(out).policy_weights(step)


def same_weights(one: Path, other: Path, step: int) -> None:
    mine, theirs = learnt(one, step), learnt(other, step)
    assert all(torch.equal(mine[name], weight) for name, weight in theirs.items())
    start = learnt(one, 0)
    assert not all(torch.equal(start[name], weight) for name, weight in mine.items())


class Server:
    """The experience model's, which may be killed and started again at the same address."""

    def __init__(self, errors: Path) -> None:
        self._errors = errors
        self._start(0)

    def _start(self, port: int) -> None:
        found, report = multiprocessing.Pipe(duplex=False)
        self._process = started(self._errors, corridor_server.in_a_process, port, report)
        report.close()  # so that reading ends when the process does
        self.url: str = found.recv()

    def kill(self) -> None:
        """Also if it is gone already."""
        self._process.kill()
        self._process.join()

    def start_again(self) -> None:
        url = self.url
        self._start(int(url.rsplit(":", 1)[1]))
        assert self.url == url


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    server = Server(tmp_path / "errors")
    yield server
    server.kill()


async def train_in_dream(
    config: Config, server: Server, on_progress: Callable[[Progress], None] | None = None
) -> dict[str, Any]:
    quick = {"url": server.url, "model": "corridors", "kind": "completions", "max_attempts": 2}
    soon = {"backoff_seconds": 0.01, "deadline_seconds": 5.0}
    endpoint = Endpoint("dream", EndpointConfig.model_validate(quick | soon))
    model = ReasoningExperienceModel(
        EndpointLanguageModel(endpoint, role="experience"), name="served", settings=PromptSettings()
    )
    try:
        return await train(config, experience_model=model, on_progress=on_progress)
    finally:
        await endpoint.aclose()


@pytest.mark.slow
async def test_an_experience_model_whose_server_is_killed_stops_the_run_and_its_return_resumes(
    folder: Path, server: Server
) -> None:
    words = (*SHORT, "train.tasks_per_step=8", "train.retries=0", "train.failure_pause_seconds=0.01")

    def kill_after_two_steps(reported: Progress) -> None:
        if reported.stage == "train" and reported.done == 2:
            server.kill()

    with pytest.raises(
        RolloutsFailingError, match=r"rollout groups failed.*server_down.*then resume the run"
    ):
        await train_in_dream(settings(folder, *words), server, kill_after_two_steps)
    assert RunDir(folder / "run").load("checkpoint.pt")["done"] == 2  # type: ignore[index]
    server.start_again()
    assert (await train_in_dream(settings(folder, *words), server))["steps"] == 4
    whole = begun(folder.parent / "never stopped")
    await train_in_dream(settings(whole, *words), server)
    same_weights(folder / "run", whole / "run", 4)


def engines() -> list[psutil.Process]:
    """The processes of running episodes: children of the fork server. A database server that other tests
    have started is a child of this process too, and none of their business."""
    hosts = with_word(psutil.Process().children(), "dreamgym.envs.process_worker")
    return [engine for host in hosts for engine in host.children()]


async def killing(practising: asyncio.Event, limit: int | None) -> int:
    """Kills engines of episodes as soon as they are there, all of them or so many; until cancelled."""
    killed = set[int]()
    await practising.wait()
    while limit is None or len(killed) < limit:
        for engine in engines()[: None if limit is None else limit - len(killed)]:
            if engine.pid not in killed:
                engine.kill()
                killed.add(engine.pid)
        await asyncio.sleep(0.001)
    return len(killed)


def reported_by(practising: asyncio.Event) -> Callable[[Progress], None]:
    def report(reported: Progress) -> None:
        if reported.stage == "train":
            practising.set()

    return report


def household(folder: Path, *words: str) -> Config:
    """A few short episodes in the real ALFWorld engine."""
    data = folder / "data"
    if not data.exists():
        with TrajectoryWriter(data) as writer:
            writer.append(list(islice(read_trajectories(builtin_dataset()), 4)))
    return load_config(
        overrides=[
            *("environment.name=alfworld", "environment.options.horizon=2"),
            *("agent.model=nano", "agent.vocabulary=400", "agent.max_tokens=4", "agent.text_limit=100"),
            *("train.mode=real", "train.tasks_from=data"),
            *("train.tasks_per_step=2", "train.group_size=2", "train.steps=2", "train.warm_start_steps=0"),
            *("train.monitors=off", "train.failure_pause_seconds=0.01", f'train.data=["{data}"]'),
            f'train.out="{folder / "run"}"',
            *words,
        ]
    )


@pytest.mark.slow
async def test_engines_that_are_killed_are_replaced_and_the_run_does_not_notice(tmp_path: Path) -> None:
    practising = asyncio.Event()
    killer = asyncio.create_task(killing(practising, 3))
    summary = await train(household(tmp_path), on_progress=reported_by(practising))
    assert await killer == 3
    assert summary["steps"] == 2
    rows = read_metrics(tmp_path / "run" / "metrics.jsonl", "train")
    assert [row["groups"] for row in rows] == [2, 2]


@pytest.mark.slow
async def test_engines_that_always_die_stop_the_run_with_the_reason_and_it_resumes_when_they_live(
    tmp_path: Path,
) -> None:
    config = household(tmp_path, "train.retries=0")
    practising = asyncio.Event()
    killer = asyncio.create_task(killing(practising, None))
    try:
        with pytest.raises(RolloutsFailingError, match=r"crashed.*episode process died at .*exit status -9"):
            await train(config, on_progress=reported_by(practising))
    finally:
        killer.cancel()
    assert (await train(config))["steps"] == 2


def can_mount() -> bool:
    words = ["unshare", "--user", "--map-root-user", "--mount", "mount", "-t", "tmpfs", "none", "/mnt"]
    return shutil.which(words[0]) is not None and not subprocess.run(words, check=False).returncode


@pytest.mark.slow
def test_a_disk_that_is_full_stops_the_run_with_a_clear_message_and_room_lets_it_go_on(
    home: Path, tmp_path: Path
) -> None:
    if not can_mount():
        pytest.skip("this user cannot mount a disk; a limit on the size of files is tried in test_loop.py")
    disk, prepared, out = (tmp_path / name for name in ("disk", "prepared", "kept"))
    disk.mkdir()
    shutil.copytree(home / "offline", prepared / "offline")
    for part in ("base", "policies"):
        shutil.copytree(home / "begun" / "run" / part, prepared / "test" / "run" / part)
    words = (*SHORT, "train.save_policy_every=1")
    process = started(tmp_path / "errors", small_disk.in_a_process, disk, prepared, out, words)
    process.join(1200)
    reported = (tmp_path / "errors").read_text(encoding="utf-8")
    assert process.exitcode == 0, reported
    assert re.search(
        r"StoreError: .*(No space left|is full).*(make room|free some (disk )?space)", reported
    ), reported
    assert json.loads((out / "summary.json").read_text(encoding="utf-8"))["steps"] == 4
