"""A corridor with doors, one of which is unlocked: a minimal environment with hidden facts and an expert."""

from __future__ import annotations

import random
from collections.abc import Sequence

from dreamgym.envs.episode import Episode, check_count, check_expert, check_split
from dreamgym.errors import ConfigError, EpisodeOverError
from dreamgym.types import Outcome, State, Task, WorldSheet


class Corridor(Episode):
    """Walk to the one door that is not locked and open it.

    >>> import asyncio
    >>> async def leave() -> Outcome:
    ...     factory = CorridorFactory(length=3)
    ...     corridor = factory.make((await factory.tasks("train", 1))[0])
    ...     await corridor.start()
    ...     while True:
    ...         outcome = await corridor.step(await corridor.expert_action())
    ...         if outcome.over:
    ...             return outcome
    >>> asyncio.run(leave()).next_state.text
    'You open the door and leave.'
    """

    experts = ("walker",)

    def __init__(self, task: Task, *, length: int, start: int, way_out: int, horizon: int) -> None:
        super().__init__(task, horizon)
        self._length = length
        self._place = start
        self._way_out = way_out

    async def _start(self) -> State:
        return self._state()

    async def _step(self, action: str) -> Outcome:
        found = action == "open door" and self._place == self._way_out
        text = "You open the door and leave." if found else self._answer(action)
        return Outcome(
            next_state=State(text=text, admissible_actions=() if found else self._actions()),
            reward=float(found),
            terminated=found,
            success=found,
        )

    async def world_sheet(self) -> WorldSheet:
        if self._phase == "not started":
            raise EpisodeOverError("world_sheet: start the episode first")
        doors = range(1, self._length + 1)
        return WorldSheet(
            facts=tuple(("unlocked" if door == self._way_out else "locked", f"door {door}") for door in doors)
        )

    async def expert_action(self, expert: str | None = None) -> str:
        check_expert(expert, self.experts)
        if self._place == self._way_out:
            return "open door"
        return "go east" if self._place < self._way_out else "go west"

    def _answer(self, action: str) -> str:
        if action not in self._actions():
            return "Nothing happens."
        if action == "open door":
            return "The door is locked."
        self._place += {"go east": 1, "go west": -1}[action]
        return self._state().text

    def _actions(self) -> tuple[str, ...]:
        ways = [("go east", self._place < self._length), ("go west", self._place > 1), ("open door", True)]
        return tuple(action for action, possible in ways if possible)

    def _state(self) -> State:
        return State(
            text=f"You are at door {self._place} of {self._length}.", admissible_actions=self._actions()
        )


class CorridorFactory:
    """Corridors of one length: a task for every pair of a start and a way out."""

    name = "corridor"
    splits = ("train", "test")

    def __init__(self, *, length: int = 6, horizon: int = 30) -> None:
        self._length = length
        self._horizon = horizon

    async def tasks(self, split: str, count: int | None = None, *, seed: int = 0) -> Sequence[Task]:
        check_split(split, self.splits, self.name)
        doors = range(1, self._length + 1)
        # Every third pair is held out for testing.
        pairs = [(a, b) for a in doors for b in doors if a != b and ((a + b) % 3 == 0) == (split == "test")]
        check_count(split, len(pairs), count)
        random.Random(seed).shuffle(pairs)
        return [self._task(split, start, way_out) for start, way_out in pairs[:count]]

    def make(self, task: Task, *, seed: int = 0) -> Corridor:
        start, way_out = task.parameters["start"], task.parameters["way_out"]
        if not isinstance(start, int) or not isinstance(way_out, int):
            raise ConfigError(f"task {task.id!r}: expected two door numbers, got {start!r} and {way_out!r}")
        return Corridor(task, length=self._length, start=start, way_out=way_out, horizon=self._horizon)

    async def aclose(self) -> None:
        """Nothing is held open."""

    def _task(self, split: str, start: int, way_out: int) -> Task:
        return Task(
            id=f"{self._length}-{start}-{way_out}",
            instruction="Leave the corridor through the one door that is not locked.",
            environment=self.name,
            split=split,
            parameters={"start": start, "way_out": way_out},
        )
