"""Success and reward of scripted policies in WebShop.

    python benchmarks/webshop.py --out results/webshop/own-catalogue.json
    python benchmarks/webshop.py --data WEBSHOP_DATA_FOLDER --out results/webshop/1000-products.json

`found` is the share of episodes whose purchase is the product that the goal was made from. Intervals are 95%
Wilson intervals.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
from pathlib import Path
from typing import Any

import dreamgym as dg
from cells import commit, machine
from dreamgym.envs.scripted_policies import make_policy
from dreamgym.envs.webshop.shop import Shop, open_shop
from dreamgym.evaluation.statistics import wilson
from dreamgym.protocols import Environment
from dreamgym.types import Outcome, Transition

POLICIES = ("expert", "expert:heuristic", "noisy:0.3", "random")


async def play(environment: Environment, policy: str, seed: int) -> tuple[Outcome, int, str]:
    """The last outcome, the number of actions, and the product whose page was open last."""
    state, opened = await environment.start(), ""
    player = make_policy(policy, environment, seed=seed)
    history: list[Transition] = []
    while not history or not history[-1].outcome.over:
        action = (await player.act(environment.task, history, state)).action
        outcome = await environment.step(action)
        buys = "click[buy now]" in (outcome.next_state.admissible_actions or ())
        if buys and "click[buy now]" not in (state.admissible_actions or ()) and action.startswith("click["):
            opened = action[6:-1] if not action.startswith("click[<") else opened
        history.append(Transition(state=state, action=action, outcome=outcome))
        state = outcome.next_state
    return history[-1].outcome, len(history), opened


async def measure(policy: str, data: Path | None, episodes: int, split: str) -> dict[str, Any]:
    factory = dg.make("webshop", **({"data": data} if data else {}))
    tasks = await factory.tasks(split, episodes)
    played = [await play(factory.make(task), policy, number) for number, task in enumerate(tasks)]
    won = sum(outcome.success for outcome, _, _ in played)
    found = sum(
        outcome.terminated and task.id.startswith(f"{opened}-")
        for task, (outcome, _, opened) in zip(tasks, played, strict=True)
    )
    return {
        "policy": policy,
        "episodes": len(played),
        "success": won / len(played),
        "interval": wilson(won, len(played)),
        "found": found / len(played),
        "mean_reward": sum(outcome.reward for outcome, _, _ in played) / len(played),
        "mean_steps": sum(steps for _, steps, _ in played) / len(played),
    }


def catalogue(shop: Shop) -> dict[str, Any]:
    texts = "\n".join(f"{product.id} {product.title}" for product in shop.products)
    return {
        "name": "the package's own" if shop.own else "WebShop data",
        "products": len(shop.products),
        "goals": len(shop.goals),
        "sha256_of_ids_and_titles": hashlib.sha256(texts.encode()).hexdigest(),
    }


async def run(arguments: argparse.Namespace) -> None:
    rows = [await measure(policy, arguments.data, arguments.episodes, arguments.split) for policy in POLICIES]
    print("| policy | success [95%] | bought the target | mean reward | actions |\n|---|---|---|---|---|")
    for row in rows:
        low, high = row["interval"]
        share = f"{row['success']:.1%} [{low:.1%}, {high:.1%}]"
        print(
            f"| `{row['policy']}` | {share} | {row['found']:.1%} | {row['mean_reward']:.3f} "
            f"| {row['mean_steps']:.1f} |"
        )
    if arguments.out:
        result = {
            "commit": commit(),
            "machine": machine(),
            "catalogue": catalogue(open_shop(arguments.data, None, "auto")),
            "split": arguments.split,
            "policies": rows,
        }
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, help="folder with WebShop's JSON files")
    parser.add_argument("--episodes", type=int, default=500)
    parser.add_argument("--split", default="test")
    parser.add_argument("--out", type=Path, help="JSON file of the results")
    asyncio.run(run(parser.parse_args()))


if __name__ == "__main__":
    main()
