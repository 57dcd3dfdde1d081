"""Your own traces end to end: ingest chats, fine-tune an experience model, train an agent in it.

Minutes: 10. GPU: no. With DREAM=endpoint:MODEL@http://localhost:8000 a language model is prompted instead of
fine-tuning one.
"""

import asyncio
import json
import os
from itertools import product
from pathlib import Path

import dreamgym as dg

SCALE = float(os.environ.get("SCALE", "1"))  # below 1: shorter, and worse
MODEL = os.environ.get("MODEL", "tiny")
OUT = Path(os.environ.get("OUT", "runs/shop"))
DREAM = os.environ.get("DREAM", f"{OUT}/experience")


def write_chats(file: Path) -> None:
    """Stands in for your logs: one conversation per line, with a reward for the whole of it."""
    colours = ["red", "blue", "green"]
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("w", encoding="utf-8") as lines:
        for thing, wanted, bought in product(["mug", "pan", "lamp", "desk"], colours, colours):
            texts = [
                ("user", f"Buy the {wanted} {thing}."),
                ("assistant", f"search {thing}"),
                ("user", f"Found: {thing} in {', '.join(colours)}."),
                ("assistant", f"buy {bought} {thing}"),
                ("user", f"You bought the {bought} {thing}."),
            ]
            messages = [{"role": role, "content": text} for role, text in texts]
            task = {"id": f"{wanted}-{thing}", "instruction": texts[0][1]}
            won = wanted == bought
            chat = {"id": f"{thing}-{wanted}-{bought}", "messages": messages, "task": task}
            lines.write(json.dumps({**chat, "reward": float(won), "success": won}) + "\n")


async def main() -> None:
    write_chats(OUT / "chats.jsonl")
    print(dg.ingest(OUT / "chats.jsonl", OUT / "data", environment="shop"), "new trajectories")
    if ":" not in DREAM:
        await dg.fine_tune(OUT / "data", DREAM, model=MODEL, steps=max(2, int(500 * SCALE)))
    dream = dg.Dream.load(DREAM, data=OUT / "data", horizon=4)
    agent = dg.Agent.load("nano", data=dream.trajectories)
    agent.warm_start(dream.trajectories, steps=max(2, int(60 * SCALE)))
    learner, tasks = dg.GRPO(agent, learning_rate=2e-4), dg.TaskPool(await dream.tasks())
    for step in range(max(1, int(20 * SCALE))):
        groups = await dg.rollout(agent, dream, tasks.sample(6), group_size=4)
        print(step, learner.update(groups)["return_mean"])
        tasks.record(groups)
    agent.save(OUT / "agent")
    await agent.aclose()
    await dream.aclose()


asyncio.run(main())
