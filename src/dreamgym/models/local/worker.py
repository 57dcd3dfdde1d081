"""A worker: one scheduler and the thread that runs it, fed from any event loop.

A step of a small model is a sequence of short operations with Python between them. More threads per operation
do not help; a second worker does. Each worker has its own conversations; workers share only the weights.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress

import torch

from dreamgym.errors import DreamGymError, EpisodeFailedError
from dreamgym.models.local.scheduler import Finished, PendingRequest, Scheduler
from dreamgym.types import FailureKind


class Worker:
    """Runs one scheduler in its own thread."""

    def __init__(self, scheduler: Scheduler, *, threads: int, restart: Callable[[Scheduler], None]) -> None:
        """
        Args:
            threads: of one matrix product.
            restart: called before the next step once weights have changed.
        """
        self.scheduler = scheduler
        self.conversations = 0
        """Conversations assigned to this worker."""
        self.running = 0
        self.executor: ThreadPoolExecutor | None = None
        self._threads = threads
        self._restart = restart
        self._inbox: deque[PendingRequest | Callable[[], None]] = deque()
        self._lock = threading.Lock()
        self._weights = threading.Lock()
        self._working = False
        self._closed = False
        self._stale = False

    def put(self, pending: PendingRequest) -> None:
        """Queue without starting, so that requests of one loop iteration share a step; then `wake`."""
        self._inbox.append(pending)

    def call(self, message: Callable[[], None]) -> None:
        """Run a function in the worker's thread between two steps."""
        if not self._closed:
            self._inbox.append(message)
            self.wake()

    def mark_stale(self) -> None:
        """Weights have changed: clear caches before the next step."""
        self._stale = True

    @contextmanager
    def held(self) -> Iterator[None]:
        """Block steps inside the context; clear caches afterwards."""
        with self._weights:
            yield
            self._stale = True

    async def aclose(self) -> None:
        self.call(lambda: None)
        self._closed = True
        if self.executor is not None:
            await asyncio.to_thread(self.executor.shutdown)

    def wake(self) -> None:
        with self._lock:
            if self._working or not self._inbox:
                return
            if self.executor is None:
                # torch.set_num_threads is per thread: the event loop's thread keeps its own setting.
                self.executor = ThreadPoolExecutor(
                    1, "dreamgym-model", initializer=torch.set_num_threads, initargs=(self._threads,)
                )
            self._working = True
        self.executor.submit(self._work)

    def _work(self) -> None:
        """In the worker's thread: run until no request is left."""
        while True:
            while self._inbox:
                item = self._inbox.popleft()
                if isinstance(item, PendingRequest):
                    self.scheduler.submit(item)
                else:
                    item()
            if self._closed:
                closed = EpisodeFailedError(FailureKind.SERVER_DOWN, "the model was closed")
                _deliver(self.scheduler.fail_all(closed))
            with self._lock:
                if self.scheduler.idle and not self._inbox:
                    self._working = False
                    return
            try:
                with self._weights:
                    if self._stale:
                        self._restart(self.scheduler)
                        self._stale = False
                    finished = self.scheduler.step()
            except Exception as error:  # a bug here must not leave callers waiting
                broken = EpisodeFailedError(FailureKind.CRASHED, f"{type(error).__name__}: {error}")
                finished = self.scheduler.fail_all(broken)
            _deliver(finished)


class Workers:
    """Assigns conversations to workers: known ones stay, new ones go to the worker with the fewest.

    The second worker is used only when the first has enough conversations to fill its steps.
    """

    def __init__(self, workers: Sequence[Worker], *, enough: int) -> None:
        self.all = tuple(workers)
        self._enough = enough
        self._home: dict[str, Worker] = {}

    def of(self, conversation: str | None) -> Worker:
        if conversation is None:
            return self._least_loaded([worker.running for worker in self.all])
        if conversation not in self._home:
            worker = self._least_loaded([worker.conversations for worker in self.all])
            worker.conversations += 1
            self._home[conversation] = worker
        return self._home[conversation]

    def forget(self, conversation: str) -> None:
        worker = self._home.pop(conversation, None)
        if worker is not None:
            worker.conversations -= 1
            worker.call(lambda: worker.scheduler.forget(conversation))

    def _least_loaded(self, loads: list[int]) -> Worker:
        fewest = min(range(len(loads)), key=lambda place: loads[place])
        return self.all[0 if loads[0] < self._enough else fewest]


def _deliver(finished: Sequence[Finished]) -> None:
    by_loop: dict[asyncio.AbstractEventLoop, list[Finished]] = {}
    for pending, answer in finished:
        by_loop.setdefault(pending.waiter.get_loop(), []).append((pending, answer))
    for loop, answers in by_loop.items():
        with suppress(RuntimeError):  # the loop is closed: its callers are gone
            loop.call_soon_threadsafe(_settle, answers)


def _settle(answers: Sequence[Finished]) -> None:
    for pending, answer in answers:
        future = pending.waiter
        if future.done():
            continue
        if isinstance(answer, DreamGymError):
            future.set_exception(answer)
        else:
            future.set_result(answer)
