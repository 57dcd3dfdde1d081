"""Single flight: equal calls that overlap run once and share the result."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Hashable
from typing import Generic, TypeVar

T = TypeVar("T")


class _LeaderCancelledError(Exception):
    """The call that the others waited for was cancelled. Never leaves this module."""


class SingleFlight(Generic[T]):
    """The first caller (the leader) runs the call in its own task: most calls have no duplicate, and a task
    for each would be expensive. If the leader is cancelled, the next waiting caller becomes the leader."""

    def __init__(self) -> None:
        self._running: dict[Hashable, asyncio.Future[T] | None] = {}

    def __contains__(self, key: Hashable) -> bool:
        return key in self._running

    async def do(self, key: Hashable, call: Callable[[], Awaitable[T]]) -> T:
        """The result, or the exception, of the one call that runs for `key`."""
        while key in self._running:
            result = self._running[key]
            if result is None:
                result = self._running[key] = asyncio.get_running_loop().create_future()
            try:
                # Shielded: a follower that is cancelled must not cancel the future of the others.
                return await asyncio.shield(result)
            except _LeaderCancelledError:
                continue
        self._running[key] = None
        try:
            value = await call()
        except BaseException as error:
            result = self._running.pop(key)
            if result is not None:
                cancelled = isinstance(error, asyncio.CancelledError)
                result.set_exception(_LeaderCancelledError() if cancelled else error)
                result.exception()  # marks it as retrieved, in case every follower was cancelled
            raise
        result = self._running.pop(key)
        if result is not None:
            result.set_result(value)
        return value
