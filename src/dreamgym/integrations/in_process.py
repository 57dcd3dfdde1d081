"""Episodes for other frameworks in this process: what a server offers, without the wire.

Everything runs on the shared event loop of `loop_thread`, so synchronous frameworks and those with an event
loop of their own can use it.
"""

from __future__ import annotations

import atexit
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from typing import Any

from dreamgym.config import load_config
from dreamgym.errors import BudgetSpentError, EndpointError, EpisodeFailedError
from dreamgym.integrations.loop_thread import loop_thread
from dreamgym.integrations.served_results import ServedResults
from dreamgym.integrations.serving import (
    EpisodeState,
    Mode,
    Observation,
    ResetRequest,
    ServedEnvironment,
    Session,
)
from dreamgym.integrations.serving_setup import open_served
from dreamgym.protocols import EnvironmentFactory
from dreamgym.training.dream_loading import Dream
from dreamgym.types import Task

Source = str | Path | EnvironmentFactory | ServedEnvironment
"""A run or a name as for `dreamgym serve`; a `Dream` or another factory; or what is open already."""
_opened: dict[tuple[Any, ...], ServedEnvironment] = {}
_stacks: list[AsyncExitStack] = []
FAILURES = (EpisodeFailedError, EndpointError, BudgetSpentError)
"""What ends an episode without a result: adapters report it as a truncation with its kind."""


def open_environment(
    environment: Source,
    *,
    mode: Mode | None = None,
    results: ServedResults | None = None,
    settings: Sequence[str] = (),
    **options: Any,
) -> ServedEnvironment:
    """What `dreamgym serve` would serve, in this process; the same name is opened once.

    Args:
        mode: of episodes that do not choose it.
        results: where results of a `Dream` that is given as an object go.
        settings: overrides of the configuration (``train.group_size=4``).
        options: further arguments of `open_served`: ``out``, ``data``, ``group_size``.
    """
    if isinstance(environment, ServedEnvironment):
        return environment
    if isinstance(environment, Dream):
        return ServedEnvironment(environment.name, dream=environment, results=results, mode=mode)
    if not isinstance(environment, str | Path):
        factory = environment
        return ServedEnvironment(factory.name, open_real=lambda: factory, mode=mode)
    chosen = sorted((name, str(each)) for name, each in options.items())
    key = (str(environment), mode, tuple(settings), *chosen)
    if key not in _opened:
        stack = AsyncExitStack()
        found = open_served(str(environment), load_config(overrides=list(settings)), mode=mode, **options)
        _opened[key] = loop_thread().call(stack.enter_async_context(found))
        _stacks.append(stack)
    return _opened[key]


def close_environments() -> None:
    """Close everything that was opened by name, and record results that are not yet a whole step.

    At the end of the process this is tried too, but threads of models may have ended before.
    """
    _opened.clear()
    while _stacks:
        loop_thread().call(_stacks.pop().aclose(), timeout=60)


@atexit.register
def _close_at_exit() -> None:
    with suppress(Exception):
        close_environments()


class Episodes:
    """Episodes one after another, for synchronous code. A failure is data: `failure` holds its kind."""

    def __init__(self, environment: Source, **options: Any) -> None:
        """The arguments of `open_environment`."""
        self.served = open_environment(environment, **options)
        self._session = Session(self.served)
        self._last = ""

    @property
    def state(self) -> EpisodeState:
        return self._session.state

    @property
    def failure(self) -> str | None:
        return None if self.state.failure is None else str(self.state.failure)

    def check(self) -> None:
        """Raise what ended the episode, if it failed."""
        if self.state.failure is not None:
            raise EpisodeFailedError(self.state.failure, self.state.failure_message or "")

    def tasks(self, split: str | None = None) -> Sequence[Task]:
        return loop_thread().call(self._tasks(split))

    async def _tasks(self, split: str | None) -> Sequence[Task]:
        return await self.served.tasks(split or self.served.splits[0])

    def reset(self, **chosen: Any) -> Observation:
        """A new episode; the fields of `ResetRequest`. Raises what `FAILURES` lists."""
        return loop_thread().call(self.areset_here(**chosen))

    def step(self, action: str) -> Observation:
        """The reply. After a failure it is the last text again, done, without reward."""
        return loop_thread().call(self.astep_here(action))

    def close(self) -> None:
        loop_thread().call(self._session.aclose(finished=True))

    async def areset(self, **chosen: Any) -> Observation:
        """As `reset`, from another event loop."""
        return await loop_thread().acall(self.areset_here(**chosen))

    async def astep(self, action: str) -> Observation:
        """As `step`, from another event loop."""
        return await loop_thread().acall(self.astep_here(action))

    async def aclose(self, *, finished: bool = True) -> None:
        """End the episode from another event loop; unless `finished`, its results do not count."""
        await loop_thread().acall(self._session.aclose(finished=finished))

    async def aclose_here(self) -> None:
        await self._session.aclose(finished=True)

    async def areset_here(self, **chosen: Any) -> Observation:
        """As `reset`, on the shared loop itself."""
        return self._seen(await self._session.reset(ResetRequest.model_validate(chosen)))

    async def astep_here(self, action: str) -> Observation:
        try:
            return self._seen(await self._session.step(action))
        except FAILURES:
            return Observation(text=self._last, instruction="", done=True, reward=0.0)

    def _seen(self, observation: Observation) -> Observation:
        self._last = observation.text
        return observation


def run_together(work: Callable[[], Awaitable[Any]]) -> Any:
    """Run an async function on the shared loop, from synchronous code."""

    async def run() -> Any:
        return await work()

    return loop_thread().call(run())
