"""Keeps everything that asks one endpoint within its limits: in flight, requests and tokens per minute.

Limits hold in every window of a minute, not on average. Whoever comes first is served first.
"""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass


@dataclass(slots=True, eq=False)
class Admission:
    """A place in flight, and what it counts in the window."""

    at: float
    tokens: int
    in_window: bool = False


class RateLimiter:
    def __init__(
        self,
        *,
        concurrency: int,
        requests_per_minute: int | None = None,
        tokens_per_minute: int | None = None,
        minute: float = 60.0,
    ) -> None:
        """`minute` is how many seconds one lasts: shorter ones are for tests."""
        self._places = asyncio.Semaphore(concurrency)
        self._requests = requests_per_minute
        self._tokens = tokens_per_minute
        self._minute = minute
        self._turn = asyncio.Lock()
        self._recent: deque[Admission] = deque()
        self._used = 0
        self._until = 0.0

    async def admit(self, tokens: int) -> Admission:
        """Wait for a place; `tokens` is the most that the request can use. Give it back with `leave`."""
        await self._places.acquire()
        try:
            return await self._in_turn(tokens)
        except BaseException:
            self._places.release()
            raise

    def leave(self, admission: Admission, tokens: int | None = None) -> None:
        """The request is over; `tokens` is what it really used, where that is known."""
        if tokens is not None and admission.in_window:
            self._used += tokens - admission.tokens
            admission.tokens = tokens
        self._places.release()

    def hold(self, seconds: float) -> None:
        """The server asks for a pause: nobody is admitted before it is over."""
        self._until = max(self._until, self._now() + seconds)

    async def _in_turn(self, tokens: int) -> Admission:
        limited = self._requests is not None or self._tokens is not None
        if not limited and self._until <= self._now():
            return Admission(self._now(), tokens)
        async with self._turn:
            while (pause := self._pause(tokens)) > 0:  # noqa: ASYNC110
                await asyncio.sleep(pause)
            admission = Admission(self._now(), tokens, in_window=limited)
            if limited:
                self._recent.append(admission)
                self._used += tokens
            return admission

    def _pause(self, tokens: int) -> float:
        """Seconds until it is worth looking again; 0 for now."""
        now = self._now()
        while self._recent and self._recent[0].at <= now - self._minute:
            past = self._recent.popleft()
            past.in_window = False
            self._used -= past.tokens
        if self._until > now:
            return self._until - now
        full = self._requests is not None and len(self._recent) >= self._requests
        # A request that is larger than the whole limit goes alone; waiting would not make it smaller.
        thirsty = self._tokens is not None and self._used + tokens > self._tokens
        if self._recent and (full or thirsty):
            return max(0.001, self._recent[0].at + self._minute - now)
        return 0.0

    def _now(self) -> float:
        return asyncio.get_running_loop().time()
