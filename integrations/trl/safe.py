"""A real environment that is small enough to learn on a CPU in minutes."""

import random

RIGHT = {"at rest": "turn left", "one click": "turn right", "two clicks": "pull handle"}
ACTIONS = ("turn left", "turn right", "pull handle", "push handle")
PLACES = tuple(RIGHT)


class Safe:
    """Open a safe: turn left, turn right, pull. A wrong move puts the dial back."""

    instruction = "Open the safe."
    horizon = 8

    def __init__(self, seed: int) -> None:
        self.colour = random.Random(seed).choice(["grey", "black", "green"])
        self.dial = PLACES[0]

    def start(self) -> str:
        return f"You see a {self.colour} safe. The dial is at rest."

    def world_sheet(self) -> list[tuple[str, str]]:
        return [("safe", self.colour)]

    def admissible_actions(self) -> tuple[str, ...]:
        return ACTIONS

    def step(self, action: str) -> tuple[str, float, bool]:
        if action not in ACTIONS:
            return "Nothing happens.", 0.0, False
        if action != RIGHT[self.dial]:
            self.dial = PLACES[0]
            return "The dial is at rest.", 0.0, False
        if self.dial == PLACES[-1]:
            return "The safe is open.", 1.0, True
        self.dial = PLACES[PLACES.index(self.dial) + 1]
        return f"The dial is at {self.dial}.", 0.0, False
