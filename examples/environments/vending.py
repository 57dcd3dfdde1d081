"""A vending machine with hidden facts and counters: `--env examples/environments/vending.py:Vending`.

What is in which slot, the prices and the slot that jams differ from task to task and are seen only by trying.
There are no hints for experience models: no facts, no annotator, no goal check, no expert.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

import dreamgym as dg

SLOTS = ("A", "B", "C")
PRODUCTS = ("nuts", "chips", "gum", "fruit", "juice", "soda", "mints", "cake")
TASKS = {"train": 2_400, "validation": 400, "test": 600}


@dataclass(frozen=True)
class Machine:
    """The facts of a task."""

    products: tuple[str, ...]
    prices: tuple[int, ...]
    jammed: int
    """The slot that jams once; one more than the last for none."""
    coins: int
    wanted: str

    @staticmethod
    def of(seed: int) -> Machine:
        rng = random.Random(f"vending:{seed}")
        products = tuple(rng.sample(PRODUCTS, len(SLOTS)))
        prices = tuple(rng.randint(1, 3) for _ in SLOTS)
        return Machine(
            products, prices, rng.randrange(len(SLOTS) + 1), rng.randint(3, 5), rng.choice(products)
        )


class Vending:
    """Buy the product that is asked for; it can be taken when it lies in the tray."""

    horizon = 15

    def __init__(self, seed: int) -> None:
        self.machine = Machine.of(seed)
        self.coins, self.inserted = self.machine.coins, 0
        self.tray: list[str] = []
        self.stuck: str | None = None
        self.jammed = self.machine.jammed

    @staticmethod
    def tasks() -> dict[str, list[dg.Task]]:
        """No machine is in two splits."""
        found: dict[str, list[dg.Task]] = {}
        seen: set[tuple[object, ...]] = set()
        seed = 0
        for split, count in TASKS.items():
            found[split] = []
            while len(found[split]) < count:
                machine = Machine.of(seed)
                facts = (machine.products, machine.prices, machine.jammed)
                if facts not in seen:
                    seen.add(facts)
                    found[split].append(
                        dg.Task(
                            id=f"vending-{seed}",
                            instruction=f"Get the {machine.wanted}.",
                            environment="vending",
                            split=split,
                            parameters={"seed": seed},
                        )
                    )
                seed += 1
        return found

    def start(self) -> str:
        return self.look()

    def admissible_actions(self) -> list[str]:
        slots = [f"{verb} {slot}" for verb in ("read label", "press") for slot in SLOTS]
        return [
            "look",
            *slots,
            "insert coin",
            "refund",
            "shake machine",
            *(f"take {product}" for product in dict.fromkeys(self.tray)),
        ]

    def step(self, action: str) -> tuple[str, float, bool]:
        verb, _, argument = action.strip().rpartition(" ")
        if verb == "take" and argument in self.tray:
            self.tray.remove(argument)
            won = argument == self.machine.wanted
            return f"You take the {argument}.", float(won), won
        return self.reply(action.strip(), verb, argument), 0.0, False

    def reply(self, action: str, verb: str, argument: str) -> str:
        if action == "look":
            return self.look()
        if action == "insert coin":
            return self.insert()
        if action == "refund":
            return self.refund()
        if action == "shake machine":
            return self.shake()
        if verb == "take":
            return "That is not in the tray."
        if verb in ("read label", "press"):
            if argument not in SLOTS:
                return "There is no such slot."
            number = SLOTS.index(argument)
            return self.press(number) if verb == "press" else self.label(number)
        return "You cannot do that."

    def look(self) -> str:
        tray = " and ".join(self.tray) or "nothing"
        return f"A vending machine with slots A, B and C. In the tray: {tray}. {self.counters()}"

    def counters(self) -> str:
        return f"Coins inserted: {self.inserted}. Coins left: {self.coins}."

    def label(self, number: int) -> str:
        return f"Slot {SLOTS[number]}: {self.machine.products[number]}, price {self.machine.prices[number]}."

    def insert(self) -> str:
        if not self.coins:
            return "You have no coins left."
        self.coins, self.inserted = self.coins - 1, self.inserted + 1
        return f"You insert a coin. {self.counters()}"

    def refund(self) -> str:
        if not self.inserted:
            return "There is nothing to refund."
        self.coins, self.inserted = self.coins + self.inserted, 0
        return f"The machine returns your coins. {self.counters()}"

    def shake(self) -> str:
        if self.stuck is None:
            return "The machine rattles. Nothing falls."
        product, self.stuck = self.stuck, None
        self.tray.append(product)
        return f"The {product} falls into the tray."

    def press(self, number: int) -> str:
        if self.stuck is not None:
            return "The machine is jammed."
        price = self.machine.prices[number]
        if self.inserted < price:
            return f"The display shows: insert {price - self.inserted} more."
        self.inserted -= price
        product = self.machine.products[number]
        if number == self.jammed:
            self.jammed, self.stuck = len(SLOTS), product
            return "Something is stuck behind the glass."
        self.tray.append(product)
        return f"The {product} falls into the tray."
