"""How fast ALFWorld's engine is here: ratios against the untouched engine, and what concurrency brings.

    python benchmarks/episode_processes.py [--quick] [--json]

Every figure that is compared is measured in the same run. CPU time, not wall time, where work is compared;
wall time where concurrency is.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil

from dreamgym.envs.alfworld import AlfworldFactory, AlfworldOptions
from dreamgym.envs.alfworld.episode_process import EpisodeHandler
from dreamgym.envs.scripted_policies import RandomPolicy
from dreamgym.types import Task, Transition

UNTOUCHED = """
import json, random, sys, time
steps, *games = sys.argv[1:]
import textworld
from alfworld.agents.environment.alfred_tw_env import AlfredDemangler, AlfredInfos
from textworld.envs import PddlEnv
env = AlfredInfos(AlfredDemangler(PddlEnv(textworld.EnvInfos(won=True, admissible_commands=True))))
dice, start, step, count = random.Random(0), 0.0, 0.0, 0
for game in games:
    began = time.process_time()
    env.load(game); state = env.reset()
    start += time.process_time() - began
    began = time.process_time()
    for _ in range(int(steps)):
        state, _, done = env.step(dice.choice(state["admissible_commands"])); count += 1
        if done: break
    step += time.process_time() - began
print(json.dumps({"start": start / len(games), "step": step / count}))
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer games and episodes")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        result = asyncio.run(measure(Path(folder), quick=arguments.quick))
    if arguments.json:
        print(json.dumps(result, indent=2))
    else:
        show(result)


async def measure(folder: Path, *, quick: bool) -> dict[str, Any]:
    options = AlfworldOptions(cache=folder)
    factory = AlfworldFactory(options)
    began = time.perf_counter()
    tasks = await factory.tasks("valid_unseen", 24 if quick else 60)
    proving = (time.perf_counter() - began) / len(tasks)
    result: dict[str, Any] = {
        "machine": f"{os.cpu_count()} cores, {platform.machine()}, Python {platform.python_version()}",
        "seconds_to_make_and_prove_a_game": proving,
        "engine": compare_engines(folder, factory, tasks[: 3 if quick else 8], steps=20 if quick else 30),
        "concurrency": await compare_concurrency(factory, tasks, episodes=64 if quick else 192),
        "memory": await memory_over(factory, tasks, episodes=200 if quick else 2000),
    }
    await factory.aclose()
    return result


def compare_engines(folder: Path, factory: AlfworldFactory, tasks: Sequence[Task], *, steps: int) -> Any:
    """CPU seconds of a start and of a step: untouched, ours with a cold cache, ours with a warm one."""
    games = [_complete_game(folder, factory._source.game_file(task)) for task in tasks]
    output = subprocess.run(
        [sys.executable, "-c", UNTOUCHED, str(steps), *map(str, games)],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    untouched = json.loads(output.splitlines()[-1])
    engine = EpisodeHandler(str(folder / "engine-cache"), [str(factory._source.warm_games()[0])])
    cold, warm = (_time_ours(engine, games, steps) for _ in range(2))
    return {
        "untouched": untouched,
        "ours_first_time": cold,
        "ours_again": warm,
        "start_ratio": untouched["start"] / warm["start"],
        "step_ratio": untouched["step"] / warm["step"],
    }


def _complete_game(folder: Path, game: Path) -> Path:
    from dreamgym.envs.alfworld.episode_process import complete_game

    path = folder / f"{game.stem}.tw-pddl"
    path.write_text(json.dumps(complete_game(json.loads(game.read_text()), "as_is")), encoding="utf-8")
    return path


def _time_ours(handler: EpisodeHandler, games: Sequence[Path], steps: int) -> dict[str, float]:
    dice, start, step, count = random.Random(0), 0.0, 0.0, 0
    for game in games:
        began = time.process_time()
        reply = handler.handle({"do": "start", "game": str(game), "goal": None})
        start += time.process_time() - began
        began = time.process_time()
        for _ in range(steps):
            reply = handler.handle({"do": "step", "action": dice.choice(reply["admissible"])})
            count += 1
            if reply["done"]:
                break
        step += time.process_time() - began
    return {"start": start / len(games), "step": step / count}


async def compare_concurrency(factory: AlfworldFactory, tasks: Sequence[Task], *, episodes: int) -> Any:
    """Episodes per second, one at a time and 64 at once, in rounds.

    The share of the machine that idles while one episode runs tells whether it was ours alone: on two cores
    it is 0.5, and less where something else was at work, which makes the ratio too small.
    """
    rounds = []
    for number in range(5):
        before = psutil.cpu_times()
        began = time.perf_counter()
        for episode in range(episodes // 8):
            await _episode(factory, tasks[episode % len(tasks)], seed=number)
        alone = (time.perf_counter() - began) / (episodes // 8)
        idle = _idle_share(before, psutil.cpu_times())
        began = time.perf_counter()
        await _many(factory, tasks, episodes, seed=number)
        together = (time.perf_counter() - began) / episodes
        rounds.append({"alone": 1 / alone, "together": 1 / together, "ratio": alone / together, "idle": idle})
    middle = sorted(rounds, key=lambda each: each["ratio"])[len(rounds) // 2]
    return {"rounds": rounds, "median": middle, "steps_per_episode": 20}


def _idle_share(before: Any, after: Any) -> float:
    spent = [float(now - then) for then, now in zip(before, after, strict=True)]
    return float(after.idle - before.idle) / max(sum(spent), 1e-9)


async def memory_over(factory: AlfworldFactory, tasks: Sequence[Task], *, episodes: int) -> Any:
    """Resident memory of this process and all its engines' host, in MB, between blocks of episodes."""
    block = episodes // 10
    seen = []
    for number in range(10):
        await _many(factory, tasks, block, seed=number)
        seen.append(_resident())
    return {"episodes": episodes, "megabytes_after_each_tenth": seen, "last_to_first": seen[-1] / seen[0]}


async def _many(factory: AlfworldFactory, tasks: Sequence[Task], episodes: int, *, seed: int) -> None:
    places = asyncio.Semaphore(64)

    async def one(number: int) -> None:
        async with places:
            await _episode(factory, tasks[number % len(tasks)], seed=seed)

    await asyncio.gather(*(one(number) for number in range(episodes)))


async def _episode(factory: AlfworldFactory, task: Task, *, seed: int, steps: int = 20) -> None:
    environment, policy = factory.make(task), RandomPolicy(seed)
    history: list[Transition] = []
    try:
        state = await environment.start()
        for _ in range(steps):
            outcome = await environment.step((await policy.act(task, history, state)).action)
            if outcome.over:
                break
            state = outcome.next_state
    finally:
        await environment.aclose()


def _resident() -> float:
    process = psutil.Process()
    family = [process, *process.children(recursive=True)]
    return float(round(sum(each.memory_info().rss for each in family) / 2**20, 1))


def show(result: dict[str, Any]) -> None:
    engine, together, memory = result["engine"], result["concurrency"], result["memory"]
    print(f"ALFWorld engine on {result['machine']}")
    print(f"make and prove a game: {result['seconds_to_make_and_prove_a_game']:.2f} s (wall, all cores)\n")
    print("| CPU ms | untouched engine | ours, first time | ours, again | ratio |")
    print("|---|---|---|---|---|")
    for name in ("start", "step"):
        row = [1000 * engine[kind][name] for kind in ("untouched", "ours_first_time", "ours_again")]
        print(f"| {name} | {row[0]:.1f} | {row[1]:.1f} | {row[2]:.1f} | {engine[f'{name}_ratio']:.0f}x |")
    middle, ratios = together["median"], [round(each["ratio"], 2) for each in together["rounds"]]
    print(
        f"\nepisodes per second (20 random steps): {middle['alone']:.1f} one at a time, "
        f"{middle['together']:.1f} with 64 at once, ratio {middle['ratio']:.2f} "
        f"(rounds {ratios}; idle while alone {middle['idle']:.2f})"
    )
    print(
        f"memory over {memory['episodes']} episodes: {memory['megabytes_after_each_tenth']} MB, "
        f"last/first {memory['last_to_first']:.3f}"
    )


if __name__ == "__main__":
    main()
