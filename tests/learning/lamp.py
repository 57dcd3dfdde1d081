"""An environment as a user writes it: nothing but `start`, `step` and the list of actions."""

from __future__ import annotations

import random


class Lamp:
    """Press the button that the label names."""

    horizon = 4

    def __init__(self, seed: int) -> None:
        self.right = random.Random(seed).choice(["red", "green"])

    def start(self) -> str:
        return "A lamp with a label, a red and a green button."

    def admissible_actions(self) -> list[str]:
        return ["read label", "press red", "press green"]

    def step(self, action: str) -> tuple[str, float, bool]:
        if action == "read label":
            return f"The label says {self.right}.", 0.0, False
        if action == f"press {self.right}":
            return "The lamp is on.", 1.0, True
        return "Nothing happens.", 0.0, False
