"""Rollouts per second on workers, against one process; memory, broadcast of weights, cost of the driver; and
practice of the quickstart.

    python benchmarks/scaling.py --quick
    python benchmarks/scaling.py --json results/scaling.json                     # on idle cores
    python benchmarks/scaling.py --only practice --json results/scaling.json     # on idle cores

`compute`: a tiny policy and an experience model of the same size that writes 40 tokens per turn, 16 groups of
8 in each of 7 rounds. "No workers" is one process as `train.workers=0` runs it, with the threads that torch
uses by default; "one thread" the same with one.
`latency`: the same policy, and replies that take 0.5 to 2 seconds, 1 group of 8 at a time per worker.
`broadcast`: until two workers have loaded new weights, for models of several sizes.
`practice`: seconds per step of the quickstart's practice, updates included, from one start, without and with
two workers; their weights must be equal to the bit.
Rounds of all numbers of workers alternate, each after a warm-up in the same pool; ratios are medians of the
rounds (the range of 7 is a 98% interval of the median). "others" are the cores that other processes of
the machine took meanwhile.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import torch

from dreamgym.config import Config, load_config
from dreamgym.data.trajectories import TrajectoryWriter
from dreamgym.distributed.player import GroupPlayer, GroupRequest, LocalPlayer
from dreamgym.distributed.pool import PoolSettings
from dreamgym.distributed.setup import open_player, open_pool
from dreamgym.distributed.worker import TrainSetup
from dreamgym.envs.scripted_policies import make_policy
from dreamgym.envs.wrappers import StepCounter
from dreamgym.rollouts import CircuitBreaker, GroupSettings, Origin, run_episode
from dreamgym.training.agent import Agent, make_agent
from dreamgym.training.dream_loading import Dream
from dreamgym.types import Task, Trajectory
from scaling_dreams import CORRIDORS, HORIZON, Computing, Rules, Wait, Waiting
from scaling_practice import practice

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
            mine, machine = _cpu(workers), _machine_cpu()
            driver, began = time.process_time(), time.perf_counter()
            report = await player.play(self.request("measured", groups, 2))
            seconds, driver = time.perf_counter() - began, time.process_time() - driver
            mine, machine = _cpu(workers) - mine, _machine_cpu() - machine
            memory = [each.memory_full_info().uss for each in processes()] if workers else []
        assert report.episodes == groups * SIZE, report.dropped
        return {
            "workers": workers,
            "cores_used": mine / seconds,
            "rollouts_per_second": report.episodes / seconds,
            "rollouts_per_cpu_second": report.episodes / mine,
            "driver_ms_per_rollout": 1000 * driver / report.episodes,
            "worker_mb": sum(memory) / len(memory) / 1e6 if memory else None,
            "others": max(0.0, machine - mine) / seconds,
        }

    async def broadcast(self, workers: int, times: int) -> dict[str, Any]:
        """Publish, and wait until every worker has loaded the weights."""
        found: list[float] = []
        async with AsyncExitStack() as stack:
            setup = TrainSetup(config=self.config, folder=self.folder, experience_model=Waiting())
            settings = PoolSettings(slots=1, seconds=600)
            pool, publisher = await open_pool(
                *(stack, self.config, setup, settings),
                workers=workers,
                logs=self.folder / "workers",
                on_event=print,
            )
            for version in range(1, times + 1):
                began = time.perf_counter()
                box = await publisher.put(version, self.agent.weights())
                async with asyncio.TaskGroup() as group:
                    for _ in range(workers):  # a worker that has one waits, so each takes one
                        group.create_task(pool.run(Wait(), version=version, box=box))
                found.append(time.perf_counter() - began - Wait.seconds)
        weights = self.agent.weights().values()
        size = sum(weight.numel() * weight.element_size() for weight in weights)
        return {"mb": size / 1e6, "workers": workers, "ms": 1000 * statistics.median(found)}

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


def _cpu(workers: int) -> float:
    """Seconds of this process and its workers."""
    times = [psutil.Process().cpu_times(), *(each.cpu_times() for each in (processes() if workers else ()))]
    return float(sum(each.user + each.system for each in times))


def _machine_cpu() -> float:
    times = psutil.cpu_times()
    return float(times.user + times.nice + times.system)


async def run(quick: bool, only: str | None, times: int) -> dict[str, Any]:
    found: dict[str, Any] = {"machine": machine()}
    with tempfile.TemporaryDirectory() as temporary:
        home = Path(temporary)
        offline = await recorded(home / "offline")
        if only in (None, "compute"):
            found["compute"] = await compute(home, offline, quick, times)
        if only in (None, "latency"):
            found["latency"] = await latency(home, offline, quick)
        if only in (None, "broadcast"):
            rows = []
            for name in ("tiny", "small"):
                bench = opened(home, name, offline)
                rows.append(await bench.broadcast(2, 3 if quick else 9))
                await bench.agent.aclose()
            found["broadcast"] = rows
        if only in (None, "practice"):
            found["practice"] = await practice(home / "practice", quick, times)
    return found


async def compute(home: Path, offline: Sequence[Trajectory], quick: bool, times: int) -> list[dict[str, Any]]:
    """One process with as many threads as it has by default, and with one; then workers."""
    groups, several = 4 if quick else 16, torch.get_num_threads()
    made = {}
    for threads in (several, 1):
        torch.set_num_threads(threads)
        bench = opened(home, "tiny", offline, f"{threads}-threads")
        made[threads] = bench, Computing(bench.folder / "base")

    async def measure(workers: int, threads: int) -> dict[str, Any]:
        torch.set_num_threads(threads)
        bench, model = made[threads]
        found = await bench.measure(model, workers, groups, -(-groups // max(1, workers)))
        return found | {"threads": threads}

    arms = [(0, several), (0, 1), (1, 1), (2, 1)]
    found = await rounds([partial(measure, *arm) for arm in arms], times)
    torch.set_num_threads(several)
    for bench, _ in made.values():
        await bench.agent.aclose()
    return found


async def latency(home: Path, offline: Sequence[Trajectory], quick: bool) -> list[dict[str, Any]]:
    bench, each = opened(home, "tiny", offline), 1 if quick else 2
    counts = (1, 2) if quick else (1, 2, 4, 8)
    found = await rounds(
        [partial(bench.measure, Waiting(), count, each * count, 1) for count in counts], times=1
    )
    await bench.agent.aclose()
    return found


def opened(home: Path, model: str, offline: Sequence[Trajectory], name: str = "run") -> Bench:
    config = load_config(
        overrides=[
            *("environment.name=corridor", f"agent.model={model}", "agent.vocabulary=320"),
            *("agent.max_tokens=6", f"train.horizon={HORIZON}"),
            f'train.data=["{home / "offline"}"]',
        ]
    )
    folder = home / f"{model}-{name}"
    return Bench(config, folder, offline, make_agent(config, offline, folder))


async def rounds(
    measures: Sequence[Callable[[], Awaitable[dict[str, Any]]]], times: int
) -> list[dict[str, Any]]:
    """Medians of each; a ratio is the median of the ratios to the first, round by round."""
    made = [[await measure() for measure in measures] for _ in range(times)]
    found = []
    for place in range(len(measures)):
        rows = [each[place] for each in made]
        known = {key: value for key, value in rows[0].items() if value is not None}
        row: dict[str, Any] = {key: statistics.median(each[key] for each in rows) for key in known}
        for name in ("rollouts_per_second", "rollouts_per_cpu_second"):
            ratios = [each[place][name] / each[0][name] for each in made]
            row[f"{name}_ratio"] = statistics.median(ratios)
            row[f"{name}_ratios"] = [round(ratio, 3) for ratio in ratios]
        found.append(row)
    return found


def machine() -> dict[str, Any]:
    return {
        "processor": platform.processor() or platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "load": os.getloadavg()[0],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a minute, to see that it works")
    parser.add_argument("--only", choices=("compute", "latency", "broadcast", "practice"))
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", type=Path, help="write the result here; keeps parts that were not measured")
    options = parser.parse_args()
    found = asyncio.run(run(options.quick, options.only, 1 if options.quick else options.rounds))
    for name in ("compute", "latency"):
        for row in found.get(name, ()):
            memory = f", {row['worker_mb']:.0f} MB per worker" if "worker_mb" in row else ""
            threads = f", {row['threads']} threads" if name == "compute" and not row["workers"] else ""
            ratios = row["rollouts_per_second_ratios"]
            print(
                f"{name}: {row['workers'] or 'no'} workers{threads}: {row['rollouts_per_second']:.2f} "
                f"rollouts/s (x{row['rollouts_per_second_ratio']:.2f}, {min(ratios):.2f} to "
                f"{max(ratios):.2f}) on {row['cores_used']:.2f} cores, {row['rollouts_per_cpu_second']:.2f} "
                f"per CPU second (x{row['rollouts_per_cpu_second_ratio']:.2f}), driver "
                f"{row['driver_ms_per_rollout']:.1f} ms CPU per rollout{memory}; others {row['others']:.1f}"
            )
    for row in found.get("broadcast", ()):
        print(f"broadcast: {row['mb']:.1f} MB to {row['workers']} workers in {row['ms']:.0f} ms")
    for row in found.get("practice", ()):
        print(
            f"practice: {row['workers'] or 'no'} workers: {row['seconds_per_step']:.2f} s a step (x"
            f"{row['ratio']:.2f}, {min(row['ratios']):.2f} to {max(row['ratios']):.2f}), of which rollouts "
            f"{row['rollout_seconds_per_step']:.2f}; CPU {row['cpu_seconds_per_step']:.2f} s a step; "
            f"{row['other_seconds']:.1f} s before and after"
        )
    if options.json:
        known = json.loads(options.json.read_text()) if options.json.exists() else {}
        options.json.write_text(json.dumps(known | found, indent=2) + "\n")


if __name__ == "__main__":
    main()
