"""A pool of workers: one queue of jobs, a few jobs at a time per worker, a deadline per job, and another
attempt on another worker when one dies.

Results do not depend on the pool: a job names everything it needs, weights included, so doing it again
elsewhere gives the same result.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, Self, TypeAlias

from dreamgym.distributed.jobs import Job, Loss
from dreamgym.errors import DreamGymError, RolloutsFailingError
from dreamgym.types import FailureKind

Box: TypeAlias = Any
"""Where published weights are: a file, or a reference to a cluster's object store."""


class WorkerLostError(Exception):
    """A worker died, or does not answer."""


class Worker(Protocol):
    """The driver's side of one worker."""

    @property
    def name(self) -> str: ...

    async def start(self) -> None:
        """Start it, or start it again.

        Raises:
            WorkerLostError: it died before it was ready.
            DreamGymError: its setup cannot be opened.
        """
        ...

    async def run(self, job: Job, version: int, box: Box | None) -> Any:
        """Do a job; cancelling the call cancels the job.

        Raises:
            WorkerLostError: the worker died.
        """
        ...

    async def answers(self, seconds: float) -> bool:
        """Whether it answers a message within this time."""
        ...

    async def stop(self) -> None:
        """End it at once; it may be started again."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolSettings:
    """Limits of a pool."""

    slots: int
    """Jobs at a time on one worker."""
    seconds: float
    """Deadline of one attempt at a job."""
    attempts: int = 3
    """At one job; then it is a `Loss`."""
    late: Literal["retry", "drop"] = "retry"
    """What happens to a job that misses its deadline on a worker that still answers."""
    start_seconds: float = 300.0
    """For a worker to get ready."""
    restarts: int = 3
    """Of a worker that dies without finishing a job; then the pool does without it."""
    answer_seconds: float = 10.0


@dataclass(eq=False, slots=True)
class _Entry:
    job: Job
    version: int
    box: Box | None
    future: asyncio.Future[Any]
    most: int
    """Attempts."""
    attempts: int = 0
    avoid: str = ""
    """The worker of the last attempt."""


class WorkerPool:
    """Runs jobs on workers. At most two jobs per slot are in the pool; further calls of `run` wait."""

    def __init__(
        self,
        workers: Sequence[Worker],
        settings: PoolSettings,
        *,
        on_event: Callable[[str], None] = lambda message: None,
    ) -> None:
        """`on_event` receives a line for each worker that was lost."""
        self._workers = list(workers)
        self._settings = settings
        self._on_event = on_event
        self._waiting: list[_Entry] = []
        self._changed = asyncio.Condition()
        self._room = asyncio.Semaphore(2 * settings.slots * max(1, len(workers)))
        self._alive: set[str] = set()
        self._serving: list[asyncio.Task[None]] = []
        self._running: set[_Entry] = set()
        self.events: Counter[str] = Counter()
        """Lost workers, late jobs, retries, by name."""

    async def start(self) -> None:
        """Start all workers at once; those that cannot start are an error."""
        try:
            async with asyncio.TaskGroup() as group:
                for worker in self._workers:
                    group.create_task(self._start(worker))
        except BaseExceptionGroup as several:
            await self.aclose()
            raise _first(several) from None
        self._alive = {worker.name for worker in self._workers}
        self._serving = [asyncio.create_task(self._serve(worker)) for worker in self._workers]
        for task in self._serving:
            task.add_done_callback(self._check)

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    def _check(self, task: asyncio.Task[None]) -> None:
        """A bug in serving a worker must not leave callers waiting."""
        if not task.cancelled() and (error := task.exception()) is not None:
            for entry in (*self._waiting, *self._running):
                if not entry.future.done():
                    entry.future.set_exception(error)

    async def __aexit__(self, *error: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Stop all workers; jobs that run are cancelled."""
        for task in self._serving:
            task.cancel()
        await asyncio.gather(*self._serving, return_exceptions=True)
        await asyncio.gather(*(worker.stop() for worker in self._workers))
        for entry in (*self._waiting, *self._running):
            entry.future.cancel()

    async def run(
        self, job: Job, *, version: int = 0, box: Box | None = None, attempts: int | None = None
    ) -> Any:
        """The job's result, or a `Loss` after all attempts; by default those of the settings.

        Raises:
            RolloutsFailingError: no worker is left.
            Exception: what the job itself raised.
        """
        async with self._room:
            if not self._alive:
                raise self._none_left("")
            most = self._settings.attempts if attempts is None else attempts
            entry = _Entry(job, version, box, asyncio.get_running_loop().create_future(), most)
            await self._put(entry)
            try:
                return await entry.future
            finally:
                if entry in self._waiting:  # cancelled
                    self._waiting.remove(entry)

    async def _put(self, entry: _Entry, *, first: bool = False) -> None:
        if entry.future.done():
            return
        if first:
            self._waiting.insert(0, entry)
        else:
            self._waiting.append(entry)
        async with self._changed:
            self._changed.notify_all()

    async def _take(self, worker: str) -> _Entry:
        """The next job; one that was lost on this worker only if there is no other worker."""
        async with self._changed:
            while True:
                for entry in self._waiting:
                    if entry.avoid != worker or self._alive <= {worker}:
                        self._waiting.remove(entry)
                        return entry
                await self._changed.wait()

    async def _serve(self, worker: Worker) -> None:
        """Keep one worker busy, and start it again when it is lost."""
        failures = 0
        while failures <= self._settings.restarts:
            finished = [0]
            lost = await self._until_lost(worker, finished)
            failures = 1 if finished[0] else failures + 1
            self.events["workers lost"] += 1
            self._on_event(f"{worker.name} was lost: {lost}; its groups are played again, it is restarted")
            self._alive.discard(worker.name)
            async with self._changed:
                self._changed.notify_all()  # the last worker takes the jobs that avoid it
            await worker.stop()
            while failures <= self._settings.restarts:
                try:
                    await self._start(worker)
                    self._alive.add(worker.name)
                    break
                except (WorkerLostError, DreamGymError) as error:
                    lost, failures = error, failures + 1
        self.events["workers given up"] += 1
        self._on_event(f"{worker.name} is not started again: {lost}")
        if not self._alive:
            for entry in self._waiting:
                if not entry.future.done():
                    entry.future.set_exception(self._none_left(str(lost)))
            self._waiting.clear()

    async def _until_lost(self, worker: Worker, finished: list[int]) -> Exception:
        """Run jobs in all slots until the worker is lost; its jobs then wait for another attempt."""

        async def slot() -> None:
            while True:
                entry = await self._take(worker.name)
                await self._attempt(worker, entry)
                finished[0] += 1

        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(self._settings.slots):
                    group.create_task(slot())
        except ExceptionGroup as several:
            lost = [error for error in several.exceptions if isinstance(error, WorkerLostError)]
            if len(lost) < len(several.exceptions):
                raise
            return lost[0]
        raise AssertionError("slots end only by an error")

    async def _attempt(self, worker: Worker, entry: _Entry) -> None:
        entry.attempts += 1
        entry.avoid = worker.name
        self._running.add(entry)
        try:
            await self._call(worker, entry)
        except asyncio.CancelledError:
            entry.attempts -= 1  # not its fault: another job found that the worker does not answer
            await self._again(entry, FailureKind.CRASHED, f"{worker.name} was lost")
            raise
        finally:
            self._running.discard(entry)

    async def _call(self, worker: Worker, entry: _Entry) -> None:
        """Settle the job, or leave it to another attempt.

        Raises:
            WorkerLostError: the worker died, or does not answer.
        """
        settings = self._settings
        call = asyncio.ensure_future(worker.run(entry.job, entry.version, entry.box))
        entry.future.add_done_callback(lambda _: call.cancel())  # the caller may not want it any more
        if not await _done_within(call, settings.seconds):
            self.events["late jobs"] += 1
            message = f"{entry.job.name} was not done on {worker.name} after {settings.seconds:g} seconds"
            if await worker.answers(settings.answer_seconds):
                await self._again(entry, FailureKind.TIMEOUT, message, drop=settings.late == "drop")
                return
            await self._again(entry, FailureKind.TIMEOUT, message)
            raise WorkerLostError(f"{message}, and it does not answer")
        if call.cancelled() or entry.future.done():
            return
        error = call.exception()
        if isinstance(error, WorkerLostError):
            await self._again(entry, FailureKind.CRASHED, f"{worker.name}: {error}")
            raise error
        if error is not None:
            entry.future.set_exception(error)
        else:
            entry.future.set_result(call.result())

    async def _again(self, entry: _Entry, kind: FailureKind, message: str, *, drop: bool = False) -> None:
        if entry.attempts < entry.most and not drop:
            self.events["retries"] += 1
            await self._put(entry, first=True)
        elif not entry.future.done():
            self.events["losses"] += 1
            entry.future.set_result(Loss(kind=kind, message=message, attempts=entry.attempts))

    async def _start(self, worker: Worker) -> None:
        try:
            async with asyncio.timeout(self._settings.start_seconds):
                await worker.start()
        except TimeoutError:
            await worker.stop()
            raise WorkerLostError(
                f"{worker.name} was not ready after {self._settings.start_seconds:g} seconds"
            ) from None

    def _none_left(self, why: str) -> RolloutsFailingError:
        return RolloutsFailingError(
            f"no worker is left{': ' if why else ''}{why[-1000:]}; fix the cause, then resume the run"
        )


async def _done_within(call: asyncio.Future[Any], seconds: float) -> bool:
    """Whether a call ends in time; it is cancelled if not."""
    try:
        return bool((await asyncio.wait([call], timeout=seconds))[0])
    finally:
        call.cancel()


def _first(several: BaseExceptionGroup[Any]) -> BaseException:
    for error in several.exceptions:
        if isinstance(error, WorkerLostError):
            return RolloutsFailingError(f"a worker could not be started: {error}")
        if not isinstance(error, asyncio.CancelledError):
            return _first(error) if isinstance(error, BaseExceptionGroup) else error
    return several.exceptions[0]
