"""Seconds per real step and per dreamt step of every environment, at 1 and 64 concurrent episodes, the
break-even between them as a table and a plot, and memory of many episodes.

    python benchmarks/envs.py --out results/envs.json --plot docs/assets/envs.svg
    python benchmarks/envs.py --env webshop --data WEBSHOP_DATA_FOLDER
    python benchmarks/envs.py --env webshop --memory 10000

Real steps: the random policy plays; its own time is part of the measurement and small. Starts are timed
apart.

Dreamt steps: an untrained `tiny`, as large as the default experience model, gets the prompts that fine-tuning
would make from a few recorded episodes, and samples as many tokens as their replies have. Known replies and
cached prompts, which need no request, are not counted, so a dream is rather faster.

The break-even is the number of steps from which a dream is ahead of reality at 64 episodes, with the time of
its fine-tuning (`--fine-tuning`, seconds). An environment whose extra is not installed is left out.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import math
import os
import random
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

import dreamgym as dg
from cells import commit, log, machine
from dreamgym.charts import Chart, Line, Point, draw_file
from dreamgym.config import Config, EnvironmentConfig
from dreamgym.data.trajectories import read_trajectories
from dreamgym.envs.episode import first_tasks
from dreamgym.envs.registry import environment_names, find_environment
from dreamgym.envs.scripted_policies import make_policy
from dreamgym.errors import DreamGymError, EpisodeFailedError
from dreamgym.protocols import EnvironmentFactory
from dreamgym.training.annotators import choose_annotator
from dreamgym.training.black_box import resolve_facts
from dreamgym.training.experience import split_examples
from dreamgym.training.model_setup import load_model
from dreamgym.types import CompletionRequest, FailureKind, Task, Transition

CONCURRENCY = (1, 64)
TASKS = 200
RECORDED = 24
"""Episodes whose prompts and replies a dream is measured with."""
FINE_TUNING = 1050.0
"""Seconds of the default experience model on one core (`docs/benchmarks.md`)."""


@dataclass
class Clock:
    """Sums over the episodes that were played."""

    episodes: int = 0
    failed: int = 0
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
            try:
                await play(factory, tasks[number % len(tasks)], number, clock)
            except EpisodeFailedError:  # a page that did not load in time
                clock.failed += 1

    await asyncio.gather(*(player() for _ in range(concurrency)))
    if not clock.steps:
        raise EpisodeFailedError(FailureKind.TIMEOUT, f"all {clock.failed} episodes failed")
    elapsed = time.perf_counter() - began
    alone = concurrency == 1
    return {
        "concurrency": concurrency,
        "episodes": clock.episodes,
        "failed": clock.failed,
        "steps": clock.steps,
        "seconds": round(elapsed, 2),
        "seconds_per_start": clock.start_seconds / clock.episodes if alone else None,
        # Concurrent episodes wait for one another, so their own times overlap.
        "seconds_per_step": clock.step_seconds / clock.steps if alone else elapsed / clock.steps,
    }


async def measure_dream(name: str, options: Mapping[str, Any], seconds: float) -> dict[str, Any]:
    """Requests of a dream of this environment, answered by an untrained model with as many tokens."""
    from dreamgym.models.local.language_model import LocalLanguageModel

    spec = find_environment(name)
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "recorded"
        # Many browser pages that load at once are slow to start.
        await dg.collect(name, out, episodes=RECORDED, policy="random", options=dict(options), concurrency=4)
        recorded = list(read_trajectories(out))
        config = Config(environment=EnvironmentConfig(name=name, options=dict(options)))
        config = resolve_facts(config, spec, recorded)
        annotator = await choose_annotator(None, spec, recorded, default_annotations=Path(folder))
        training, held_out = await split_examples(config, recorded, annotator, spec.actor, None)
    examples = [each for each in (*training, *held_out) if each.position >= 0]
    random.Random(0).shuffle(examples)
    loaded = load_model(config.experience, examples, 0)
    model = LocalLanguageModel(loaded.model, loaded.tokenizer)
    lengths = [len(loaded.tokenizer(each.reply)["input_ids"]) for each in examples]
    prompts = [len(loaded.tokenizer(each.prompt)["input_ids"]) for each in examples]
    cells, number = [], 0
    for concurrency in CONCURRENCY:
        steps, began = 0, time.perf_counter()

        async def player(began: float) -> None:
            nonlocal number, steps
            while time.perf_counter() - began < seconds:
                number += 1
                chosen = number % len(examples)
                await model.complete(
                    CompletionRequest(
                        prompt=f"{examples[chosen].prompt}{number}\n",  # no prompt twice: none is in a cache
                        max_tokens=min(lengths[chosen], config.experience.max_tokens),
                        temperature=1.0,
                        seed=number,
                    )
                )
                steps += 1

        await asyncio.gather(*(player(began) for _ in range(concurrency)))
        elapsed = time.perf_counter() - began
        cells.append({"concurrency": concurrency, "steps": steps, "seconds_per_step": elapsed / steps})
    await model.aclose()
    return {
        "facts": config.experience.facts,
        "prompt_tokens": round(sum(prompts) / len(prompts)),
        "reply_tokens": round(sum(lengths) / len(lengths)),
        "cells": cells,
    }


async def measure_environment(name: str, options: Mapping[str, Any], seconds: float) -> dict[str, Any] | None:
    try:
        async with aclosing(dg.make(name, **options)) as factory:
            cells = [await measure(factory, concurrency, seconds) for concurrency in CONCURRENCY]
        dream = await measure_dream(name, options, seconds)
    except DreamGymError as error:
        log(f"{name}: left out: {error}")
        return None
    return {
        "environment": name,
        "options": {key: str(value) for key, value in options.items()},
        "load": os.getloadavg()[0],
        "cells": cells,
        "dream": dream,
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


def break_even(result: Mapping[str, Any], fine_tuning: float) -> float | None:
    """The steps from which a dream with its fine-tuning is ahead at 64 episodes; None for never."""
    real, dreamt = (each["cells"][1]["seconds_per_step"] for each in (result, result["dream"]))
    return fine_tuning / (real - dreamt) if real > dreamt else None


def table(results: Sequence[Mapping[str, Any]], fine_tuning: float) -> str:
    lines = [
        "| environment | start, ms | real step, ms | at 64 episodes, starts included, ms | dreamt step, ms "
        "| at 64 episodes, ms | real / dreamt at 64 | break-even, steps | tokens of prompt and reply |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for result in results:
        (one, many), dream = result["cells"], result["dream"]
        alone, together = (each["seconds_per_step"] for each in dream["cells"])
        values = (one["seconds_per_start"], one["seconds_per_step"], many["seconds_per_step"])
        shown = " | ".join(f"{1000 * value:.2f}" for value in (*values, alone, together))
        steps = break_even(result, fine_tuning)
        after = "never" if steps is None else f"{steps:,.0f}"
        lines.append(
            f"| `{result['environment']}` | {shown} | {many['seconds_per_step'] / together:.2f} | {after} | "
            f"{dream['prompt_tokens']}, {dream['reply_tokens']} |"
        )
    return "\n".join(lines)


def plot(results: Sequence[Mapping[str, Any]]) -> str:
    """Real and dreamt steps at 64 episodes, the cheapest environment first."""
    known = sorted(results, key=lambda each: each["cells"][1]["seconds_per_step"])

    def line(label: str, colour: int, parts: Sequence[Mapping[str, Any]]) -> Line:
        milliseconds = [1000 * each["cells"][1]["seconds_per_step"] for each in parts]
        points = tuple(Point(x=x, y=math.log10(value)) for x, value in enumerate(milliseconds))
        return Line(label=label, points=points, colour=colour)

    return draw_file(
        Chart(
            title="Milliseconds per step, 64 concurrent episodes",
            lines=(
                line("real environment, starts included", 0, known),
                line("dreamt, untrained `tiny` with replies as long", 1, [each["dream"] for each in known]),
            ),
            across="environment",
            ticks=tuple(each["environment"] for each in known),
            log10=True,
        )
    )


async def run(arguments: argparse.Namespace) -> None:
    options = {"data": arguments.data} if arguments.data else {}
    names = arguments.env or environment_names()
    if arguments.memory:
        found = [await measure_memory(name, options, arguments.memory) for name in names]
        print(json.dumps(found, indent=1))
    else:
        measured = [await measure_environment(name, options, arguments.seconds) for name in names]
        found = [each for each in measured if each is not None]
        print(table(found, arguments.fine_tuning))
        if arguments.plot:
            arguments.plot.write_text(plot(found), encoding="utf-8")
    if arguments.out:
        result = {
            "commit": commit(),
            "machine": machine(),
            "fine_tuning": arguments.fine_tuning,
            "results": found,
        }
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
    parser.add_argument(
        "--fine-tuning", type=float, default=FINE_TUNING, help="seconds of fine-tuning a dream"
    )
    parser.add_argument("--plot", type=Path, help="SVG file of the plot")
    parser.add_argument("--out", type=Path, help="JSON file of the results")
    asyncio.run(run(parser.parse_args()))


if __name__ == "__main__":
    main()
