"""Your own environment: record, fine-tune a model of it, train in it, evaluate. Minutes: 15. GPU: no."""

import asyncio
import os
import random

import dreamgym as dg

OUT, MODEL = os.environ.get("OUT", "runs/vending"), os.environ.get("MODEL", "tiny")
SCALE = float(os.environ.get("SCALE", "1"))  # below 1: shorter, and worse


class Vending:
    """Buy the snack that the customer wants. Press a slot after paying; a wrong snack ends the episode."""

    horizon = 8
    refusals = ("Nothing happens.",)  # the answers that change nothing

    def __init__(self, seed: int) -> None:
        rng = random.Random(seed)
        self.slots = rng.sample(["nuts", "chips", "gum", "fruit"], 3)
        self.wanted, self.paid = rng.choice(self.slots), False

    def start(self) -> str:
        return f"A vending machine with slots 1, 2 and 3. The customer wants {self.wanted}."

    def admissible_actions(self) -> list[str]:
        return ["read labels", "insert coin", "press 1", "press 2", "press 3"]

    def step(self, action: str) -> tuple[str, float, bool]:  # text, reward, terminated
        if action == "read labels":
            return ", ".join(f"{n}: {snack}" for n, snack in enumerate(self.slots, 1)), 0.0, False
        if action == "insert coin" and not self.paid:
            self.paid = True
            return "The machine blinks.", 0.0, False
        if action in ("press 1", "press 2", "press 3") and self.paid:
            snack = self.slots[int(action[-1]) - 1]
            return f"Out comes {snack}.", float(snack == self.wanted), True
        return "Nothing happens.", 0.0, False

    def world_sheet(self) -> list[tuple[str, ...]]:  # optional: the hidden facts
        return [("in", snack, f"slot {n}") for n, snack in enumerate(self.slots, 1)]

    def expert_action(self) -> str:  # optional: a good action, to record successes
        return f"press {self.slots.index(self.wanted) + 1}" if self.paid else "insert coin"


async def main() -> None:
    data, experience, agent = (f"{OUT}/{part}" for part in ("data", "experience", "agent"))
    await dg.collect(Vending, data, episodes=int(400 * SCALE))
    await dg.fine_tune(data, experience, environment=Vending, model=MODEL, steps=int(600 * SCALE))
    steps = {"warm_start_steps": int(100 * SCALE), "steps": int(30 * SCALE), "agent": {"model": MODEL}}
    # The dream is measured first; gate="refuse", the default, stops where it is too wrong to train in.
    await dg.train(experience=experience, out=agent, environment=Vending, gate="warn", **steps)
    for policy in (f"{agent}@0", agent):  # before and after training in the dream
        found = await dg.evaluate(dg.Agent.load(policy), Vending, split="test", episodes=int(200 * SCALE))
        print(policy, found.success)


asyncio.run(main())
