"""A thread that processes all waiting requests as one batch.

Requests that arrive during a batch form the next one, so one disk sync acknowledges many writers and one
matrix product answers many searches.
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
"""After this many batches of one request in a row, a batch no longer waits for more."""


class Batcher(Generic[T, R]):
    """Passes batches of requests to `serve`, which returns a result or an error for each of them.

    Args:
        linger: seconds that a batch waits for more requests, unless the last few batches had only one.
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
        """How many of the last batches had one request."""
        self._waiting: queue.SimpleQueue[tuple[T, Future[R]] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, request: T) -> Future[R]:
        """Cancelling the future before its batch starts withdraws the request; later it has no effect."""
        future: Future[R] = Future()
        with self._lock:
            if self._closed:
                raise StoreError(f"{self._name}: it is closed; open the replay buffer again")
            self._waiting.put((request, future))
        return future

    def close(self) -> None:
        """Process waiting requests, then stop."""
        with self._lock:
            if not self._closed:
                self._closed = True
                self._waiting.put(None)
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _run(self) -> None:
        while True:
            batch, last = self._next_batch()
            batch = [(request, future) for request, future in batch if future.set_running_or_notify_cancel()]
            if batch:
                self._answer(batch)
            if last:
                return

    def _next_batch(self) -> tuple[list[tuple[T, Future[R]]], bool]:
        """(requests, whether it is the last batch); waits for the first, takes all waiting."""
        batch: list[tuple[T, Future[R]]] = []
        item = self._waiting.get()
        until = time.monotonic() + (self._linger if self._alone < _FEW else 0.0)
        try:
            while item is not None:
                batch.append(item)
                if len(batch) == self._most:
                    return batch, False
                item = self._waiting.get(timeout=max(until - time.monotonic(), 0.0))
        except queue.Empty:
            return batch, False
        finally:
            self._alone = 0 if len(batch) > 1 else self._alone + 1
        return batch, True

    def _answer(self, batch: list[tuple[T, Future[R]]]) -> None:
        results: Sequence[R | Exception]
        try:
            results = self._serve([request for request, _ in batch])
        except Exception as error:
            results = [error] * len(batch)
        for (_, future), result in zip(batch, results, strict=True):
            if isinstance(result, Exception):
                future.set_exception(result)
            else:
                future.set_result(result)
