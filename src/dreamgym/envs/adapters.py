"""Adapts plain objects to the roles `Environment` and `EnvironmentFactory`.

A plain environment is a class (or function) that is called once for each episode:

    class Vending:
        instruction = "Buy a snack."

        def __init__(self, seed: int) -> None: ...
        def start(self) -> str: ...
        def step(self, action: str) -> tuple[str, float, bool]: ...   # text, reward, terminated

`start` returns a text or a `State`. `step` returns an `Outcome`, (text, reward, terminated), or Gymnasium's
(text, reward, terminated, truncated, info). An episode that terminates with a positive reward is a success
unless ``info["success"]`` says otherwise; ``info["admissible_actions"]``, or an attribute or method
`admissible_actions`, lists the actions. A `gymnasium.Env` has `reset` in place of `start`.

Optional: `aclose` or `close`; `world_sheet` (facts at the start, `HasWorldSheet`); `expert_action`
(`HasExpert`). Each may be sync or async. The adapter enforces the rest of the contract: the horizon, and
`EpisodeOverError` outside the episode.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from dreamgym.config import nearest_name
from dreamgym.envs.episode import Episode, check_expert, check_split, select_tasks
from dreamgym.envs.references import short_name
from dreamgym.errors import ConfigError, DreamGymError, EpisodeFailedError, EpisodeOverError
from dreamgym.protocols import Environment
from dreamgym.seeding import derive_seed
from dreamgym.types import FailureKind, Outcome, State, Task, WorldSheet

HORIZON = 50
SEEDED_TASKS = {"train": 1_000, "test": 200}
"""Splits and numbers of tasks of an environment that lists none."""

T = TypeVar("T")
Tasks = Sequence[Task | str] | Mapping[str, Sequence[Task | str]]


def is_factory(thing: object) -> bool:
    """Whether an object is an `EnvironmentFactory` rather than a plain environment."""
    if inspect.isclass(thing):
        return False
    return all(hasattr(thing, part) for part in ("name", "splits", "tasks", "make"))


class ObjectFactory:
    """An `EnvironmentFactory` of a plain class, function or `gymnasium.Env`."""

    def __init__(
        self,
        thing: object,
        *,
        name: str | None = None,
        tasks: Tasks | None = None,
        horizon: int | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        self.name: str = name or _name(thing)
        self._thing = thing
        self._new = _constructor(thing)
        self._accepted = _accepted(self._new)
        self.horizon: int = horizon or getattr(thing, "horizon", None) or HORIZON
        self._options = dict(options or {})
        self._given_tasks = tasks
        listed = tasks if tasks is not None else getattr(thing, "tasks", None)
        self._tasks = self._task_lists(listed() if callable(listed) else listed)

    def with_options(self, options: Mapping[str, Any]) -> ObjectFactory:
        """The same environment with other arguments of its constructor."""
        if not options:
            return self
        for option in options:
            if option in ("task", "seed") or (self._accepted is not None and option not in self._accepted):
                known = sorted(set(self._accepted or ()) - {"task", "seed"})
                raise ConfigError(
                    f"environment {self.name!r}: unknown option {option!r}{nearest_name(option, known)}"
                )
        return ObjectFactory(
            self._thing, name=self.name, tasks=self._given_tasks, horizon=self.horizon, options=options
        )

    @property
    def splits(self) -> tuple[str, ...]:
        return tuple(self._tasks)

    async def tasks(self, split: str, count: int | None = None, *, seed: int = 0) -> Sequence[Task]:
        check_split(split, self.splits, self.name)
        return select_tasks(self._tasks[split], split, count, seed)

    def make(self, task: Task, *, seed: int = 0) -> Environment:
        # The task alone fixes the start, so its number is the seed; `seed` has no further effect.
        number = task.parameters.get("seed")
        own = number if isinstance(number, int) else derive_seed(task.id)
        given = {"task": task, "seed": own}
        accepted = {name: given[name] for name in given.keys() & (self._accepted or ())}
        try:
            plain = self._new(**accepted, **self._options)
        except DreamGymError:
            raise
        except Exception as error:
            raise ConfigError(
                f"environment {self.name!r}: cannot be made: {type(error).__name__}: {error}"
            ) from error
        return ObjectEnvironment(plain, task, horizon=self.horizon, seed=own)

    async def aclose(self) -> None:
        """Nothing is held open between episodes."""

    def _task_lists(self, listed: Tasks | None) -> dict[str, list[Task]]:
        if listed is None:
            instruction = (
                getattr(self._thing, "instruction", None) or inspect.getdoc(self._thing) or self.name
            )
            return {
                split: [self._task(instruction, split, number) for number in range(count)]
                for split, count in SEEDED_TASKS.items()
            }
        by_split = listed if isinstance(listed, Mapping) else {"train": listed}
        return {
            split: [
                replace(each, environment=self.name)
                if isinstance(each, Task)
                else self._task(each, split, number)
                for number, each in enumerate(tasks)
            ]
            for split, tasks in by_split.items()
        }

    def _task(self, instruction: str, split: str, number: int) -> Task:
        # Seeds of different splits never coincide.
        seed = number if split == "train" else derive_seed(split, number) >> 32
        return Task(
            id=f"{short_name(self.name)}-{split}-{number}",
            instruction=instruction,
            environment=self.name,
            split=split,
            parameters={"seed": seed},
        )


class ObjectEnvironment(Episode):
    """One episode of a plain object."""

    def __init__(self, plain: Any, task: Task, *, horizon: int, seed: int) -> None:
        super().__init__(task, horizon)
        self._plain = plain
        self._seed = seed
        self._sheet: WorldSheet | None = None
        if hasattr(plain, "world_sheet"):  # only then it has the role `HasWorldSheet`
            self.world_sheet = self._world_sheet
        self.experts: tuple[str, ...] = ()
        if hasattr(plain, "expert_action"):
            self.experts = tuple(getattr(plain, "experts", ("expert",)))

    async def _start(self) -> State:
        if hasattr(self._plain, "reset"):
            reply = await self._call("reset", lambda: self._plain.reset(seed=self._seed))
            text, info = reply if isinstance(reply, tuple) else (reply, {})
        else:
            text, info = await self._call("start", self._plain.start), {}
        if hasattr(self._plain, "world_sheet"):  # read now: the object's facts may change with its actions
            facts: Any = await self._call("world_sheet", self._plain.world_sheet)
            self._sheet = facts if isinstance(facts, WorldSheet) else _sheet(facts)
        return await self._state(text, info)

    async def _step(self, action: str) -> Outcome:
        reply = await self._call(f"step({action!r})", lambda: self._plain.step(action))
        return reply if isinstance(reply, Outcome) else await self._outcome(reply)

    async def aclose(self) -> None:
        if self._phase == "closed":
            return
        await super().aclose()
        for method in ("aclose", "close"):
            if hasattr(self._plain, method):
                await self._call(method, getattr(self._plain, method))
                return

    async def expert_action(self, expert: str | None = None) -> str:
        check_expert(expert, self.experts)
        method = self._plain.expert_action
        named = bool(inspect.signature(method).parameters)
        return str(await self._call("expert_action", (lambda: method(expert)) if named else method))

    async def _world_sheet(self) -> WorldSheet:
        if self._sheet is None:
            raise EpisodeOverError("world_sheet: start the episode first")
        return self._sheet

    async def _call(self, what: str, function: Callable[[], T | Awaitable[T]]) -> T:
        """Call a sync or async function; an exception of its own is a failed episode."""
        try:
            result = function()
            return await result if inspect.isawaitable(result) else result
        except DreamGymError:
            raise
        except Exception as error:
            message = f"{self.task.environment}: {what[:200]} raised {type(error).__name__}: {error}"
            raise EpisodeFailedError(FailureKind.CRASHED, message) from error

    async def _outcome(self, reply: Any) -> Outcome:
        if not isinstance(reply, tuple) or len(reply) not in (3, 5):
            raise ConfigError(
                f"{self.task.environment}: expected step to return an Outcome, (text, reward, terminated) or "
                f"(text, reward, terminated, truncated, info), got {reply!r}"
            )
        text, reward, terminated, truncated, info = reply if len(reply) == 5 else (*reply, False, {})
        success = info.get("success", info.get("is_success", terminated and reward > 0))
        return Outcome(
            next_state=await self._state(text, info),
            reward=float(reward),
            terminated=bool(terminated),
            truncated=bool(truncated) and not terminated,
            success=bool(success),
            info=info,
        )

    async def _state(self, text: Any, info: Mapping[str, Any]) -> State:
        if isinstance(text, State):
            return text
        if not isinstance(text, str):
            raise ConfigError(
                f"{self.task.environment}: expected a text observation, got {type(text).__name__}: {text!r}; "
                "convert it to text in the environment or a wrapper"
            )
        actions: Any = info.get("admissible_actions", getattr(self._plain, "admissible_actions", None))
        if callable(actions):
            actions = await self._call("admissible_actions", actions)
        return State(text=text, admissible_actions=None if actions is None else tuple(actions))


def _sheet(facts: Iterable[Iterable[str]]) -> WorldSheet:
    return WorldSheet(facts=tuple(tuple(str(part) for part in fact) for fact in facts))


def _name(thing: object) -> str:
    name = getattr(thing, "name", None)
    if isinstance(name, str) and name:
        return name
    if hasattr(thing, "__name__"):
        return str(thing.__name__).lower()
    return type(thing).__name__.lower()


def _constructor(thing: object) -> Callable[..., Any]:
    """The function that makes the object of an episode."""
    starts = hasattr(thing, "start") or hasattr(thing, "reset")
    if inspect.isclass(thing):
        if starts and hasattr(thing, "step"):
            return thing
    elif starts and hasattr(thing, "step"):
        return lambda: copy.deepcopy(thing)  # an instance is the state before the first action
    elif callable(thing):
        return thing
    raise ConfigError(
        f"expected an environment: a name, an EnvironmentFactory, a class with start and step, or a "
        f"gymnasium.Env, got {thing!r}"
    )


def _accepted(constructor: Callable[..., Any]) -> frozenset[str] | None:
    """Names of the arguments that may be passed; None if they are unknown."""
    try:
        parameters = inspect.signature(constructor).parameters
    except (TypeError, ValueError):
        return None
    if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values()):
        return None
    return frozenset(parameters)
