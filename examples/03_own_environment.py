"""Your own environment: recorded, dreamt, learnt and evaluated by one call. Minutes: 15. GPU: no."""

import asyncio
import os
import random

import dreamgym as dg

OUT, MODEL = os.environ.get("OUT", "runs/vending"), os.environ.get("MODEL", "tiny")
SCALE = float(os.environ.get("SCALE", "1"))  # below 1: shorter, and worse


class Vending:
    """Buy the snack that the customer wants: read the labels, pay, press. A wrong snack ends the episode."""

    horizon = 8

    def __init__(self, seed: int) -> None:
        rng = random.Random(seed)
        self.slots = rng.sample(["nuts", "chips", "gum", "fruit"], 3)
        self.wanted, self.paid = rng.choice(self.slots), False

    def start(self) -> str:
        return f"A vending machine with slots 1, 2 and 3. The customer wants {self.wanted}."

    def admissible_actions(self) -> list[str]:  # optional: what `collect` tries
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


async def main() -> None:
    # --8<-- [start:learn]
    found = await dg.learn(Vending, OUT, model=MODEL, scale=SCALE, seed=1, log=print)
    for when in ("before", "after"):  # practice in the dream
        print(when, found[when]["policy"], found[when]["success"])
    print("difference", found["comparison"]["difference"], found["report"])
    # --8<-- [end:learn]


asyncio.run(main())
