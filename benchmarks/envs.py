"""Seconds per real step of every environment, at 1 and 64 concurrent episodes, and memory of many episodes.

    python benchmarks/envs.py --out results/envs.json
    python benchmarks/envs.py --env webshop --data WEBSHOP_DATA_FOLDER
    python benchmarks/envs.py --env webshop --memory 10000

The random policy plays; its own time is part of the measurement and small. Starts are timed apart.
An environment whose extra is not installed is left out.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import time
from collections.abc import Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

import dreamgym as dg
from cells import commit, log, machine
from dreamgym.envs.episode import first_tasks
from dreamgym.envs.registry import environment_names
from dreamgym.envs.scripted_policies import make_policy
from dreamgym.errors import DreamGymError
from dreamgym.protocols import EnvironmentFactory
from dreamgym.types import Task, Transition

CONCURRENCY = (1, 64)
TASKS = 200


@dataclass
class Clock:
    """Sums over the episodes that were played."""

    episodes: int = 0
    steps: int = 0
    start_seconds: float = 0.0
    step_seconds: float = 0.0


async def play(factory: EnvironmentFactory, task: Task, seed: int, clock: Clock) -> None:
    """One episode; the history is kept for the policy as in a rollout."""
    async with aclosing(factory.make(task, seed=seed)) as environment:
        began = time.perf_counter()
        state = await environment.start()
        clock.start_seconds += time.perf_counter() - began
        policy = make_policy("random", environment, seed=seed)
        history: list[Transition] = []
        began = time.perf_counter()
        while not history or not history[-1].outcome.over:
            action = (await policy.act(task, history, state)).action
            history.append(Transition(state=state, action=action, outcome=await environment.step(action)))
            state = history[-1].outcome.next_state
        clock.step_seconds += time.perf_counter() - began
        clock.steps += len(history)
        clock.episodes += 1


async def measure(factory: EnvironmentFactory, concurrency: int, seconds: float) -> dict[str, Any]:
    """Episodes until the time is over; the ones that run then are finished."""
    tasks = await first_tasks(factory, factory.splits[0], TASKS)
    await play(factory, tasks[0], 0, Clock())  # imports, caches and indexes are not a step
    clock, number, began = Clock(), 0, time.perf_counter()

    async def player() -> None:
        nonlocal number
        while number == 0 or time.perf_counter() - began < seconds:
            number += 1
            await play(factory, tasks[number % len(tasks)], number, clock)

    await asyncio.gather(*(player() for _ in range(concurrency)))
    elapsed = time.perf_counter() - began
    alone = concurrency == 1
    return {
        "concurrency": concurrency,
        "episodes": clock.episodes,
        "steps": clock.steps,
        "seconds": round(elapsed, 2),
        "seconds_per_start": clock.start_seconds / clock.episodes if alone else None,
        # Concurrent episodes wait for one another, so their own times overlap.
        "seconds_per_step": clock.step_seconds / clock.steps if alone else elapsed / clock.steps,
    }


async def measure_environment(name: str, options: Mapping[str, Any], seconds: float) -> dict[str, Any] | None:
    try:
        async with aclosing(dg.make(name, **options)) as factory:
            cells = [await measure(factory, concurrency, seconds) for concurrency in CONCURRENCY]
    except DreamGymError as error:
        log(f"{name}: left out: {error}")
        return None
    return {
        "environment": name,
        "options": {key: str(value) for key, value in options.items()},
        "cells": cells,
    }


async def measure_memory(name: str, options: Mapping[str, Any], episodes: int) -> dict[str, Any]:
    """Resident memory after a tenth of the episodes, and after all."""
    process, clock, sizes = psutil.Process(), Clock(), {}
    async with aclosing(dg.make(name, **options)) as factory:
        tasks = await first_tasks(factory, factory.splits[0], TASKS)
        for number in range(1, episodes + 1):
            await play(factory, tasks[number % len(tasks)], number, clock)
            if number in (episodes // 10, episodes):
                gc.collect()
                sizes[number] = round(process.memory_info().rss / 2**20, 1)
    seconds = clock.start_seconds + clock.step_seconds
    return {
        "environment": name,
        "steps": clock.steps,
        "megabytes": sizes,
        "steps_per_second": clock.steps / seconds,
    }


def table(results: Sequence[Mapping[str, Any]]) -> str:
    lines = [
        "| environment | start, ms | step, ms | step at 64 episodes, starts included, ms |",
        "|---|---|---|---|",
    ]
    for result in results:
        one, many = result["cells"]
        values = (one["seconds_per_start"], one["seconds_per_step"], many["seconds_per_step"])
        shown = " | ".join(f"{1000 * value:.2f}" for value in values)
        lines.append(f"| `{result['environment']}` | {shown} |")
    return "\n".join(lines)


async def run(arguments: argparse.Namespace) -> None:
    options = {"data": arguments.data} if arguments.data else {}
    names = arguments.env or environment_names()
    if arguments.memory:
        found = [await measure_memory(name, options, arguments.memory) for name in names]
        print(json.dumps(found, indent=1))
    else:
        measured = [await measure_environment(name, options, arguments.seconds) for name in names]
        found = [each for each in measured if each is not None]
        print(table(found))
    if arguments.out:
        result = {"commit": commit(), "machine": machine(), "results": found}
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--env", action="append", help="may be repeated; by default all environments")
    parser.add_argument("--data", type=Path, help="the environment's option data")
    parser.add_argument("--seconds", type=float, default=5.0, help="for each environment and concurrency")
    parser.add_argument("--memory", type=int, help="measure memory over this many episodes instead")
    parser.add_argument("--out", type=Path, help="JSON file of the results")
    asyncio.run(run(parser.parse_args()))


if __name__ == "__main__":
    main()
