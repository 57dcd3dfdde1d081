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
import pytest_asyncio

from dreamgym.envs.alfworld import AlfworldEnvironment, AlfworldFactory, AlfworldOptions, task_source
from dreamgym.envs.process_pool import ProcessPool
from dreamgym.errors import ConfigError, DreamGymError, EpisodeFailedError, EpisodeOverError
from dreamgym.types import FailureKind
from tests.envs.official_layout import write_official_game
from tests.processes import with_word

REFERENCE = Path(__file__).with_name("reference_engine.py")
one_loop = pytest.mark.asyncio(loop_scope="module")


def reference(games: list[Path], steps: int, seed: int) -> list[dict[str, Any]]:
    """What the untouched engine says."""
    command = [sys.executable, str(REFERENCE), str(steps), str(seed), *map(str, games)]
    run = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=1200, check=True)
    return [json.loads(line) for line in run.stdout.splitlines()]


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
    games = [write_official_game(tmp_path, "train", index) for index in range(3)]
    assert await assert_same_words(tmp_path, "train", reference(games, steps=20, seed=1)) > 45


@pytest.mark.slow
async def test_the_official_games_read_as_the_benchmark_distributes_them(
    tmp_path: Path, real_data: Path
) -> None:
    with tarfile.open(real_data / "alfworld" / "official_layout_sample.tar.xz") as archive:
        archive.extractall(tmp_path, filter="data")
    games = sorted(tmp_path.glob("*/*/*/*/game.tw-pddl"))[::6]
    assert await assert_same_words(tmp_path, "valid_seen", reference(games, steps=12, seed=2)) > 30


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def factory() -> AsyncIterator[AlfworldFactory]:
    """One for all tests in one loop: its fork server takes longer to start than most tests."""
    made = AlfworldFactory(AlfworldOptions())
    yield made
    await made.aclose()


@pytest.fixture
def own_cache(cache: Path, tmp_path: Path) -> Path:
    """Games of a test's own, whose translations are kept for all tests."""
    translations = cache / "alfworld" / "translations"
    translations.mkdir(parents=True, exist_ok=True)
    (tmp_path / "alfworld").mkdir()
    (tmp_path / "alfworld" / "translations").symlink_to(translations)
    return tmp_path


async def started(factory: AlfworldFactory, count: int) -> list[AlfworldEnvironment]:
    tasks = await factory.tasks("train", min(count, 6))
    environments = [factory.make(tasks[number % len(tasks)]) for number in range(count)]
    await asyncio.gather(*(environment.start() for environment in environments))
    return environments


def process_pid(environment: AlfworldEnvironment) -> int:
    assert environment._process is not None
    return environment._process.pid


@one_loop
async def test_a_killed_process_costs_its_own_episode_and_no_other(factory: AlfworldFactory) -> None:
    victim, *others = await started(factory, 3)
    os.kill(process_pid(victim), signal.SIGKILL)
    with pytest.raises(EpisodeFailedError, match=r"exit status -9") as caught:
        await victim.step("look")
    assert caught.value.kind is FailureKind.CRASHED
    for other in others:
        assert (await other.step("look")).next_state.text
        await other.aclose()


@one_loop
async def test_a_hung_process_times_out_alone(factory: AlfworldFactory) -> None:
    victim, other = await started(factory, 2)
    victim._timeout = 3
    os.kill(process_pid(victim), signal.SIGSTOP)
    with pytest.raises(EpisodeFailedError) as caught:
        await victim.step("look")
    assert caught.value.kind is FailureKind.TIMEOUT
    assert (await other.step("look")).next_state.text
    await other.aclose()


@one_loop
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


@one_loop
@pytest.mark.parametrize("attack", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
@pytest.mark.parametrize("victim", ["child", "fork server"])
async def test_a_process_that_is_lost_while_games_are_solved_costs_a_retry(
    factory: AlfworldFactory,
    attack: signal.Signals,
    victim: str,
    own_cache: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The games are its own: none is solved yet."""
    unsolved = AlfworldFactory(AlfworldOptions(step_timeout=12, cache=own_cache))
    unsolved._pool = factory._pool
    hanging = victim == "fork server" and attack == signal.SIGSTOP
    if hanging:
        factory._pool.close()  # the limit is that of a new server
        monkeypatch.setattr(factory._pool, "_control_timeout", 6)
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
        async with asyncio.timeout(600):
            tasks = await unsolved.tasks("train", 3)
        assert striking.done()
        assert len({task.id for task in tasks}) == 3
    finally:
        striking.cancel()
        if hanging:
            factory._pool.close()


async def test_a_fork_server_that_is_closed_while_it_is_asked_leaves_the_next_one_reachable(
    own_cache: Path,
) -> None:
    """The socket of the next server has the number of the closed one, which a coroutine still waits for."""
    factory = AlfworldFactory(AlfworldOptions(cache=own_cache))
    pool = factory._pool
    await (await pool.open()).aclose()
    server = pool._server
    assert server is not None
    os.kill(server._process.pid, signal.SIGSTOP)
    asking = asyncio.create_task(pool.open())
    await asyncio.sleep(0.2)
    server._kill()
    try:
        async with asyncio.timeout(600):
            again = await type(server).start(pool._target, pool._arguments, 300, 60)
            await (await again.fork(asyncio.Semaphore(), asyncio.Semaphore())).aclose()
        again.close()
    finally:
        asking.cancel()
        await factory.aclose()


@one_loop
async def test_a_horizon_that_no_game_fits_is_refused_in_bounded_time(
    factory: AlfworldFactory, own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(task_source, "_MAX_ATTEMPTS", 2)
    short = AlfworldFactory(AlfworldOptions(horizon=1, cache=own_cache))
    short._pool = factory._pool
    with pytest.raises(ConfigError, match=r"environment.options.horizon=1 is too short"):
        await short.tasks("train", 1)


@one_loop
async def test_sixty_four_episodes_are_in_flight_at_once(factory: AlfworldFactory) -> None:
    environments = await started(factory, 64)
    assert len({process_pid(environment) for environment in environments}) == 64
    outcomes = await asyncio.gather(*(environment.step("inventory") for environment in environments))
    assert {outcome.next_state.text for outcome in outcomes} == {"You are not carrying anything."}
    await asyncio.gather(*(environment.aclose() for environment in environments))


@one_loop
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
    (host,) = with_word(psutil.Process().children(), "types:SimpleNamespace")
    assert host.children() == []
    pool.close()
