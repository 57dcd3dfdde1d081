"""The simplest task source: a fixed list in a new random order each epoch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from random import Random

from dreamgym.errors import ConfigError
from dreamgym.types import JsonValue, RolloutGroup, Task


class UniformTasks:
    """Implements `TaskSource`: every task once per epoch, in an order that the seed determines."""

    def __init__(self, tasks: Sequence[Task], *, seed: int = 0) -> None:
        if not tasks:
            raise ConfigError("expected at least one training task, got none")
        self._tasks = tuple(tasks)
        self._seed = seed
        self._drawn = 0
        self._taken = 0

    async def sample(self, count: int) -> list[Task]:
        chosen: list[Task] = []
        while len(chosen) < count:
            epoch, place = divmod(self._drawn + len(chosen), len(self._tasks))
            order = list(range(len(self._tasks)))
            Random(f"tasks/{self._seed}/{epoch}").shuffle(order)
            chosen += [self._tasks[number] for number in order[place : place + count - len(chosen)]]
        self._taken = count
        return chosen

    async def record(self, groups: Sequence[RolloutGroup]) -> dict[str, JsonValue]:
        """Advance past the last sample; a step that was interrupted before samples the same tasks again."""
        self._drawn += self._taken
        self._taken = 0
        return {}

    def state_dict(self) -> dict[str, JsonValue]:
        return {"drawn": self._drawn, "tasks": len(self._tasks)}

    def load_state_dict(self, stored: Mapping[str, JsonValue]) -> None:
        drawn, tasks = stored.get("drawn"), stored.get("tasks")
        if tasks != len(self._tasks) or not isinstance(drawn, int):
            raise ConfigError(
                f"this run was started with {tasks!r} tasks, got {len(self._tasks)}; "
                "use the same data to resume it, or choose another directory"
            )
        self._drawn = drawn
