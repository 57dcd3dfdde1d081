"""Rate limits of one endpoint: concurrent requests, requests per minute and tokens per minute.

The limits hold in every sliding window of a minute, not on average. Admission is in order of arrival.
"""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass


@dataclass(slots=True, eq=False)
class Slot:
    """One admitted request and what it counts in the window."""

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
        """`minute` is the length of the window in seconds; tests use shorter ones."""
        self._concurrency = asyncio.Semaphore(concurrency)
        self._max_requests = requests_per_minute
        self._max_tokens = tokens_per_minute
        self._minute = minute
        self._admission = asyncio.Lock()
        self._window: deque[Slot] = deque()
        self._tokens = 0
        self._paused_until = 0.0

    async def acquire(self, tokens: int) -> Slot:
        """Wait for admission; `tokens` is an upper bound. Give the slot back with `release`."""
        await self._concurrency.acquire()
        try:
            return await self._admit(tokens)
        except BaseException:
            self._concurrency.release()
            raise

    def release(self, slot: Slot, tokens: int | None = None) -> None:
        """End a request; `tokens` is the number it used, if known."""
        if tokens is not None and slot.in_window:
            self._tokens += tokens - slot.tokens
            slot.tokens = tokens
        self._concurrency.release()

    def pause(self, seconds: float) -> None:
        """Admit no request for this time (the server sent Retry-After)."""
        self._paused_until = max(self._paused_until, self._now() + seconds)

    async def _admit(self, tokens: int) -> Slot:
        limited = self._max_requests is not None or self._max_tokens is not None
        if not limited and self._paused_until <= self._now():
            return Slot(self._now(), tokens)
        async with self._admission:
            while (wait := self._wait(tokens)) > 0:  # noqa: ASYNC110
                await asyncio.sleep(wait)
            slot = Slot(self._now(), tokens, in_window=limited)
            if limited:
                self._window.append(slot)
                self._tokens += tokens
            return slot

    def _wait(self, tokens: int) -> float:
        """Seconds until the request may be admitted, or until the next check; 0 for now."""
        now = self._now()
        while self._window and self._window[0].at <= now - self._minute:
            past = self._window.popleft()
            past.in_window = False
            self._tokens -= past.tokens
        if self._paused_until > now:
            return self._paused_until - now
        too_many = self._max_requests is not None and len(self._window) >= self._max_requests
        # A request that is larger than the whole limit is admitted alone: waiting would not make it smaller.
        too_large = self._max_tokens is not None and self._tokens + tokens > self._max_tokens
        if self._window and (too_many or too_large):
            return max(0.001, self._window[0].at + self._minute - now)
        return 0.0

    def _now(self) -> float:
        return asyncio.get_running_loop().time()
