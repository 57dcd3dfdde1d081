"""SkyRL's own registry and base class with our environment; its trainer needs CUDA and is not started."""

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import skyrl_gym
from skyrl_gym.envs.base_text_env import BaseTextEnv

from dreamgym.integrations.skyrl import register_dreamgym

LAMP = {"environment": "integrations/trl/lamp.py:Lamp"}
SYSTEM = [{"role": "system", "content": "You control a lamp."}]


def make(index: int = 0, config: dict[str, object] | None = None) -> BaseTextEnv:
    register_dreamgym()
    register_dreamgym()
    return skyrl_gym.make("dreamgym", env_config=config or LAMP, extras={"index": index, "max_turns": 4})


def test_an_episode_in_skyrls_words() -> None:
    env = make()
    messages, info = env.init(SYSTEM)
    assert messages[0] == SYSTEM[0]
    assert messages[1]["content"].startswith("Switch on the lamp.\n\nYou see a lamp")
    assert info["task_id"].startswith("lamp-train-")
    told = env.step("read label")
    assert (told["done"], told["reward"]) == (False, 0.0)
    colour = told["observations"][0]["content"].removesuffix(".").split()[-1]
    won = env.step(f"press {colour}\n")
    assert (won["done"], won["reward"], won["observations"]) == (True, 1.0, [])
    assert env.get_metrics() == {"return": 1.0, "success": 1.0, "turns": 2, "failed": 0.0}
    env.close()


BROKEN = """class Broken:
    def start(self): return "hello"
    def step(self, action): raise OSError("gone")
"""


def test_the_turn_limit_ends_an_episode_and_a_broken_environment_never_raises(tmp_path: Path) -> None:
    env = make()
    env.init([])
    assert [env.step("wait")["done"] for _ in range(4)] == [False, False, False, True]
    (tmp_path / "broken.py").write_text(BROKEN)
    broken = make(config={"environment": f"{tmp_path}/broken.py:Broken"})
    broken.init([])
    out = broken.step("look")
    assert (out["done"], out["reward"], out["metadata"]["failure"]) == (True, 0.0, "crashed")
    assert broken.get_metrics()["failed"] == 1.0


def test_many_episodes_in_threads() -> None:
    def play(number: int) -> float:
        env = make(number)
        env.init([])
        colour = env.step("read label")["observations"][0]["content"].removesuffix(".").split()[-1]
        return env.step(f"press {colour}")["reward"]

    started = time.perf_counter()
    with ThreadPoolExecutor(32) as pool:
        assert list(pool.map(play, range(64))) == [1.0] * 64
    assert time.perf_counter() - started < 30
