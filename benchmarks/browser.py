"""Success of scripted policies in the browser for each kind of task, and what the state mapping keeps.

    python benchmarks/browser.py --policy expert --episodes 20 --out results/browser/miniwob-expert.json
    python benchmarks/browser.py --env webshop-site --policy random --episodes 50

`kept` is the share of the actions with elements whose elements are all in the state; `tokens` counts words
and punctuation marks of the states and of the whole accessibility trees of the same pages. Intervals are 95%
Wilson intervals.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import time
from collections import defaultdict
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import dreamgym as dg
from cells import commit, log, machine
from dreamgym.envs.browser.actions import parse_action
from dreamgym.envs.browser.environment import BrowserEpisode, BrowserFactory
from dreamgym.envs.browser.snapshot import render_tree
from dreamgym.envs.scripted_policies import make_policy
from dreamgym.errors import EpisodeFailedError
from dreamgym.evaluation.statistics import wilson
from dreamgym.types import Task, Transition

_TOKEN = re.compile(r"\w+|[^\w\s]")


@dataclass
class Tally:
    """Sums over the episodes of one kind of task."""

    episodes: int = 0
    won: int = 0
    failed: int = 0
    reward: float = 0.0
    actions: int = 0
    named: int = 0
    kept: int = 0
    tokens: int = 0
    tree_tokens: int = 0
    start_seconds: float = 0.0
    step_seconds: float = 0.0

    def row(self) -> dict[str, Any]:
        played, steps = max(1, self.episodes), max(1, self.actions)
        return {
            "episodes": self.episodes,
            "failed_episodes": self.failed,
            "success": self.won / played,
            "interval": wilson(self.won, self.episodes) if self.episodes else None,
            "mean_reward": self.reward / played,
            "mean_steps": self.actions / played,
            "actions_with_elements": self.named,
            "kept": self.kept / self.named if self.named else None,
            "tokens_per_state": self.tokens / steps,
            "tokens_per_tree": self.tree_tokens / steps,
            "seconds_per_start": self.start_seconds / played,
            "seconds_per_step": self.step_seconds / steps,
        }


async def play(environment: BrowserEpisode, policy: str, seed: int, tally: Tally) -> None:
    began = time.perf_counter()
    state = await environment.start()
    tally.start_seconds += time.perf_counter() - began
    player = make_policy(policy, environment, seed=seed)
    history: list[Transition] = []
    while not history or not history[-1].outcome.over:
        action = (await player.act(environment.task, history, state)).action
        tally.tokens += len(_TOKEN.findall(state.text))
        tally.tree_tokens += len(_TOKEN.findall(render_tree(environment.tree)))
        parsed = parse_action(action)
        if parsed is not None and parsed.elements:
            tally.named += 1
            tally.kept += all(f"[{number}]" in state.text for number in parsed.elements)
        began = time.perf_counter()
        outcome = await environment.step(action)
        tally.step_seconds += time.perf_counter() - began
        history.append(Transition(state=state, action=action, outcome=outcome))
        state = outcome.next_state
    tally.episodes += 1
    tally.actions += len(history)
    tally.won += history[-1].outcome.success
    tally.reward += history[-1].outcome.reward


async def chosen_tasks(factory: BrowserFactory, split: str, episodes: int) -> list[Task]:
    """The first `episodes` of each kind, or in all where tasks have no kinds."""
    if factory.name != "miniwob":
        return list(await factory.tasks(split, episodes))
    return sorted(await factory.tasks(split), key=lambda task: (task.family, task.id))


async def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    options: dict[str, Any] = {}
    if arguments.env == "miniwob":
        options["instances"] = {"train": arguments.episodes, "test": arguments.episodes}
    tallies: dict[str, Tally] = defaultdict(Tally)
    async with aclosing(cast(BrowserFactory, dg.make(arguments.env, **options))) as factory:
        waiting = list(enumerate(await chosen_tasks(factory, arguments.split, arguments.episodes)))

        async def player() -> None:
            while waiting:
                number, task = waiting.pop(0)
                tally = tallies[str(task.family) if arguments.env == "miniwob" else arguments.env]
                try:
                    async with aclosing(factory.make(task)) as environment:
                        await play(environment, arguments.policy, number, tally)
                except EpisodeFailedError as error:
                    tally.failed += 1
                    log(f"{task.id}: {error}")
                if number % 20 == 0:
                    log(f"{arguments.env} {arguments.policy}: {number} started")

        await asyncio.gather(*(player() for _ in range(arguments.concurrency)))
    whole = Tally()
    for tally in tallies.values():
        for name in vars(whole):
            setattr(whole, name, getattr(whole, name) + getattr(tally, name))
    return {"kinds": {kind: tallies[kind].row() for kind in sorted(tallies)}, "all": whole.row()}


def table(result: dict[str, Any]) -> str:
    lines = ["| kind | success [95%] | actions | kept | tokens, tree → state |", "|---|---|---|---|---|"]
    for kind, row in {**result["kinds"], "**all**": result["all"]}.items():
        low, high = row["interval"] or (0, 0)
        kept = f"{row['kept']:.1%}" if row["kept"] is not None else "–"
        lines.append(
            f"| {kind} | {row['success']:.0%} [{low:.0%}, {high:.0%}] of {row['episodes']} "
            f"| {row['mean_steps']:.1f} | {kept} "
            f"| {row['tokens_per_tree']:.0f} → {row['tokens_per_state']:.0f} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--env", choices=("miniwob", "webshop-site"), default="miniwob")
    parser.add_argument("--policy", default="expert")
    parser.add_argument("--episodes", type=int, default=20, help="of each kind of task")
    parser.add_argument("--split", default="test")
    parser.add_argument("--concurrency", type=int, default=1, help="episodes at once; times then overlap")
    parser.add_argument("--out", type=Path, help="JSON file of the results")
    arguments = parser.parse_args()
    result = asyncio.run(measure(arguments))
    print(table(result))
    if arguments.out:
        given = {key: value for key, value in vars(arguments).items() if key != "out"}
        written = {"commit": commit(), "machine": machine(), **given, **result}
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.write_text(json.dumps(written, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
