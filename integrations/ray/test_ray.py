"""Training on two Ray nodes of this machine: equal to one process to the bit, also when a worker, a node, the
server of the replay buffer or the driver is lost in the middle.

`integrations/run.py ray` runs this in a network namespace that has only loopback, since Ray listens on the
host's address. Every process is started here and ended by its id.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray
from ray.util.state import list_actors
from tests.distributed import test_shared_buffer as shared
from tests.distributed.test_collect import recorded
from tests.distributed.test_training import FEW, STEPS, SlowDream, begun, evaluated
from tests.replay.household import episode
from tests.replay.postgres_server import Server, running_server
from tests.training.test_loop import same_end
from tests.training.training_run import FACTORY, record, run, settings

from dreamgym.config import ReplayConfig
from dreamgym.distributed.ray_actors import from_arrays, serve_buffer, to_arrays
from dreamgym.replay.buffer import ReplayBuffer
from dreamgym.training.dream_setup import run_store
from dreamgym.training.metrics import read_metrics
from dreamgym.training.progress import Progress
from dreamgym.training.trainer import train
from dreamgym.types import RetrievalFilter

PORT, DASHBOARD = 6379, 8265
PORTS = itertools.count(7010, 10)
DREAM = "train.mode=dream"
ON_RAY = (*FEW, DREAM, "train.workers=2", "cluster.address=auto")


def only_loopback() -> bool:
    return {name for _, name in socket.if_nameindex()} == {"lo"}


pytestmark = pytest.mark.skipif(not only_loopback(), reason="needs a network namespace with only loopback")


def started(first_port: int, log: Path, *words: str) -> subprocess.Popen[bytes]:
    """A node with one core, until it is ended; nodes of one machine need ports of their own."""
    names = ("metrics-export", "dashboard-agent-listen", "dashboard-agent-grpc", "runtime-env-agent")
    ports = [
        word for number, name in enumerate(names) for word in (f"--{name}-port", str(first_port + number))
    ]
    with log.open("wb") as file:
        return subprocess.Popen(
            [
                *(sys.executable, "-m", "ray.scripts.scripts", "start", "--block", "--num-cpus", "1"),
                *("--object-store-memory", "100000000", "--node-ip-address", "127.0.0.1", *ports, *words),
            ],
            stdout=file,
            stderr=file,
            start_new_session=True,
        )


def tree(process: subprocess.Popen[bytes]) -> list[psutil.Process]:
    try:
        parent = psutil.Process(process.pid)
        return [parent, *parent.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def end(process: subprocess.Popen[bytes]) -> None:
    for each in tree(process):
        each.kill()
    process.wait()


def nodes() -> int:
    return sum(node["Alive"] for node in ray.nodes())


def wait_for(true: Callable[[], Any], seconds: float = 180) -> None:
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.2)


def joined(folder: Path, *words: str) -> subprocess.Popen[bytes]:
    """A node that is ready. Ray gives up when its agents take longer than 15 seconds, as on a loaded machine:
    then it is started again."""
    for first_port in itertools.islice(PORTS, 5):
        log = folder / f"node-{first_port}.log"
        process, deadline = started(first_port, log, *words), time.monotonic() + 60
        while time.monotonic() < deadline and process.poll() is None:
            if b"Ray runtime started" in log.read_bytes():
                return process
            time.sleep(0.2)
        end(process)
    raise AssertionError(f"no node could be started: {log.read_text()[-2000:]}")


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory) -> Iterator[subprocess.Popen[bytes]]:
    folder = tmp_path_factory.mktemp("head")
    dashboard = ("--include-dashboard", "true", "--dashboard-port", str(DASHBOARD))
    process = joined(folder, "--head", "--port", str(PORT), *dashboard)
    try:
        ray.init(address=f"127.0.0.1:{PORT}", log_to_driver=False, logging_level="ERROR")
        yield process
        ray.shutdown()
    finally:
        end(process)


@pytest.fixture
def node(head: subprocess.Popen[bytes], tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """The second node."""
    process = joined(tmp_path, "--address", f"127.0.0.1:{PORT}")
    try:
        wait_for(lambda: nodes() == 2)
        yield process
    finally:
        end(process)
    wait_for(lambda: nodes() == 1)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("ray")
    asyncio.run(record(home / "offline"))
    asyncio.run(run(settings(home / "dream", DREAM, *FEW)))
    return home


@pytest.fixture(scope="module")
def fine_tuned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With an experience model that is shown demonstrations, and an undisturbed run of one process."""
    home = tmp_path_factory.mktemp("fine-tuned")
    asyncio.run(shared.prepare(home))
    return home


@pytest.fixture
def postgres() -> Iterator[Server]:
    with running_server() as server:
        yield server


async def disturbed(folder: Path, disturb: Callable[[], None], *words: str) -> list[str]:
    """Train, and do this in the middle of the second step; returns the warnings."""
    warnings, first_done = list[str](), asyncio.Event()

    def on_progress(progress: Progress) -> None:
        warnings.extend(progress.warnings)
        if progress.row.get("kind") == "train":
            first_done.set()

    async def wait() -> None:
        await first_done.wait()
        await asyncio.sleep(0.2)
        disturb()

    async with asyncio.TaskGroup() as group:
        group.create_task(
            train(settings(folder, *ON_RAY, *words), experience_model=SlowDream(0.1), on_progress=on_progress)
        )
        group.create_task(wait())
    return warnings


def actors(node: subprocess.Popen[bytes], name: str) -> list[psutil.Process]:
    """Processes of a node; Ray puts the actor's class into the title."""
    return [each for each in tree(node) if name in each.name() or name in str(each.cmdline())]


async def test_two_nodes_learn_what_one_process_learns_to_the_bit(
    home: Path, node: subprocess.Popen[bytes]
) -> None:
    folder = begun(home, "two nodes")
    await run(settings(folder, *ON_RAY))
    same_end(home / "dream" / "run", folder / "run", STEPS)


async def test_a_killed_worker_changes_nothing(home: Path, node: subprocess.Popen[bytes]) -> None:
    folder = begun(home, "worker killed")
    warnings = await disturbed(
        folder, lambda: [each.kill() for each in actors(node, "RolloutActor")] and None
    )
    same_end(home / "dream" / "run", folder / "run", STEPS)
    assert any("was lost" in warning for warning in warnings)


async def test_a_killed_node_changes_nothing(home: Path, node: subprocess.Popen[bytes]) -> None:
    folder = begun(home, "node killed")
    warnings = await disturbed(folder, lambda: end(node))
    same_end(home / "dream" / "run", folder / "run", STEPS)
    assert any("was lost" in warning for warning in warnings)


async def test_a_frozen_node_costs_its_deadline(home: Path, node: subprocess.Popen[bytes]) -> None:
    def freeze() -> None:
        for each in tree(node):
            each.suspend()

    folder = begun(home, "node frozen")
    began = time.monotonic()
    warnings = await disturbed(folder, freeze, "cluster.group_seconds=8")
    same_end(home / "dream" / "run", folder / "run", STEPS)
    assert any("does not answer" in warning for warning in warnings)
    assert time.monotonic() - began < 120


async def test_a_killed_driver_resumes(home: Path, node: subprocess.Popen[bytes]) -> None:
    folder = begun(home, "driver killed")
    out = folder / "run"
    code = f"from pathlib import Path; from test_ray import driver; driver(Path({str(folder)!r}))"
    path = os.pathsep.join([str(Path(__file__).parent), *filter(None, sys.path)])
    process = subprocess.Popen(  # noqa: ASYNC220  (returns at once)
        [sys.executable, "-c", code], env=os.environ | {"PYTHONPATH": path}
    )
    try:
        wait_for(lambda: (out / "metrics.jsonl").exists() and read_metrics(out / "metrics.jsonl", "train"))
        process.send_signal(signal.SIGKILL)
    finally:
        process.kill()
        process.wait()
    await run(settings(folder, *ON_RAY))
    same_end(home / "dream" / "run", out, STEPS)


def driver(folder: Path) -> None:
    asyncio.run(train(settings(folder, *ON_RAY), real=FACTORY, experience_model=SlowDream(0.3)))


async def test_collection_and_evaluation_on_two_nodes_give_what_one_process_gives(
    home: Path, node: subprocess.Popen[bytes], tmp_path: Path
) -> None:
    on_ray, words = "cluster.address=auto", ("environment.name=corridor", 'collect.policy="noisy:0.3"')
    alone = await recorded(tmp_path / "0", FACTORY, 12, *words)
    assert alone == await recorded(tmp_path / "2", FACTORY, 12, *words, on_ray, "collect.workers=2")
    shutil.copytree(home / "dream" / "run", tmp_path / "run")
    assert await evaluated(tmp_path, 0) == await evaluated(tmp_path, 2, on_ray)


TWO_NODES = ("train.workers=2", "cluster.address=auto")


async def test_audits_resets_and_demonstrations_on_two_nodes_give_what_one_process_gives_to_the_bit(
    fine_tuned: Path, node: subprocess.Popen[bytes]
) -> None:
    folder = shared.begun(fine_tuned, "two nodes")
    await train(shared.chosen(folder, *TWO_NODES), real=FACTORY)
    shared.same_run(fine_tuned, folder)
    assert shared.in_file(folder) == shared.in_file(fine_tuned / "whole")


async def test_the_loss_of_the_database_in_the_middle_changes_nothing(
    fine_tuned: Path, node: subprocess.Popen[bytes], postgres: Server
) -> None:
    """Its server crashes while workers on both nodes search it, and is started again three seconds later."""
    folder = shared.begun(fine_tuned, "database lost")
    config = shared.chosen(folder, *TWO_NODES, f"replay.store={postgres.address}")
    crash = threading.Timer(0.3, shared.crash, (postgres, 3.0))
    await train(config, real=FACTORY, on_progress=shared.after_step(1, crash.start))
    assert crash.finished.is_set()
    shared.same_run(fine_tuned, folder)
    found = shared.in_database(run_store(config.train.out, config.replay))
    assert found == shared.in_file(fine_tuned / "whole")


async def test_rays_dashboard_lists_the_workers_and_its_metrics_count_their_groups(
    home: Path, head: subprocess.Popen[bytes]
) -> None:
    """What `ray list actors` asks, and what Prometheus reads."""
    [node] = [each for each in ray.nodes() if each["Alive"]]
    exported = f"http://127.0.0.1:{node['MetricsExportPort']}/metrics"
    names = ("dreamgym_jobs", "dreamgym_environment_steps", "dreamgym_job_seconds")

    def counted() -> bool:
        with urllib.request.urlopen(exported, timeout=10) as answer:
            text = answer.read().decode()
        return all(f"ray_{name}" in text for name in names)

    def look() -> None:
        found = list_actors(f"http://127.0.0.1:{DASHBOARD}", filters=[("state", "=", "ALIVE")])
        assert "RolloutActor" in {each.class_name for each in found}
        wait_for(counted)

    await disturbed(begun(home, "watched"), look, "train.workers=1")


def test_weights_pass_the_object_store_unchanged(head: subprocess.Popen[bytes]) -> None:
    import torch

    weights = {"a": torch.randn(3, 5), "b": torch.randn(4).to(torch.bfloat16), "c": torch.tensor(2.0)}
    found = from_arrays(ray.get(ray.put(to_arrays(weights))))
    assert all(torch.equal(found[name], weights[name]) for name in weights)


async def test_workers_search_the_drivers_buffer_through_its_actor(
    head: subprocess.Popen[bytes], tmp_path: Path
) -> None:
    """Rows that the driver adds later are found, also after the actor was killed."""
    path, config = tmp_path / "replay.sqlite", ReplayConfig()
    query = [(step.state.text, step.action) for step in episode(3).transitions]
    filters = [RetrievalFilter(environment="household")] * len(query)
    with ReplayBuffer.open_configured(path, config) as buffer:
        await buffer.add(episode(1))
        served = serve_buffer(ray, path, config)
        assert await served.search(query, k=2, filters=filters) == await buffer.search(
            query, k=2, filters=filters
        )
        await buffer.add(episode(3))
        for process in actors(head, "BufferActor"):
            process.kill()
        found = await served.search(query, k=2, filters=filters)
        assert found == await buffer.search(query, k=2, filters=filters)
        assert any(each.transition == episode(3).transitions[0] for each in found[0])
    ray.kill(served.actor)
