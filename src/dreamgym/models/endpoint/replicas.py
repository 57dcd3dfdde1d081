"""The replicas of one endpoint: which is asked next, which is down, and when it is back.

A replica that fails several times in a row is left alone; one small question at a time finds out when it is
back. While all are down, requests wait, each until its own deadline.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

_FAILURES = 5
"""In a row, before a replica counts as down."""
_LONGEST_PAUSE = 10.0

Probe = Callable[[str], Awaitable[bool]]
"""Whether the server at this address answers."""


@dataclass(slots=True, eq=False)
class Replica:
    url: str
    in_flight: int = 0
    failures: int = 0
    """In a row."""
    up: asyncio.Event = field(default_factory=asyncio.Event)


class Replicas:
    def __init__(self, urls: Sequence[str], probe: Probe, *, pause: float = 0.5) -> None:
        """`pause`: seconds before the first look at one that is down; doubles."""
        self._all = [Replica(url) for url in urls]
        for replica in self._all:
            replica.up.set()
        self._probe = probe
        self._pause = pause
        self._some_up = asyncio.Event()
        self._some_up.set()
        self._watches: set[asyncio.Task[None]] = set()
        self.times_down = 0

    @property
    def urls(self) -> list[str]:
        return [replica.url for replica in self._all]

    @property
    def up(self) -> list[str]:
        return [replica.url for replica in self._all if replica.up.is_set()]

    async def pick(self, avoid: Replica | None = None) -> Replica:
        """The one with the least to do, another than `avoid` where there is one; waits while none is up."""
        if len(self._all) == 1 and self._some_up.is_set():
            return self._all[0]
        await self._some_up.wait()
        able = [replica for replica in self._all if replica.up.is_set()]
        others = [replica for replica in able if replica is not avoid]
        return min(others or able, key=lambda replica: replica.in_flight)

    def succeeded(self, replica: Replica) -> None:
        replica.failures = 0

    def failed(self, replica: Replica) -> None:
        replica.failures += 1
        if replica.failures >= _FAILURES and replica.up.is_set():
            self.times_down += 1
            replica.up.clear()
            if not self.up:
                self._some_up.clear()
            watch = asyncio.create_task(self._watch(replica))
            self._watches.add(watch)
            watch.add_done_callback(self._watches.discard)

    async def aclose(self) -> None:
        for watch in self._watches:
            watch.cancel()
        await asyncio.gather(*self._watches, return_exceptions=True)

    async def _watch(self, replica: Replica) -> None:
        pause = self._pause
        while True:
            await asyncio.sleep(pause)
            if await self._probe(replica.url):
                break
            pause = min(_LONGEST_PAUSE, 2 * pause)
        replica.failures = 0
        replica.up.set()
        self._some_up.set()
