"""Your own environment: recorded, dreamt, learnt and evaluated by one call. Minutes: 5. GPU: no."""

import asyncio
import os
import random

import dreamgym as dg

OUT, MODEL = os.environ.get("OUT", "runs/drinks"), os.environ.get("MODEL", "tiny")
SCALE = float(os.environ.get("SCALE", "1"))  # below 1: shorter, and worse
SEED = int(os.environ.get("SEED", "1"))


class Drinks:
    """Make the drink that the guest wants. Without a cup it spills; a wrong drink ends the episode, too."""

    horizon = 8

    def __init__(self, seed: int) -> None:
        rng = random.Random(seed)
        self.wanted = rng.choice(["tea", "cocoa", "coffee", "soup"])
        self.water, self.cup = rng.random() < 0.5, False  # the tank is full or empty: not shown

    def start(self) -> str:
        return f"A drinks machine without a cup. The guest wants {self.wanted}."

    def admissible_actions(self) -> list[str]:  # optional: what `collect` tries
        drinks = ["press tea", "press cocoa", "press coffee", "press soup"]
        return ["look at tank", "fill tank", "place cup", *drinks]

    def step(self, action: str) -> tuple[str, float, bool]:  # text, reward, terminated
        if action not in self.admissible_actions():
            return "Nothing happens.", 0.0, False
        if action == "look at tank":
            return f"The tank is {'full' if self.water else 'empty'}.", 0.0, False
        if action == "fill tank":
            over, self.water = self.water, True
            return ("The tank overflows." if over else "You fill the tank."), 0.0, over
        if action == "place cup":
            self.cup = True
            return "The cup is under the spout.", 0.0, False
        if not self.cup:
            return "It spills on the table.", 0.0, True
        if not self.water:
            return "The machine beeps: no water.", 0.0, False
        drink = action.removeprefix("press ")
        return f"Out comes {drink}.", float(drink == self.wanted), True


async def main() -> None:
    # --8<-- [start:learn]
    found = await dg.learn(Drinks, OUT, model=MODEL, scale=SCALE, seed=SEED, log=print)
    for when in ("before", "after"):  # practice in the dream
        print(when, found[when]["policy"], found[when]["success"])
    print("difference", found["comparison"]["difference"], found["report"])
    # --8<-- [end:learn]


asyncio.run(main())
