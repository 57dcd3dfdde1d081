"""A lane: one engine and the one thread that works it, fed from any event loop.

A small model's step is a row of short operations with Python between them: a second thread of the same
operation has nothing to do, a second lane has. Each lane has its own conversations, so no two share anything
but the weights.
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
from dreamgym.models.local.scheduler import Engine, PendingRequest, Settled
from dreamgym.types import FailureKind


class Worker:
    def __init__(self, engine: Engine, *, threads: int, restart: Callable[[Engine], None]) -> None:
        """
        Args:
            threads: of one operation.
            restart: called before the next step once weights have changed.
        """
        self.engine = engine
        self.conversations = 0
        """That are its own, for as long as they are remembered."""
        self.under_way = 0
        self.worker: ThreadPoolExecutor | None = None
        self._threads = threads
        self._restart = restart
        self._inbox: deque[PendingRequest | Callable[[], None]] = deque()
        self._lock = threading.Lock()
        self._weights = threading.Lock()
        self._working = False
        self._closed = False
        self._stale = False

    def put(self, ticket: PendingRequest) -> None:
        """Not worked at once: whoever else is ready now may come along, then `wake`."""
        self._inbox.append(ticket)

    def tell(self, message: Callable[[], None]) -> None:
        """Done by the worker, between two steps."""
        if not self._closed:
            self._inbox.append(message)
            self.wake()

    def expire(self) -> None:
        """Weights have changed."""
        self._stale = True

    @contextmanager
    def held(self) -> Iterator[None]:
        """No step is computed meanwhile, and the next one expects new weights."""
        with self._weights:
            yield
            self._stale = True

    async def aclose(self) -> None:
        self.tell(lambda: None)
        self._closed = True
        if self.worker is not None:
            await asyncio.to_thread(self.worker.shutdown)

    def wake(self) -> None:
        with self._lock:
            if self._working or not self._inbox:
                return
            if self.worker is None:
                # torch counts threads per thread: the owner of the event loop keeps its own number.
                self.worker = ThreadPoolExecutor(
                    1, "dreamgym-model", initializer=torch.set_num_threads, initargs=(self._threads,)
                )
            self._working = True
        self.worker.submit(self._work)

    def _work(self) -> None:
        """In the worker's thread: until nobody waits."""
        while True:
            while self._inbox:
                item = self._inbox.popleft()
                if isinstance(item, PendingRequest):
                    self.engine.take(item)
                else:
                    item()
            if self._closed:
                gone = EpisodeFailedError(FailureKind.SERVER_DOWN, "the model was closed before it answered")
                _deliver(self.engine.abandon(gone))
            with self._lock:
                if self.engine.idle and not self._inbox:
                    self._working = False
                    return
            try:
                with self._weights:
                    if self._stale:
                        self._restart(self.engine)
                        self._stale = False
                    settled = self.engine.step()
            except Exception as error:  # a bug of ours; nobody may wait for ever
                broken = EpisodeFailedError(FailureKind.CRASHED, f"{type(error).__name__}: {error}")
                settled = self.engine.abandon(broken)
            _deliver(settled)


class Workers:
    """Which lane serves whom: a conversation stays in the lane that remembers it, a new one goes where there
    are fewest. A second lane is opened only when the first has enough to fill its steps."""

    def __init__(self, lanes: Sequence[Worker], *, enough: int) -> None:
        self.all = tuple(lanes)
        self._enough = enough
        self._home: dict[str, Worker] = {}

    def of(self, conversation: str | None) -> Worker:
        if conversation is None:
            return self._emptiest([lane.under_way for lane in self.all])
        if conversation not in self._home:
            lane = self._emptiest([lane.conversations for lane in self.all])
            lane.conversations += 1
            self._home[conversation] = lane
        return self._home[conversation]

    def forget(self, conversation: str) -> None:
        lane = self._home.pop(conversation, None)
        if lane is not None:
            lane.conversations -= 1
            lane.tell(lambda: lane.engine.forget(conversation))

    def _emptiest(self, loads: list[int]) -> Worker:
        fewest = min(range(len(loads)), key=lambda place: loads[place])
        return self.all[0 if loads[0] < self._enough else fewest]


def _deliver(settled: Sequence[Settled]) -> None:
    by_loop: dict[asyncio.AbstractEventLoop, list[Settled]] = {}
    for ticket, answer in settled:
        by_loop.setdefault(ticket.waiter.get_loop(), []).append((ticket, answer))
    for loop, answers in by_loop.items():
        with suppress(RuntimeError):  # a loop that has closed: nobody waits there
            loop.call_soon_threadsafe(_settle, answers)


def _settle(answers: Sequence[Settled]) -> None:
    for ticket, answer in answers:
        future = ticket.waiter
        if future.done():
            continue
        if isinstance(answer, DreamGymError):
            future.set_exception(answer)
        else:
            future.set_result(answer)
