"""The quickstart's dream behind `dreamgym serve`: throughput against the dream in process, memory, leaks.

    python benchmarks/serve.py --client PYTHON    # a Python with openenv installed (make test-integrations)

Both arms play the same episodes: tasks, seeds and actions are those of a plan. The server has one core, the
clients have another one; in process, the dream has one core. The last server plays all episodes a second
time: its caches and its share of the replay buffer are full then, and its memory should not grow.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from importlib.resources import files
from pathlib import Path
from random import Random
from typing import Any

import psutil

from dreamgym.data.datasets import builtin_dataset
from dreamgym.data.trajectories import read_trajectories
from dreamgym.integrations.serving import ResetRequest, ServedEnvironment, Session
from dreamgym.learning.shipped import install_experience
from dreamgym.training.dream_loading import Dream

LOAD = Path(__file__).parent.parent / "integrations" / "openenv" / "load.py"
NOISE = 0.3
"""Share of actions that are replaced by another recorded one, so that episodes differ."""


def make_plan(episodes: int, seed: int = 0) -> list[dict[str, Any]]:
    recorded: dict[str, list[list[str]]] = {}
    for each in read_trajectories(builtin_dataset("textworld")):
        if each.transitions and each.task.split == "train":
            recorded.setdefault(each.task.id, []).append([step.action for step in each.transitions])
    known = sorted({action for some in recorded.values() for actions in some for action in actions})
    rng, tasks = Random(seed), sorted(recorded)
    plan = []
    for number in range(episodes):
        task = tasks[number % len(tasks)]
        actions = [rng.choice(known) if rng.random() < NOISE else each for each in rng.choice(recorded[task])]
        plan.append({"reset": {"task_id": task, "seed": number}, "actions": actions})
    return plan


async def play_in_process(run: Path, plan: list[dict[str, Any]], sessions: int) -> dict[str, float]:
    dream = Dream.load(run)
    served = ServedEnvironment("textworld", dream=dream)
    waiting, steps, successes = iter(plan), 0, 0

    async def one() -> None:
        nonlocal steps, successes
        session = Session(served)
        for episode in waiting:
            seen = await session.reset(ResetRequest.model_validate(episode["reset"]))
            for action in episode["actions"]:
                if seen.done:
                    break
                seen = await session.step(action)
                steps += 1
            successes += bool(seen.done and seen.reward)

    started, cpu = time.perf_counter(), time.process_time()
    await asyncio.gather(*(one() for _ in range(sessions)))
    seconds, cpu = time.perf_counter() - started, time.process_time() - cpu
    await dream.aclose()
    return {"steps": steps, "successes": successes, "seconds": seconds, "cpu_seconds": cpu}


class Server:
    """`dreamgym serve` in a process of its own on one core."""

    def __init__(self, run: Path, core: int, sessions: int) -> None:
        words = ["serve", str(run), "--port", "0", "--max-sessions", str(sessions), "--idle-seconds", "120"]
        command = ["taskset", "-c", str(core), sys.executable, "-m", "dreamgym", *words]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        self.url = self._process.stdout.readline().split()[-1]
        self._psutil = psutil.Process(self._process.pid)
        self.memory: list[float] = []
        self._stop = threading.Event()
        threading.Thread(target=self._watch, daemon=True).start()

    def _watch(self) -> None:
        while not self._stop.wait(1.0):
            self.memory.append(self._psutil.memory_info().rss / 1e6)

    def by_tenth(self) -> list[float]:
        """Megabytes at the end of each tenth of the time so far."""
        last = len(self.memory) - 1
        return [self.memory[last * tenth // 10] for tenth in range(1, 11)]

    def cpu_seconds(self) -> float:
        used = self._psutil.cpu_times()
        return float(used.user + used.system)

    def status(self) -> dict[str, Any]:
        with urllib.request.urlopen(f"{self.url}/status", timeout=60) as reply:
            found: dict[str, Any] = json.load(reply)
        return found

    def stop(self) -> None:
        self._stop.set()
        self._process.send_signal(signal.SIGINT)
        self._process.wait(60)


def clients(python: str, core: int, url: str, plan: Path, sessions: int) -> subprocess.Popen[str]:
    command = ["taskset", "-c", str(core), python, str(LOAD), url, str(plan), str(sessions)]
    bare = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=bare)


def kill_clients(server: Server, python: str, core: int, plan: Path, sessions: int) -> dict[str, Any]:
    """Kill a process with all its sessions in the middle of their episodes."""
    running = clients(python, core, server.url, plan, sessions)
    assert running.stdout is not None
    while json.loads(running.stdout.readline())["steps"] < 2 * sessions:
        pass
    open_before = server.status()["sessions"]
    running.kill()
    running.wait()
    killed = time.perf_counter()
    while server.status()["sessions"] and time.perf_counter() - killed < 60:
        time.sleep(0.1)
    left = server.status()["sessions"]
    return {"open": open_before, "left": left, "seconds": round(time.perf_counter() - killed, 2)}


def measure(options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    run, plan = folder / "experience", make_plan(options.episodes)
    shipped = Path(str(files("dreamgym"))) / "datasets" / "experience" / "textworld"
    asyncio.run(install_experience(shipped, run))
    (folder / "plan.json").write_text(json.dumps(plan))
    os.sched_setaffinity(0, {options.core})
    arms: dict[str, list[dict[str, float]]] = {"in_process": [], "served": []}
    memory: list[list[float]] = []
    killed: dict[str, Any] = {}
    for number in range(options.repeats):
        arms["in_process"].append(asyncio.run(play_in_process(run, plan, options.sessions)))
        print("in process", arms["in_process"][-1], flush=True)
        server = Server(run, options.core, options.sessions)
        try:
            arms["served"].append(play_served(server, options, folder / "plan.json", len(plan)))
            memory.append(server.by_tenth())
            if number == options.repeats - 1:
                server.memory.clear()
                play_served(server, options, folder / "plan.json", len(plan))
                memory.append(server.by_tenth())
                killed = kill_clients(
                    server, options.client, options.client_core, folder / "plan.json", options.sessions
                )
        finally:
            server.stop()
    return summary(options, arms, memory, killed)


def play_served(server: Server, options: argparse.Namespace, plan: Path, episodes: int) -> dict[str, float]:
    cpu = server.cpu_seconds()
    running = clients(options.client, options.client_core, server.url, plan, options.sessions)
    found: dict[str, float] = json.loads(running.communicate()[0].splitlines()[-1])
    found["cpu_seconds"] = server.cpu_seconds() - cpu
    assert (found["episodes"], found["errors"]) == (episodes, 0), found
    assert server.status()["sessions"] == 0
    print("served", found, flush=True)
    return found


def summary(
    options: argparse.Namespace,
    arms: dict[str, list[dict[str, float]]],
    memory: list[list[float]],
    killed: dict[str, Any],
) -> dict[str, Any]:
    speeds = {name: [each["steps"] / each["seconds"] for each in found] for name, found in arms.items()}
    per_cpu = {name: [each["steps"] / each["cpu_seconds"] for each in found] for name, found in arms.items()}
    return {
        "sessions": options.sessions,
        "episodes": options.episodes,
        "steps": arms["served"][0]["steps"],
        "same_successes": len({each["successes"] for found in arms.values() for each in found}) == 1,
        "steps_per_second": {name: [round(each, 1) for each in found] for name, found in speeds.items()},
        "steps_per_cpu_second": {name: [round(each, 1) for each in found] for name, found in per_cpu.items()},
        "served_over_in_process": {"per_second": _ratio(speeds), "per_cpu_second": _ratio(per_cpu)},
        "server_megabytes_by_tenth": [[round(each) for each in run] for run in memory],
        "killed_clients": killed,
    }


def _ratio(speeds: dict[str, list[float]]) -> float:
    return round(statistics.median(speeds["served"]) / statistics.median(speeds["in_process"]), 3)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--client", default=sys.executable, help="Python with openenv installed")
    parser.add_argument("--episodes", type=int, default=2000)
    parser.add_argument("--sessions", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--core", type=int, default=0, help="of the dream")
    parser.add_argument("--client-core", type=int, default=1)
    parser.add_argument("--out", type=Path, help="JSON file")
    options = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with tempfile.TemporaryDirectory() as folder:
        found = measure(options, Path(folder))
    print(json.dumps(found, indent=2))
    if options.out is not None:
        options.out.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
