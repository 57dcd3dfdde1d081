"""Equal requests under way are asked once: the first asks, the others wait for what comes of it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Hashable
from typing import Generic, TypeVar

T = TypeVar("T")


class _GivenUpError(Exception):
    """Whoever asked was cancelled. Never leaves this module."""


class SingleFlight(Generic[T]):
    """The first asks in its own task, since most requests have no equal and a task of theirs would cost as
    much as sending them. So one that gives up takes its request along, and the next in line asks again."""

    def __init__(self) -> None:
        self._followers: dict[Hashable, asyncio.Future[T] | None] = {}

    def __contains__(self, key: Hashable) -> bool:
        return key in self._followers

    async def join(self, key: Hashable, ask: Callable[[], Awaitable[T]]) -> T:
        while key in self._followers:
            followed = self._followers[key]
            if followed is None:
                followed = self._followers[key] = asyncio.get_running_loop().create_future()
            try:
                # Not the future itself: whoever gives up must not take the reply from the others.
                return await asyncio.shield(followed)
            except _GivenUpError:
                continue
        self._followers[key] = None
        try:
            found = await ask()
        except BaseException as error:
            followed = self._followers.pop(key)
            if followed is not None:
                gone = isinstance(error, asyncio.CancelledError)
                followed.set_exception(_GivenUpError() if gone else error)
                followed.exception()  # all of them may be gone too, which is nothing to warn of
            raise
        followed = self._followers.pop(key)
        if followed is not None:
            followed.set_result(found)
        return found
