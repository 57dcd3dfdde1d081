"""Our environments in synchronous frameworks: the shared event loop, and Gymnasium in both directions."""

from __future__ import annotations

import asyncio
import multiprocessing
import time
import warnings
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env

from dreamgym.config import load_config
from dreamgym.data.trajectories import read_trajectories
from dreamgym.envs.wrappers import EnvironmentWrapper, FactoryWrapper
from dreamgym.errors import EpisodeFailedError, EpisodeOverError
from dreamgym.integrations.gymnasium import DreamGymEnv, DreamGymVectorEnv, Unicode, from_gymnasium
from dreamgym.integrations.in_process import Episodes
from dreamgym.integrations.loop_thread import loop_thread
from dreamgym.protocols import Environment
from dreamgym.testing import CorridorFactory, check_environment
from dreamgym.training.dream_loading import Dream
from dreamgym.types import FailureKind, Outcome, State, Task
from tests.training.training_run import SMALL, CorridorDream, record

FACTORY = CorridorFactory(length=4, horizon=8)


@pytest.fixture(scope="module")
def dream(tmp_path_factory: pytest.TempPathFactory) -> Dream:
    folder = tmp_path_factory.mktemp("dream")
    asyncio.run(record(folder))
    return Dream(CorridorDream(), read_trajectories(folder), load_config(overrides=SMALL))


class Slow(FactoryWrapper):
    """Waits as a simulator does, and may fail."""

    def __init__(self, seconds: float, *, failing: bool = False) -> None:
        super().__init__(FACTORY)
        self.seconds, self.failing = seconds, failing

    def make(self, task: Task, *, seed: int = 0) -> Environment:
        return _Slow(super().make(task, seed=seed), self)


class _Slow(EnvironmentWrapper):
    def __init__(self, inner: Environment, factory: Slow) -> None:
        super().__init__(inner)
        self._factory = factory

    async def start(self) -> State:
        await asyncio.sleep(self._factory.seconds)
        return await super().start()

    async def step(self, action: str) -> Outcome:
        await asyncio.sleep(self._factory.seconds)
        if self._factory.failing:
            raise EpisodeFailedError(FailureKind.TIMEOUT, "too slow")
        return await super().step(action)


def leave(env: DreamGymEnv, start: int, way_out: int) -> list[tuple[Any, ...]]:
    env.reset(seed=1, options={"task_id": f"4-{start}-{way_out}"})
    return [env.step(action) for action in [*["go east"] * (way_out - start), "open door"]]


def test_check_env_of_gymnasium_passes_in_reality_and_in_the_dream(dream: Dream) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for source in (FACTORY, dream):
            check_env(gymnasium.make("DreamGym-v0", environment=source).unwrapped)


def test_an_episode_terminates_truncates_and_is_over(dream: Dream) -> None:
    for source in (FACTORY, dream):
        env = DreamGymEnv(source, render_mode="ansi")
        *_, (text, reward, terminated, truncated, info) = leave(env, 1, 3)
        assert (text, reward, terminated, truncated) == ("You open the door and leave.", 1.0, True, False)
        assert (info["success"], env.render()) == (True, text)
        with pytest.raises(EpisodeOverError):
            env.step("open door")
        env.reset(seed=1)
        steps = [env.step("look") for _ in range(6 if source is dream else 8)]
        assert [each[3] for each in steps] == [False] * (len(steps) - 1) + [True]
        env.close()


def test_a_failed_episode_is_truncated_and_named() -> None:
    env = DreamGymEnv(Slow(0.0, failing=True))
    first, _ = env.reset(seed=0)
    text, reward, terminated, truncated, info = env.step("look")
    assert (text, reward, terminated, truncated, info["failure"]) == (first, 0.0, False, True, "timeout")


def test_the_vector_form_waits_for_all_members_at_once_and_restarts_them() -> None:
    envs = DreamGymVectorEnv(Slow(0.05), num_envs=16)
    started = time.perf_counter()
    texts, infos = envs.reset(seed=3)
    over = np.zeros(16, bool)
    for _ in range(9):
        texts, rewards, terminated, truncated, infos = envs.step(["look"] * 16)
        over |= terminated | truncated
        assert (len(texts), rewards.shape, terminated.dtype.kind) == (16, (16,), "b")
    assert time.perf_counter() - started < 16 * 0.05 * 5
    assert over.all()
    assert "step" not in infos
    assert not (terminated | truncated).any(), "the ninth step was a reset"
    single = DreamGymEnv(FACTORY)
    assert texts[0] == single.reset(options={"task_id": infos["task_id"][0]})[0]
    envs.close()


async def test_synchronous_calls_work_inside_another_event_loop_and_from_many_threads() -> None:
    episodes = Episodes(FACTORY)
    assert episodes.reset(index=0).text  # blocks this loop, and does not need it
    assert (await episodes.areset(index=0)).text
    players = [Episodes(Slow(0.1)) for _ in range(20)]
    started = time.perf_counter()
    await asyncio.gather(*(asyncio.to_thread(each.reset, index=0) for each in players))
    assert time.perf_counter() - started < 1.0
    for each in players:
        await each.aclose()


async def test_an_episode_that_a_trainer_gives_up_does_not_count_and_a_failed_one_is_raised() -> None:
    episodes = Episodes(FACTORY)
    for finished in (True, False):
        await episodes.areset(index=0)
        await episodes.astep("look")
        episodes.check()
        await episodes.aclose(finished=finished)
    assert {name: episodes.served.counts[f"{name}_real"] for name in ("started", "finished", "dropped")} == {
        "started": 2,
        "finished": 1,
        "dropped": 1,
    }
    failing = Episodes(Slow(0.0, failing=True))
    await failing.areset(index=0)
    await failing.astep("look")
    with pytest.raises(EpisodeFailedError) as failed:
        failing.check()
    assert failed.value.kind is FailureKind.TIMEOUT


def _play_in_a_child(results: Any) -> None:
    results.put(DreamGymEnv(FACTORY).reset(seed=0)[0])


def test_a_forked_process_gets_a_loop_of_its_own() -> None:
    assert loop_thread().call(asyncio.sleep(0, "here")) == "here"
    context = multiprocessing.get_context("fork")
    results: Any = context.Queue()
    child = context.Process(target=_play_in_a_child, args=(results,))
    child.start()
    assert results.get(timeout=20) == DreamGymEnv(FACTORY).reset(seed=0)[0]
    child.join(20)
    assert child.exitcode == 0


async def test_their_environments_are_ours_and_ours_theirs() -> None:
    class Doors(gymnasium.Env[str, str]):
        observation_space = action_space = Unicode()

        def __init__(self) -> None:
            self.inner = DreamGymEnv(FACTORY)

        def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[str, dict[str, Any]]:
            super().reset(seed=seed)
            return self.inner.reset(seed=seed)

        def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
            return self.inner.step(action)

    spec = from_gymnasium(Doors, name="doors", horizon=20)
    report = await check_environment(spec.open(spec.options()), episodes=12, concurrency=4)
    assert report.passed, [each for each in report.checks if each.status == "fail"]
