"""Scripted demonstrators for the recordings of `black_box.py`: they choose the next action of an episode.

They know the environment's internals, and only the recording uses them. With many random actions in between
(`noisy:SHARE`) they stand for the traces of a mediocre agent, most of which fail.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from dreamgym.envs.textcraft.recipes import plan
from dreamgym.protocols import Environment, EnvironmentFactory
from dreamgym.types import Outcome, State, Task

Choose = Callable[[Any, list[str]], Awaitable[str]]
"""Takes the environment of an episode and its actions so far."""


async def vending(environment: Any, actions: list[str]) -> str:
    """Reads labels until it knows the slot, pays the price, shakes a jammed machine."""
    game = environment._plain
    machine = game.machine
    slots = "ABC"
    slot = machine.products.index(machine.wanted)
    if machine.wanted in game.tray:
        return f"take {machine.wanted}"
    if game.stuck is not None:
        return "shake machine"
    if f"read label {slots[slot]}" not in actions:
        return next(f"read label {each}" for each in slots if f"read label {each}" not in actions)
    if game.inserted < machine.prices[slot]:
        return "insert coin" if game.coins else "refund"
    return f"press {slots[slot]}"


async def helpdesk(environment: Any, actions: list[str]) -> str:
    game = environment._plain
    wanted, desk = game.desk.wanted, game.desk
    steps = [f'search_tickets customer="{wanted.customer}"']
    own = sorted(each.id for each in desk.tickets if each.customer == wanted.customer)
    steps += [f"get_ticket id={each}" for each in own[: own.index(wanted.id) + 1]]
    steps += [f"lookup_order id={wanted.order}", f"get_policy state={wanted.state}"]
    steps += [f"refund order={wanted.order} amount={desk.right_amount(wanted)}"]
    return next((each for each in steps if each not in actions), f"set_status id={wanted.id} status=closed")


async def lake(environment: Any, actions: list[str]) -> str:
    """The first step of a shortest way."""
    game = environment._plain
    size, start = len(game.map), game.place()
    ways = {"left": (0, -1), "down": (1, 0), "right": (0, 1), "up": (-1, 0)}
    queue: deque[tuple[tuple[int, int], str]] = deque([(start, "")])
    seen = {start}
    while queue:
        (row, column), first = queue.popleft()
        if game.map[row][column] == "G":
            return first
        for way, (down, right) in ways.items():
            cell = (row + down, column + right)
            inside = 0 <= cell[0] < size and 0 <= cell[1] < size
            if inside and cell not in seen and game.map[cell[0]][cell[1]] != "H":
                seen.add(cell)
                queue.append((cell, first or f"go {way}"))
    return "go right"


async def textcraft(environment: Any, actions: list[str]) -> str:
    """The next step of the plan behind the listed recipes that was not taken as often as it is needed."""
    values = environment.task.parameters
    source = random.Random(f"textcraft:{values['goal']}:{values['variant']}")
    steps = [step for _, step in plan(str(values["goal"]), 1, source) or ()]
    left = list(actions)
    for step in steps:
        if step not in left:
            return step
        left.remove(step)
    return steps[-1]


async def babyai(environment: Any, actions: list[str]) -> str:
    """MiniGrid's bot."""
    from minigrid.utils.baby_ai_bot import BabyAIBot

    from dreamgym.envs.babyai.grid import ACTIONS

    game = environment._game._game
    if not hasattr(environment, "bot"):
        environment.bot = BabyAIBot(game)  # type: ignore[no-untyped-call]
        last = None
    else:
        last = ACTIONS.index(actions[-1]) if actions and actions[-1] in ACTIONS else None
    try:
        action = int(environment.bot.replan(last))
    except Exception:  # it gives up where a random action broke its plan
        environment.bot = BabyAIBot(game)  # type: ignore[no-untyped-call]
        return "turn left"
    return ACTIONS[action] if action < len(ACTIONS) else "turn left"


async def textworld(environment: Any, actions: list[str]) -> str:
    return str(await environment._environment.expert_action())


class DemonstratedFactory:
    """A factory whose episodes have a demonstrator as their expert."""

    def __init__(self, factory: EnvironmentFactory, choose: Choose) -> None:
        self.name, self.splits = factory.name, factory.splits
        self._factory, self._choose = factory, choose

    async def tasks(self, split: str, count: int | None = None, *, seed: int = 0) -> Sequence[Task]:
        return await self._factory.tasks(split, count, seed=seed)

    def make(self, task: Task, *, seed: int = 0) -> Demonstrated:
        return Demonstrated(self._factory.make(task, seed=seed), self._choose)

    async def aclose(self) -> None:
        await self._factory.aclose()


class Demonstrated:
    """One episode."""

    experts = ("demonstrator",)

    def __init__(self, environment: Environment, choose: Choose) -> None:
        self.task = environment.task
        self._environment, self._choose = environment, choose
        self._actions: list[str] = []

    async def start(self) -> State:
        return await self._environment.start()

    async def step(self, action: str) -> Outcome:
        self._actions.append(action)
        return await self._environment.step(action)

    async def expert_action(self, expert: str | None = None) -> str:
        return await self._choose(self._environment, self._actions)

    async def aclose(self) -> None:
        await self._environment.aclose()


DEMONSTRATORS: dict[str, Choose] = {
    "vending": vending,
    "helpdesk": helpdesk,
    "lake": lake,
    "textcraft": textcraft,
    "babyai": babyai,
    "kitchen": textworld,
    "treasure": textworld,
}
