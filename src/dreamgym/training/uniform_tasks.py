"""The plain source of tasks: a fixed list, gone through in a new order each time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from random import Random

from dreamgym.errors import ConfigError
from dreamgym.types import JsonValue, RolloutGroup, Task


class UniformTasks:
    """Implements `TaskSource`: every task once before any comes again, in an order that the seed gives."""

    def __init__(self, tasks: Sequence[Task], *, seed: int = 0) -> None:
        if not tasks:
            raise ConfigError("expected at least one task to practise, got none")
        self._tasks = tuple(tasks)
        self._seed = seed
        self._drawn = 0
        self._taken = 0

    async def sample(self, count: int) -> list[Task]:
        chosen: list[Task] = []
        while len(chosen) < count:
            turn, place = divmod(self._drawn + len(chosen), len(self._tasks))
            order = list(range(len(self._tasks)))
            Random(f"tasks/{self._seed}/{turn}").shuffle(order)
            chosen += [self._tasks[number] for number in order[place : place + count - len(chosen)]]
        self._taken = count
        return chosen

    async def record(self, groups: Sequence[RolloutGroup]) -> dict[str, JsonValue]:
        """Only now is the last sample behind us: a step that was interrupted gets the same tasks again."""
        self._drawn += self._taken
        self._taken = 0
        return {}

    def state_dict(self) -> dict[str, JsonValue]:
        return {"drawn": self._drawn, "tasks": len(self._tasks)}

    def load_state_dict(self, stored: Mapping[str, JsonValue]) -> None:
        """
        Raises:
            ConfigError: the state is of another list.
        """
        drawn, tasks = stored.get("drawn"), stored.get("tasks")
        if tasks != len(self._tasks) or not isinstance(drawn, int):
            raise ConfigError(
                f"this run was begun with {tasks!r} tasks, now there are {len(self._tasks)}; "
                "use the same data to go on, or choose another folder"
            )
        self._drawn = drawn
