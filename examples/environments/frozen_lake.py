"""Gymnasium's FrozenLake in words: `--env examples/environments/frozen_lake.py:FrozenLake`.

It needs `gymnasium`. The ice is not slippery. Maps of 4 by 4 and 5 by 5 differ from task to task, and holes
are seen only from adjacent cells.
"""

from __future__ import annotations

from gymnasium.envs.toy_text.frozen_lake import FrozenLakeEnv, generate_random_map

import dreamgym as dg

WAYS = {"left": (0, -1), "down": (1, 0), "right": (0, 1), "up": (-1, 0)}
"""In the order of Gymnasium's actions."""
THINGS = {"F": "ice", "S": "ice", "H": "a hole", "G": "the goal"}
TASKS = {"train": 2_400, "validation": 400, "test": 600}


def lake(seed: int) -> tuple[str, ...]:
    return tuple(generate_random_map(size=4 + seed % 2, p=0.8, seed=seed))


class FrozenLake:
    """Walk over the ice to the goal; a hole ends the episode."""

    horizon = 20

    def __init__(self, seed: int) -> None:
        self.map = lake(seed)
        self.game = FrozenLakeEnv(desc=list(self.map), is_slippery=False)

    @staticmethod
    def tasks() -> dict[str, list[dg.Task]]:
        """No map is in two splits."""
        found: dict[str, list[dg.Task]] = {}
        seen: set[tuple[str, ...]] = set()
        seed = 0
        for split, count in TASKS.items():
            found[split] = []
            while len(found[split]) < count:
                if lake(seed) not in seen:
                    seen.add(lake(seed))
                    found[split].append(
                        dg.Task(
                            id=f"lake-{seed}",
                            instruction="Walk to the goal.",
                            environment="lake",
                            split=split,
                            parameters={"seed": seed},
                        )
                    )
                seed += 1
        return found

    def start(self) -> str:
        self.game.reset(seed=0)
        return self.view()

    def admissible_actions(self) -> list[str]:
        return [f"go {way}" for way in WAYS if self.beside(way) != "a wall"]

    def step(self, action: str) -> tuple[str, float, bool]:
        verb, _, way = action.strip().partition(" ")
        if verb != "go" or way not in WAYS:
            return "You can go left, down, right or up.", 0.0, False
        if self.beside(way) == "a wall":
            return f"There is a wall. {self.view()}", 0.0, False
        _, reward, terminated, _, _ = self.game.step(list(WAYS).index(way))
        if not terminated:
            return self.view(), 0.0, False
        return ("You reach the goal." if reward else "You fall into a hole."), float(reward), True

    def place(self) -> tuple[int, int]:
        return divmod(int(self.game.s), len(self.map))

    def beside(self, way: str) -> str:
        (row, column), (down, right), size = self.place(), WAYS[way], len(self.map)
        row, column = row + down, column + right
        return THINGS[self.map[row][column]] if 0 <= row < size and 0 <= column < size else "a wall"

    def view(self) -> str:
        row, column = self.place()
        last = len(self.map) - 1
        around = ", ".join(f"{way}: {self.beside(way)}" for way in WAYS)
        far = [f"{last - row} down"] * (row < last) + [f"{last - column} right"] * (column < last)
        return f"Row {row + 1}, column {column + 1}. {around}. The goal is {' and '.join(far)}."
