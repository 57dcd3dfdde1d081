"""Rollouts per second on workers, against one process; memory, broadcast of weights, cost of the driver.

    python benchmarks/scaling.py --quick
    python benchmarks/scaling.py --json results/scaling.json        # on idle cores

`compute`: a tiny policy and an experience model of the same size that writes 40 tokens per
turn, 32 groups of 8.
`latency`: the same policy, and replies that take 0.5 to 2 seconds, 1 group of 8 at a time per worker.
Every measurement follows a warm-up in the same pool; ratios are against the first line of their table.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import tempfile
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import psutil

from dreamgym.config import Config, load_config
from dreamgym.data.trajectories import TrajectoryWriter
from dreamgym.distributed.player import GroupPlayer, GroupRequest, LocalPlayer
from dreamgym.distributed.pool import PoolSettings
from dreamgym.distributed.setup import open_player
from dreamgym.distributed.worker import TrainSetup, use_one_thread
from dreamgym.envs.scripted_policies import make_policy
from dreamgym.envs.wrappers import StepCounter
from dreamgym.rollouts import CircuitBreaker, GroupSettings, Origin, run_episode
from dreamgym.training.agent import Agent, make_agent
from dreamgym.training.dream_loading import Dream
from dreamgym.types import Task, Trajectory
from scaling_dreams import CORRIDORS, HORIZON, Computing, Rules, Waiting

SIZE = 8


async def recorded(folder: Path) -> list[Trajectory]:
    """An expert's episode of each task: starts, and the vocabulary of the models."""
    found: list[Trajectory] = []
    for number, task in enumerate(await CORRIDORS.tasks("train")):
        played = await run_episode(
            lambda task=task: CORRIDORS.make(task),  # type: ignore[misc]
            lambda environment: make_policy("expert", environment, seed=0),
            trajectory_id=f"expert-{number}",
            task=task,
            seed=0,
        )
        assert isinstance(played, Trajectory)
        found.append(played)
    with TrajectoryWriter(folder) as writer:
        writer.append(found)
    return found


class Bench:
    """One agent, one set of tasks, any number of workers."""

    def __init__(self, config: Config, folder: Path, offline: Sequence[Trajectory], agent: Agent) -> None:
        self.config, self.folder, self.offline, self.agent = config, folder, offline, agent
        self.tasks: list[Task] = [each.task for each in offline]

    def request(self, name: str, groups: int, seed: int) -> GroupRequest:
        tasks = [self.tasks[number % len(self.tasks)] for number in range(groups)]
        settings = GroupSettings(size=SIZE, concurrency=1024)
        origin = Origin(source="synthetic")
        return GroupRequest(tasks=tasks, name=name, seed=seed, settings=settings, origin=origin)

    async def measure(self, model: Rules, workers: int, groups: int, slots: int) -> dict[str, Any]:
        async with AsyncExitStack() as stack:
            player = await self.player(stack, model, workers, slots)
            await player.publish(0, self.agent.weights)
            await player.play(self.request("warm-up", max(1, workers) * slots, 1))
            driver, began = time.process_time(), time.perf_counter()
            report = await player.play(self.request("measured", groups, 2))
            seconds, driver = time.perf_counter() - began, time.process_time() - driver
            began = time.perf_counter()
            await player.publish(1, self.agent.weights)
            published = time.perf_counter() - began
            memory = [each.memory_full_info().uss for each in processes()] if workers else []
        assert report.episodes == groups * SIZE, report.dropped
        return {
            "workers": workers,
            "rollouts_per_second": report.episodes / seconds,
            "driver_ms_per_rollout": 1000 * driver / report.episodes,
            "publish_ms": 1000 * published,
            "worker_mb": sum(memory) / len(memory) / 1e6 if memory else None,
        }

    async def player(self, stack: AsyncExitStack, model: Rules, workers: int, slots: int) -> GroupPlayer:
        breaker = CircuitBreaker(GroupSettings(size=SIZE))
        if not workers:
            dream = Dream(model, self.offline, self.config)
            return LocalPlayer(StepCounter(dream), self.agent.policy_factory("bench"), breaker)
        return await open_player(
            *(stack, self.config),
            TrainSetup(config=self.config, folder=self.folder, experience_model=model),
            PoolSettings(slots=slots, seconds=3600),
            breaker,
            workers=workers,
            logs=self.folder / "workers",
            on_event=print,
        )


def processes() -> list[psutil.Process]:
    """The worker processes below this one."""
    below = psutil.Process().children(recursive=True)
    servers = [each for each in below if "dreamgym.distributed.worker_process" in each.cmdline()]
    return [each for each in below if each.ppid() in {server.pid for server in servers}]


async def run(quick: bool, only: str | None) -> dict[str, Any]:
    use_one_thread()
    with tempfile.TemporaryDirectory() as temporary:
        home = Path(temporary)
        offline = await recorded(home / "offline")
        config = load_config(
            overrides=[
                *("environment.name=corridor", "agent.model=tiny", "agent.vocabulary=320"),
                *("agent.max_tokens=6", f"train.horizon={HORIZON}"),
                f'train.data=["{home / "offline"}"]',
            ]
        )
        folder = home / "run"
        agent = make_agent(config, offline, folder)
        bench = Bench(config, folder, offline, agent)
        found: dict[str, Any] = {"machine": machine()}
        if only in (None, "compute"):
            groups = 4 if quick else 32
            rows = [
                await bench.measure(
                    Computing(folder / "base"), workers, groups, -(-groups // max(1, workers))
                )
                for workers in (0, 1, 2)
            ]
            found["compute"] = with_ratios(rows)
        if only in (None, "latency"):
            counts = (1, 2) if quick else (1, 2, 4, 8)
            each = 1 if quick else 4
            rows = [await bench.measure(Waiting(), workers, each * workers, 1) for workers in counts]
            found["latency"] = with_ratios(rows)
        await agent.aclose()
    return found


def with_ratios(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    first = rows[0]["rollouts_per_second"]
    return [row | {"ratio": row["rollouts_per_second"] / first} for row in rows]


def machine() -> dict[str, Any]:
    return {
        "processor": platform.processor() or platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "load": os.getloadavg()[0],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a minute, to see that it works")
    parser.add_argument("--only", choices=("compute", "latency"))
    parser.add_argument("--json", type=Path, help="write the result here")
    options = parser.parse_args()
    found = asyncio.run(run(options.quick, options.only))
    for name in ("compute", "latency"):
        for row in found.get(name, ()):
            memory = "" if row["worker_mb"] is None else f", {row['worker_mb']:.0f} MB per worker"
            print(
                f"{name}: {row['workers'] or 'no'} workers: {row['rollouts_per_second']:.2f} rollouts/s "
                f"({row['ratio']:.2f}), driver {row['driver_ms_per_rollout']:.1f} ms CPU per rollout, "
                f"publish {row['publish_ms']:.0f} ms{memory}"
            )
    if options.json:
        options.json.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
