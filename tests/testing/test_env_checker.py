"""The conformance checker: a correct environment passes, each broken one fails the right check."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import random
from collections.abc import Sequence
from dataclasses import replace

import pytest

from dreamgym.errors import ConfigError
from dreamgym.testing import Check, CheckReport, Corridor, CorridorFactory, check_environment
from dreamgym.types import Outcome, State, Task, WorldSheet

LENGTH = 6


class Corridors(CorridorFactory):
    """Corridors of the given make."""

    def __init__(self, kind: type[Corridor]) -> None:
        super().__init__(length=LENGTH)
        self._kind = kind

    def make(self, task: Task, *, seed: int = 0) -> Corridor:
        start, way_out = task.parameters["start"], task.parameters["way_out"]
        assert isinstance(start, int)
        assert isinstance(way_out, int)
        return self._kind(task, length=LENGTH, start=start, way_out=way_out, horizon=30)


class Moody(Corridor):
    moods = itertools.count()

    async def step(self, action: str) -> Outcome:
        outcome = await super().step(action)
        return replace(outcome, next_state=replace(outcome.next_state, text=f"Mood {next(Moody.moods)}."))


class Undead(Corridor):
    async def step(self, action: str) -> Outcome:
        if self._phase == "over":
            self._phase = "running"
        return await super().step(action)


class Eager(Corridor):
    async def step(self, action: str) -> Outcome:
        if self._phase == "not started":
            self._phase = "running"
        return await super().step(action)


class Ambiguous(Corridor):
    async def step(self, action: str) -> Outcome:
        outcome = await super().step(action)
        return replace(outcome, truncated=outcome.over)


class Generous(Corridor):
    async def step(self, action: str) -> Outcome:
        outcome = await super().step(action)
        return replace(outcome, reward=outcome.reward + 0.1 * (action in self._actions()))


class Endless(Corridor):
    async def step(self, action: str) -> Outcome:
        self._left = 9
        return await super().step(action)


class Fragile(Corridor):
    async def step(self, action: str) -> Outcome:
        action.encode()  # half a character cannot be
        return await super().step(action)


class Gullible(Corridor):
    async def step(self, action: str) -> Outcome:
        outcome = await super().step(action)
        return replace(outcome, reward=1.0, terminated=True, success=True) if "solved" in action else outcome


class Mute(Corridor):
    async def step(self, action: str) -> Outcome:
        outcome = await super().step(action)
        return outcome if action.isprintable() else replace(outcome, next_state=State(text=""))


class Entangled(Corridor):
    places: int = 0

    async def start(self) -> State:
        Entangled.places = self._place
        return await super().start()

    async def step(self, action: str) -> Outcome:
        self._place = Entangled.places
        outcome = await super().step(action)
        Entangled.places = self._place
        return outcome


class Crowded(Corridor):
    inside: int = 0

    async def start(self) -> State:
        Crowded.inside += 1
        return await super().start()

    async def step(self, action: str) -> Outcome:
        if Crowded.inside > 4:
            raise OSError("no room left")
        return await super().step(action)

    async def aclose(self) -> None:
        Crowded.inside -= self._phase in ("running", "over")
        await super().aclose()


class CloseOnce(Corridor):
    async def aclose(self) -> None:
        if self._phase == "closed":
            raise RuntimeError("already closed")
        await super().aclose()


class Stutterer(Corridor):
    def _actions(self) -> tuple[str, ...]:
        return (*super()._actions(), "open door")


class Pretender(Corridor):
    def _actions(self) -> tuple[str, ...]:
        return ("dance", "fly", "sing", "swim", "open door")

    def _answer(self, action: str) -> str:
        return "Nothing happens."


class Revisionist(Corridor):
    async def world_sheet(self) -> WorldSheet:
        return WorldSheet(facts=(("at", "player", f"door {self._place} {self._left}"),))


class Clueless(Corridor):
    async def expert_action(self, expert: str | None = None) -> str:
        return "ask someone else"


class MemoryEater(Corridor):
    eaten: list[bytes] = []  # noqa: RUF012 - being shared is the fault

    async def start(self) -> State:
        MemoryEater.eaten.append(b"x" * 4_000_000)
        return await super().start()


class FileHoarder(Corridor):
    held: list[int] = []  # noqa: RUF012

    async def start(self) -> State:
        FileHoarder.held.append(os.open(os.devnull, os.O_RDONLY))
        return await super().start()


class TaskHoarder(Corridor):
    held: list[asyncio.Task[None]] = []  # noqa: RUF012

    async def start(self) -> State:
        TaskHoarder.held.append(asyncio.create_task(asyncio.sleep(600)))
        return await super().start()


TASKS = "tasks have unique ids and are the same every time"
SPLIT = "a split that does not exist is refused"
START = "an episode starts with something to see"
SAME = "the same actions give the same episode"
ENDS = "an episode ends once, terminated or truncated, and only then rewards"
HORIZON = "an episode that leads nowhere is cut off"
OUTSIDE = "stepping before the start and after the end is refused"
CLOSING = "closing is harmless at any time, and twice"
HOSTILE = "nonsense and hostile actions are answered"
ALONE = "one episode does not disturb another"
ADMISSIBLE = "admissible actions do something"
SHEET = "the world sheet holds the hidden facts at the start"
EXPERT = "every expert names an action"
TOGETHER = "concurrent episodes do not differ from single ones"
LEAKS = "many episodes leave nothing behind"


async def checked(factory: CorridorFactory, episodes: int = 36) -> CheckReport:
    return await check_environment(factory, episodes=episodes, concurrency=12)


def broken(report: CheckReport) -> set[str]:
    return {check.name for check in report.checks if check.status == "fail"}


async def test_a_good_environment_passes_every_check() -> None:
    seen: list[Check] = []
    report = await check_environment(CorridorFactory(), episodes=200, concurrency=32, report=seen.append)
    assert report.passed
    assert {check.status for check in report.checks} == {"pass"}
    assert [check for check in seen if check.status != "running"] == list(report.checks)
    assert any("of 200 episodes" in check.detail for check in seen if check.status == "running")
    assert json.loads(json.dumps(report.to_dict()))["passed"] is True


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        (Moody, {SAME, CLOSING, ALONE, TOGETHER}),
        (Undead, {OUTSIDE}),
        (Eager, {OUTSIDE}),
        (Ambiguous, {ENDS}),
        (Generous, {ENDS}),
        (Endless, {HORIZON, OUTSIDE}),
        (Fragile, {HOSTILE, ALONE}),
        (Gullible, {HOSTILE}),
        (Mute, {HOSTILE, ALONE}),
        (Entangled, {ALONE, TOGETHER}),
        (Crowded, {TOGETHER}),
        (CloseOnce, {OUTSIDE, CLOSING}),
        (Pretender, {ADMISSIBLE, EXPERT}),
        (Revisionist, {SHEET}),
    ],
)
async def test_a_broken_environment_fails_its_check(kind: type[Corridor], expected: set[str]) -> None:
    assert broken(await checked(Corridors(kind))) == expected


@pytest.mark.parametrize("kind", [MemoryEater, FileHoarder, TaskHoarder])
async def test_an_environment_that_leaks_fails_the_check(kind: type[Corridor]) -> None:
    try:
        assert broken(await checked(Corridors(kind), episodes=72)) == {LEAKS}
    finally:
        MemoryEater.eaten.clear()
        while FileHoarder.held:
            os.close(FileHoarder.held.pop())
        while TaskHoarder.held:
            TaskHoarder.held.pop().cancel()


async def test_an_action_listed_twice_is_found_at_the_start() -> None:
    assert START in broken(await checked(Corridors(Stutterer)))


async def test_an_expert_with_an_inadmissible_action_fails_the_check() -> None:
    report = await checked(Corridors(Clueless))
    finding = next(check for check in report.checks if check.name == EXPERT)
    assert finding.status == "fail"
    assert "'ask someone else'" in finding.detail


class Impatient(Corridor):
    """Its limit of steps terminates."""

    taken = 0

    async def step(self, action: str) -> Outcome:
        outcome = await super().step(action)
        self.taken += 1
        if self.taken < 4 or outcome.over:
            return outcome
        self._phase = "over"
        return replace(outcome, terminated=True)


async def test_a_limit_of_steps_that_terminates_is_explained() -> None:
    report = await checked(Corridors(Impatient))
    finding = next(check for check in report.checks if check.name == HOSTILE)
    assert finding.status == "fail"
    assert "if that is a limit of steps, set horizon or truncated" in finding.detail


class Restless(CorridorFactory):
    async def tasks(self, split: str, count: int | None = None, *, seed: int = 0) -> Sequence[Task]:
        return await super().tasks(split, count, seed=random.randrange(2**32))


class Lenient(CorridorFactory):
    async def tasks(self, split: str, count: int | None = None, *, seed: int = 0) -> Sequence[Task]:
        return await super().tasks(split if split in self.splits else "train", count, seed=seed)


class Nameless(CorridorFactory):
    async def tasks(self, split: str, count: int | None = None, *, seed: int = 0) -> Sequence[Task]:
        return [replace(task, id="task") for task in await super().tasks(split, count, seed=seed)]


@pytest.mark.parametrize(
    ("factory", "expected"), [(Restless(), {TASKS}), (Lenient(), {SPLIT}), (Nameless(), {TASKS})]
)
async def test_a_broken_list_of_tasks_fails_its_check(factory: CorridorFactory, expected: set[str]) -> None:
    assert broken(await checked(factory)) == expected


class Bare:
    """A corridor without a list of actions, hidden facts or an expert: the least an environment can be."""

    def __init__(self, corridor: Corridor) -> None:
        self.task = corridor.task
        self._corridor = corridor

    async def start(self) -> State:
        return replace(await self._corridor.start(), admissible_actions=None)

    async def step(self, action: str) -> Outcome:
        outcome = await self._corridor.step(action)
        return replace(outcome, next_state=replace(outcome.next_state, admissible_actions=None))

    async def aclose(self) -> None:
        await self._corridor.aclose()


class BareCorridors:
    name = "corridor"
    splits = CorridorFactory.splits

    async def tasks(self, split: str, count: int | None = None, *, seed: int = 0) -> Sequence[Task]:
        return await CorridorFactory().tasks(split, count, seed=seed)

    def make(self, task: Task, *, seed: int = 0) -> Bare:
        return Bare(CorridorFactory().make(task))

    async def aclose(self) -> None:
        pass


async def test_what_an_environment_does_not_offer_is_skipped_not_failed() -> None:
    report = await check_environment(BareCorridors(), episodes=60, concurrency=12)
    assert report.passed
    assert {check.name for check in report.checks if check.status == "skip"} == {ADMISSIBLE, SHEET, EXPERT}


async def test_too_few_episodes_skip_the_leak_check() -> None:
    report = await checked(CorridorFactory(), episodes=12)
    assert report.checks[-1].status == "skip"
    assert "too few for this check" in report.checks[-1].detail


async def test_an_unknown_name_is_refused_with_the_nearest_one() -> None:
    with pytest.raises(ConfigError, match="did you mean 'textworld'"):
        await check_environment("textwrld")
