"""One event loop in a background thread, shared by all adapters to synchronous frameworks.

Language models, HTTP clients and semaphores belong to the event loop that uses them first, so everything that
an adapter opens lives on this one. It works while another loop runs in the calling thread, and is made anew
in a forked process.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class LoopThread:
    """An event loop that runs until the process ends."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True, name="dreamgym-loop").start()

    def call(self, work: Coroutine[Any, Any, T], timeout: float | None = None) -> T:
        """Run a coroutine on the loop and wait for it, from any thread but the loop's own."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(timeout)

    async def acall(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on the loop and await it in another one."""
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self._loop))


_shared: LoopThread | None = None
_lock = threading.Lock()


def loop_thread() -> LoopThread:
    """The loop of this process.

    >>> loop_thread().call(asyncio.sleep(0, "done"))
    'done'
    """
    global _shared  # noqa: PLW0603  (one per process is the point)
    with _lock:
        if _shared is None:
            _shared = LoopThread()
        return _shared


def _forget() -> None:
    """A forked child has the object without its thread: every call would wait for ever."""
    global _shared, _lock
    _shared, _lock = None, threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)
