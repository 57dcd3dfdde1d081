"""A real environment that is small enough to learn on a CPU in minutes."""

import random

COLOURS = ("red", "green", "blue", "white")


class Lamp:
    """Press the button that the label names."""

    instruction = "Switch on the lamp."
    horizon = 5

    def __init__(self, seed: int) -> None:
        self.right = random.Random(seed).choice(COLOURS)

    def start(self) -> str:
        return "You see a lamp with a label and a red, a green, a blue and a white button."

    def world_sheet(self) -> list[tuple[str, str]]:
        return [("right", self.right)]

    def admissible_actions(self) -> list[str]:
        return ["read label", *(f"press {colour}" for colour in COLOURS)]

    def step(self, action: str) -> tuple[str, float, bool]:
        if action == "read label":
            return f"The label says {self.right}.", 0.0, False
        if action == f"press {self.right}":
            return "The lamp is on.", 1.0, True
        if action in self.admissible_actions():
            return "The fuse blows.", 0.0, True
        return "Nothing happens.", 0.0, False
