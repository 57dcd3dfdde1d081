"""A thread that serves whatever is waiting as one group.

While it works, requests pile up, and the pile is the next group. One disk sync then acknowledges many
writers, and one matrix product answers many searches.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Final, Generic, TypeVar

from dreamgym.errors import StoreError

T = TypeVar("T")
R = TypeVar("R")

_FEW: Final = 4
"""So many groups of one request, one after the other, and nobody else is expected."""


class Batcher(Generic[T, R]):
    """Passes groups of requests to `serve`, which returns a result or an error for each of them.

    Args:
        linger: seconds that a group waits for more, unless the last few were of one request: those who ask
            together go on together, and whoever asks alone is not kept.
    """

    def __init__(
        self,
        name: str,
        serve: Callable[[Sequence[T]], Sequence[R | Exception]],
        *,
        most: int = 1024,
        linger: float = 0.0,
    ) -> None:
        self._name = name
        self._serve = serve
        self._most = most
        self._linger = linger
        self._alone = _FEW
        """How many of the last groups were of one request."""
        self._waiting: queue.SimpleQueue[tuple[T, Future[R]] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, request: T) -> Future[R]:
        """Cancelling the future before its group starts withdraws the request; later it changes nothing."""
        future: Future[R] = Future()
        with self._lock:
            if self._closed:
                raise StoreError(f"{self._name}: it is closed; open the replay buffer again")
            self._waiting.put((request, future))
        return future

    def close(self) -> None:
        """Serve what is waiting, then stop."""
        with self._lock:
            if not self._closed:
                self._closed = True
                self._waiting.put(None)
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _run(self) -> None:
        while True:
            group, last = self._next_group()
            group = [(request, future) for request, future in group if future.set_running_or_notify_cancel()]
            if group:
                self._answer(group)
            if last:
                return

    def _next_group(self) -> tuple[list[tuple[T, Future[R]]], bool]:
        """(requests, whether none follow); waits for the first and takes what has piled up behind it."""
        group: list[tuple[T, Future[R]]] = []
        item = self._waiting.get()
        until = time.monotonic() + (self._linger if self._alone < _FEW else 0.0)
        try:
            while item is not None:
                group.append(item)
                if len(group) == self._most:
                    return group, False
                item = self._waiting.get(timeout=max(until - time.monotonic(), 0.0))
        except queue.Empty:
            return group, False
        finally:
            self._alone = 0 if len(group) > 1 else self._alone + 1
        return group, True

    def _answer(self, group: list[tuple[T, Future[R]]]) -> None:
        results: Sequence[R | Exception]
        try:
            results = self._serve([request for request, _ in group])
        except Exception as error:
            results = [error] * len(group)
        for (_, future), result in zip(group, results, strict=True):
            if isinstance(result, Exception):
                future.set_exception(result)
            else:
                future.set_result(result)
