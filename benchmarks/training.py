"""What a step of learning costs: our loop against TRL's GRPO trainer, by stage, and how it grows.

    python benchmarks/training.py [--quick] [--json] [--preset tiny] [--rounds 3] [--steps 2]

Both sides start from the same weights and play the same tasks in the same world with as many episodes, turns
and tokens of a reply, then learn from them once with AdamW. TRL gets its rollouts from a `rollout_func` that
plays all episodes in step, each turn one batched `generate` of the trainer's model: what its users write
where there is no vLLM. In turn, in one run, each after a warm-up; who is first changes every round.

Where a step in the dream goes, with replay buffers of several sizes in turn, is in `training_dream.py`.

CPU time of one thread, since wall time depends on the other load of the machine.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any
from zlib import crc32

import torch

from dreamgym.agents import LanguageModelPolicy, prompt_reply_pairs
from dreamgym.config import AgentConfig, LearnerConfig
from dreamgym.data.datasets import builtin_dataset
from dreamgym.data.trajectories import read_trajectories
from dreamgym.models.local.language_model import LocalLanguageModel
from dreamgym.models.tiny import make_model, make_tokenizer
from dreamgym.protocols import Environment
from dreamgym.rl.grpo import GRPO
from dreamgym.rl.optimizers import TrainableModel
from dreamgym.rollouts import GroupReport, GroupSettings, Origin, run_groups
from dreamgym.testing import CorridorFactory
from dreamgym.types import (
    Outcome,
    State,
    Task,
)

WARM_UP = 1
DREAM_STEPS = 12
LENGTH = 9
AGENT = AgentConfig(max_tokens=8)
LEARNING = LearnerConfig(learning_rate=1e-4)


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Of one step."""

    tasks: int = 4
    group: int = 8
    turns: int = 8

    @property
    def episodes(self) -> int:
        return self.tasks * self.group


@dataclass(slots=True)
class Costs:
    """CPU seconds of one side's steps after the warm-up, and what was done in them."""

    rollouts: float = 0.0
    update: float = 0.0
    episodes: int = 0
    tokens: int = 0
    """Sampled, and trained on."""

    @property
    def rollouts_per_second(self) -> float:
        return self.episodes / self.rollouts

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.update


class Graded:
    """A corridor whose last turn is rewarded by a hash of all actions: every group has both outcomes."""

    def __init__(self, inner: Environment) -> None:
        self.task = inner.task
        self._inner = inner
        self._said = ""

    async def start(self) -> State:
        return await self._inner.start()

    async def step(self, action: str) -> Outcome:
        self._said += action
        return graded(await self._inner.step(action), self._said)

    async def aclose(self) -> None:
        await self._inner.aclose()


def graded(outcome: Outcome, said: str) -> Outcome:
    return replace(outcome, reward=float(crc32(said.encode()) & 1)) if outcome.over else outcome


class GradedFactory(CorridorFactory):
    def make(self, task: Task, *, seed: int = 0) -> Any:
        return Graded(super().make(task, seed=seed))


def world(shape: Shape) -> GradedFactory:
    return GradedFactory(length=LENGTH, horizon=shape.turns)


def corpus() -> Any:
    """A tokenizer of the usual size, from shipped trajectories."""
    recorded = islice(read_trajectories(builtin_dataset()), 40)
    lasts = ([*prompt_reply_pairs(each, AGENT)][-1] for each in recorded)
    return make_tokenizer((asked + answer for asked, answer in lasts), vocab_size=2048)


async def rolled_out(
    served: LocalLanguageModel, factory: Any, tasks: Sequence[Task], shape: Shape, step: int
) -> GroupReport:
    return await run_groups(
        factory,
        lambda environment, name, seed: LanguageModelPolicy(served, AGENT, conversation=name, seed=seed),
        tasks,
        name=f"step-{step}",
        seed=step,
        settings=GroupSettings(size=shape.group),
        origin=Origin(source="synthetic"),
    )


def sampled(report: GroupReport) -> int:
    turns = [turn for group in report.groups for each in group.trajectories for turn in each.transitions]
    return sum(len(turn.completion.token_ids) for turn in turns if turn.completion is not None)


async def ours(model: Any, tokenizer: Any, shape: Shape, steps: int) -> Costs:
    served = LocalLanguageModel(model, tokenizer)
    learner = GRPO(TrainableModel(model, served.updating), LEARNING)
    factory, found = world(shape), Costs()
    tasks = await factory.tasks("train", shape.tasks)
    for step in range(WARM_UP + steps):
        began = time.process_time()
        report = await rolled_out(served, factory, tasks, shape, step)
        played = time.process_time()
        learner.update(report.groups)
        if step >= WARM_UP:
            found.rollouts += played - began
            found.update += time.process_time() - played
            found.episodes += report.episodes
            found.tokens += sampled(report)
    await served.aclose()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="one round, small sizes")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--preset", default="tiny")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=2)
    arguments = parser.parse_args()
    rounds, steps = (1, 1) if arguments.quick else (arguments.rounds, arguments.steps)
    torch.set_num_threads(1)
    tokenizer, shape = corpus(), Shape()

    def model() -> Any:
        return make_model(arguments.preset, tokenizer)

    result = {
        "machine": f"{os.cpu_count()} cores, {platform.machine()}, torch {torch.__version__}, 1 thread",
        "model": f"{arguments.preset}, {model().num_parameters():,} parameters",
        "step": f"{shape.tasks} tasks x {shape.group} episodes x {shape.turns} turns",
        "rounds": rounds,
        "steps": steps,
        "dream": in_the_dream(model, tokenizer, quick=arguments.quick),
        "growth": growth(model, tokenizer, steps, quick=arguments.quick),
        "against_trl": against_trl(model, tokenizer, shape, rounds, steps),
    }
    print(json.dumps(result, indent=2) if arguments.json else table(result))


def log(what: str, found: object) -> None:
    """What is known so far: all of it takes minutes."""
    print(f"{what}: {found}", file=sys.stderr, flush=True)


def against_trl(
    model: Callable[[], Any], tokenizer: Any, shape: Shape, rounds: int, steps: int
) -> dict[str, Any]:
    from training_trl import theirs

    sides: dict[str, Callable[[], Costs]] = {
        "ours": lambda: asyncio.run(ours(model(), tokenizer, shape, steps)),
        "TRL": lambda: theirs(model(), tokenizer, shape, steps),
    }
    found: dict[str, list[Costs]] = {name: [] for name in sides}
    for number in range(rounds):
        for name in list(sides) if number % 2 == 0 else list(reversed(sides)):
            found[name].append(sides[name]())
            log(f"{name}, round {number}", found[name][-1])

    def ratio(of: Callable[[Costs], float]) -> dict[str, float]:
        each = [of(mine) / of(other) for mine, other in zip(found["ours"], found["TRL"], strict=True)]
        return {
            "median": round(statistics.median(each), 2),
            "least": round(min(each), 2),
            "most": round(max(each), 2),
        }

    return {
        **{
            name: {
                "rollouts_per_second": round(statistics.median(c.rollouts_per_second for c in costs), 2),
                "update_tokens_per_second": round(statistics.median(c.tokens_per_second for c in costs)),
                "tokens_per_step": round(statistics.median(c.tokens for c in costs) / steps),
            }
            for name, costs in found.items()
        },
        "rollouts_ours_to_trl": ratio(lambda costs: costs.rollouts_per_second),
        "update_ours_to_trl": ratio(lambda costs: costs.tokens_per_second),
    }


def in_the_dream(model: Callable[[], Any], tokenizer: Any, *, quick: bool) -> dict[str, Any]:
    from training_dream import dreams

    sizes, steps = ((1_000, 10_000), 2) if quick else ((1_000, 10_000, 100_000), DREAM_STEPS)
    return asyncio.run(dreams(model, tokenizer, sizes, steps))


def growth(model: Callable[[], Any], tokenizer: Any, steps: int, *, quick: bool) -> dict[str, Any]:
    """CPU milliseconds per episode and turn, as steps get wider and episodes longer."""

    def each(shape: Shape) -> dict[str, float]:
        costs = asyncio.run(ours(model(), tokenizer, shape, steps))
        turns = costs.episodes * shape.turns
        found = {
            "rollout_ms_per_turn": round(1000 * costs.rollouts / turns, 2),
            "update_ms_per_turn": round(1000 * costs.update / turns, 2),
        }
        log(f"{shape.episodes} episodes of {shape.turns} turns", found)
        return found

    tasks, lengths = ((2, 4), (4, 8)) if quick else ((2, 4, 8, 16), (4, 8, 16, 32))
    return {
        "episodes": {Shape(tasks=n).episodes: each(Shape(tasks=n)) for n in tasks},
        "turns": {n: each(Shape(turns=n)) for n in lengths},
    }


def table(result: dict[str, Any]) -> str:
    lines = [f"{name}: {result[name]}" for name in ("machine", "model", "step", "rounds", "steps")]
    compared = result["against_trl"]
    lines += ["", f"{'':<8}{'rollouts / s':>14}{'update tokens / s':>20}{'tokens / step':>16}"]
    for name in ("ours", "TRL"):
        row = compared[name]
        numbers = f"{row['rollouts_per_second']:>14}{row['update_tokens_per_second']:>20}"
        lines.append(f"{name:<8}{numbers}{row['tokens_per_step']:>16}")
    for name in ("rollouts_ours_to_trl", "update_ours_to_trl"):
        row = compared[name]
        lines.append(f"{name}: {row['median']} ({row['least']} to {row['most']})")
    for what, sizes in result["growth"].items():
        lines += ["", f"{what:<12}{'rollout ms / turn':>20}{'update ms / turn':>20}"]
        for size, row in sizes.items():
            lines.append(f"{size:<12}{row['rollout_ms_per_turn']:>20}{row['update_ms_per_turn']:>20}")
    sizes = result["dream"]["sizes"]
    stages = [name for name in next(iter(sizes.values())) if name != "growth"]
    lines += ["", f"CPU ms of a step in the dream, by stage: medians of {result['dream']['steps']} steps"]
    lines.append(f"{'buffer rows':<12}" + "".join(f"{name.replace('_', ' '):>18}" for name in stages))
    for size, row in sizes.items():
        lines.append(f"{size:<12}" + "".join(f"{row[name]:>18}" for name in stages))
    for size, row in sizes.items():
        found = row["growth"]
        lines.append(f"a step with {size} rows to one with the fewest: {found['ratio']} {found['interval']}")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
