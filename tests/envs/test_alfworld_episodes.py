"""The fast engine says, word for word, what the untouched engine says; and its processes fail alone."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import tarfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from dreamgym.envs.alfworld import AlfworldEnvironment, AlfworldFactory, AlfworldOptions, task_source
from dreamgym.envs.process_pool import ProcessPool
from dreamgym.errors import ConfigError, DreamGymError, EpisodeFailedError, EpisodeOverError
from dreamgym.types import FailureKind
from tests.envs.official_layout import write_official_game

REFERENCE = Path(__file__).with_name("reference_engine.py")


def reference(games: list[Path], steps: int, seed: int) -> list[dict[str, Any]]:
    """What the untouched engine says, from two processes at once because it is slow."""
    halves = [games[::2], games[1::2]]
    runs = [
        subprocess.Popen(
            [sys.executable, str(REFERENCE), str(steps), str(seed + number), *map(str, half)],
            stdout=subprocess.PIPE,
            text=True,
        )
        for number, half in enumerate(halves)
        if half
    ]
    outputs = [run.communicate(timeout=1200)[0] for run in runs]
    assert all(run.returncode == 0 for run in runs)
    return [json.loads(line) for output in outputs for line in output.splitlines()]


async def assert_same_words(data: Path, split: str, played: list[dict[str, Any]]) -> int:
    factory = AlfworldFactory(AlfworldOptions(data=data, horizon=1000))
    tasks = {task.id: task for task in await factory.tasks(split)}
    compared = 0
    try:
        for game in played:
            path = Path(game["game"])
            environment = factory.make(tasks[f"{split}/{path.parent.parent.name}/{path.parent.name}"])
            state = await environment.start()
            for action, (text, admissible) in zip([*game["actions"], None], game["states"], strict=True):
                assert state.text == text.strip("\n")
                assert list(state.admissible_actions or ()) == admissible
                compared += 1
                if action is not None:
                    outcome = await environment.step(action)
                    state = outcome.next_state
            assert outcome.success == game["won"]
            await environment.aclose()
    finally:
        await factory.aclose()
    return compared


@pytest.mark.slow
async def test_every_text_equals_that_of_the_original_simulator(tmp_path: Path) -> None:
    games = [write_official_game(tmp_path, "train", index) for index in range(6)]
    assert await assert_same_words(tmp_path, "train", reference(games, steps=20, seed=1)) > 100


@pytest.mark.slow
async def test_the_official_games_read_as_the_benchmark_distributes_them(
    tmp_path: Path, real_data: Path
) -> None:
    with tarfile.open(real_data / "alfworld" / "official_layout_sample.tar.xz") as archive:
        archive.extractall(tmp_path, filter="data")
    games = sorted(tmp_path.glob("*/*/*/*/game.tw-pddl"))[::5]
    assert await assert_same_words(tmp_path, "valid_seen", reference(games, steps=12, seed=2)) > 40


@pytest.fixture
async def factory() -> AsyncIterator[AlfworldFactory]:
    made = AlfworldFactory(AlfworldOptions(step_timeout=20))
    yield made
    await made.aclose()


async def started(factory: AlfworldFactory, count: int) -> list[AlfworldEnvironment]:
    tasks = await factory.tasks("train", min(count, 6))
    environments = [factory.make(tasks[number % len(tasks)]) for number in range(count)]
    await asyncio.gather(*(environment.start() for environment in environments))
    return environments


def process_pid(environment: AlfworldEnvironment) -> int:
    assert environment._process is not None
    return environment._process.pid


async def test_a_killed_process_costs_its_own_episode_and_no_other(factory: AlfworldFactory) -> None:
    victim, *others = await started(factory, 4)
    os.kill(process_pid(victim), signal.SIGKILL)
    with pytest.raises(EpisodeFailedError, match=r"exit status -9") as caught:
        await victim.step("look")
    assert caught.value.kind is FailureKind.CRASHED
    for other in others:
        assert (await other.step("look")).next_state.text
        await other.aclose()


async def test_a_hung_process_times_out_alone(tmp_path: Path) -> None:
    factory = AlfworldFactory(AlfworldOptions(step_timeout=6))
    victim, other = await started(factory, 2)
    os.kill(process_pid(victim), signal.SIGSTOP)
    with pytest.raises(EpisodeFailedError) as caught:
        await victim.step("look")
    assert caught.value.kind is FailureKind.TIMEOUT
    assert (await other.step("look")).next_state.text
    await factory.aclose()


async def test_when_the_fork_server_dies_the_next_episode_starts_a_new_one(
    factory: AlfworldFactory,
) -> None:
    (victim,) = await started(factory, 1)
    server = factory._pool._server
    assert server is not None
    os.kill(server._process.pid, signal.SIGKILL)
    server._process.wait()
    await victim.aclose()
    (survivor,) = await started(factory, 1)
    assert (await survivor.step("look")).next_state.text
    await survivor.aclose()


@pytest.mark.parametrize("attack", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
@pytest.mark.parametrize("victim", ["child", "fork server"])
async def test_a_process_that_is_lost_while_games_are_solved_costs_a_retry(
    attack: signal.Signals, victim: str, tmp_path: Path
) -> None:
    factory = AlfworldFactory(AlfworldOptions(step_timeout=6, cache=tmp_path))
    factory._pool._control_timeout = 3
    await (await factory._pool.open()).aclose()
    server = factory._pool._server
    assert server is not None

    async def strike() -> None:
        parent = psutil.Process(server._process.pid)
        while not parent.children():  # noqa: ASYNC110 - a process table has no event
            await asyncio.sleep(0.005)
        os.kill(parent.children()[0].pid if victim == "child" else parent.pid, attack)

    striking = asyncio.create_task(strike())
    try:
        async with asyncio.timeout(90):
            tasks = await factory.tasks("train", 3)
        assert striking.done()
        assert len({task.id for task in tasks}) == 3
    finally:
        striking.cancel()
        await factory.aclose()


async def test_a_fork_server_that_is_closed_while_it_is_asked_leaves_the_next_one_reachable(
    tmp_path: Path,
) -> None:
    """The socket of the next server has the number of the closed one, which a coroutine still waits for."""
    factory = AlfworldFactory(AlfworldOptions(cache=tmp_path))
    pool = factory._pool
    await (await pool.open()).aclose()
    server = pool._server
    assert server is not None
    os.kill(server._process.pid, signal.SIGSTOP)
    asking = asyncio.create_task(pool.open())
    await asyncio.sleep(0.2)
    server._kill()
    try:
        async with asyncio.timeout(60):
            again = await type(server).start(pool._target, pool._arguments, 60, 10)
            await (await again.fork(asyncio.Semaphore(), asyncio.Semaphore())).aclose()
        again.close()
    finally:
        asking.cancel()
        await factory.aclose()


async def test_a_horizon_that_no_game_fits_is_refused_in_bounded_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(task_source, "_MAX_ATTEMPTS", 3)
    factory = AlfworldFactory(AlfworldOptions(horizon=1, cache=tmp_path))
    try:
        with pytest.raises(ConfigError, match=r"environment.options.horizon=1 is too short"):
            await factory.tasks("train", 2)
    finally:
        await factory.aclose()


async def test_sixty_four_episodes_are_in_flight_at_once(factory: AlfworldFactory) -> None:
    environments = await started(factory, 64)
    assert len({process_pid(environment) for environment in environments}) == 64
    outcomes = await asyncio.gather(*(environment.step("inventory") for environment in environments))
    assert {outcome.next_state.text for outcome in outcomes} == {"You are not carrying anything."}
    await asyncio.gather(*(environment.aclose() for environment in environments))


async def test_ending_an_episode_ends_its_process(factory: AlfworldFactory) -> None:
    (environment,) = await started(factory, 1)
    pid = process_pid(environment)
    await environment.aclose()
    await environment.aclose()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    with pytest.raises(EpisodeOverError):
        await environment.step("look")


async def test_the_error_of_a_simulator_that_cannot_be_loaded_has_its_cause() -> None:
    pool = ProcessPool("dreamgym.nowhere:Engine", {}, limit=1)
    with pytest.raises(DreamGymError, match=r"No module named 'dreamgym.nowhere'"):
        await pool.open()


async def test_cancelled_starts_are_ended_and_take_no_reply_of_others() -> None:
    pool = ProcessPool("types:SimpleNamespace", {}, limit=4)
    await (await pool.open()).aclose()
    for turns in range(12):  # of the event loop, until it is cancelled: before, in and after the fork
        opening = asyncio.create_task(pool.open())
        for _ in range(turns):
            await asyncio.sleep(0)
        opening.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await (await opening).aclose()
    one = await pool.open()
    psutil.Process(one.pid).kill()
    with pytest.raises(EpisodeFailedError, match=r"process died at 'anything' \(exit status -9\)"):
        await one.ask({"do": "anything"}, timeout=10)
    (host,) = [each for each in psutil.Process().children() if "types:SimpleNamespace" in each.cmdline()]
    assert host.children() == []
    pool.close()
