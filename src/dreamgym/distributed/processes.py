"""Workers as processes of this machine, one thread each."""

from __future__ import annotations

import asyncio
import itertools
import os
import pickle
import signal
import socket
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any, Final
from weakref import WeakKeyDictionary

from dreamgym.distributed.jobs import Job
from dreamgym.distributed.messages import Failure
from dreamgym.distributed.pool import WorkerLostError
from dreamgym.distributed.worker import WorkerSetup
from dreamgym.distributed.worker_process import Surroundings, receive, send
from dreamgym.errors import ConfigError

_PROGRAM: Final = "dreamgym.distributed.worker_process"
_FORKS: Final = sys.platform == "linux"
"""Elsewhere a fork after torch was imported is not safe: every worker imports it."""
_END_SECONDS = 3.0
"""For a process to end by itself, before it is killed."""
_LOG_TAIL = 2000


class ProcessWorker:
    """A worker in a process of its own; the `Worker` role of a pool. Weights are in a file."""

    def __init__(self, number: int, setup: WorkerSetup, log: Path) -> None:
        """`log` receives what the process prints."""
        self.name = f"worker {number}"
        self.pid: int | None = None
        self._setup = pickled(setup)
        self._log = log
        self._writer: asyncio.StreamWriter | None = None
        self._forking: asyncio.Future[int] | None = None
        self._reading: asyncio.Task[None] | None = None
        self._numbers = itertools.count()
        self._calls: dict[int, asyncio.Future[Any]] = {}

    async def start(self) -> None:
        near, far = socket.socketpair()
        near.setblocking(False)
        self._log.parent.mkdir(parents=True, exist_ok=True)
        try:
            # A cancelled start must leave no reply unread: it would be taken for the next one.
            self._forking = asyncio.ensure_future((_forks.fork if _FORKS else _spawn)(far, self._log))
            self.pid = await asyncio.shield(self._forking)
        except BaseException:
            near.close()
            raise
        reader, self._writer = await asyncio.open_unix_connection(sock=near)
        try:
            send(self._writer, (Surroundings.here(), self._setup))
            ready = await receive(reader)
        except (asyncio.IncompleteReadError, ConnectionError):
            raise WorkerLostError(self._ended()) from None
        if isinstance(ready, Failure):
            await self.stop()
            raise ready.error()
        self._reading = asyncio.create_task(self._read(reader))

    async def run(self, job: Job, version: int, box: Path | None) -> Any:
        number, asked = next(self._numbers), pickle.dumps(job)
        try:
            result = await self._ask(number, ("run", number, asked, version, box))
        except asyncio.CancelledError:
            if self._writer is not None and not self._writer.is_closing():
                send(self._writer, ("cancel", number))
            raise
        if isinstance(result, Failure):
            raise result.error()
        return result

    async def answers(self, seconds: float) -> bool:
        number = next(self._numbers)
        try:
            async with asyncio.timeout(seconds):
                await self._ask(number, ("ping", number))
        except (TimeoutError, WorkerLostError):
            return False
        return True

    async def stop(self) -> None:
        """End the process: it closes its environments when the connection ends, or is killed."""
        if self._forking is not None:
            await asyncio.wait([self._forking], timeout=_END_SECONDS)
        if self._writer is not None:
            with suppress(OSError, RuntimeError):
                self._writer.write_eof()
        if self._reading is not None:
            await asyncio.wait([self._reading], timeout=_END_SECONDS)
            self._reading.cancel()
            self._reading = None
        self._kill()
        self._fail_calls("it was stopped")

    async def _ask(self, number: int, message: tuple[Any, ...]) -> Any:
        if self._writer is None or self._writer.is_closing():
            raise WorkerLostError("its process has ended")
        future = self._calls[number] = asyncio.get_running_loop().create_future()
        try:
            send(self._writer, message)
            await self._writer.drain()
            return await future
        except ConnectionError:
            raise WorkerLostError(self._ended()) from None
        finally:
            self._calls.pop(number, None)

    async def _read(self, reader: asyncio.StreamReader) -> None:
        try:
            while True:
                number, result = await receive(reader)
                future = self._calls.get(number)
                if future is not None and not future.done():
                    future.set_result(result)
        except (asyncio.IncompleteReadError, ConnectionError):
            self._fail_calls(self._ended())
            self._kill()

    def _fail_calls(self, why: str) -> None:
        for future in self._calls.values():
            if not future.done():
                future.set_exception(WorkerLostError(why))

    def _ended(self) -> str:
        try:
            said = self._log.read_text(encoding="utf-8", errors="replace")[-_LOG_TAIL:].strip()
        except OSError:
            said = ""
        return "its process has ended" + (f"; {self._log} ends with:\n{said}" if said else "")

    def _kill(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None
        if self.pid is not None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)
            self.pid = None


class _ForkServer:
    """A process that has imported what workers need; one for all pools of this process."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._turns = WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Lock]()

    async def fork(self, connection: socket.socket, log: Path) -> int:
        """A worker that talks over the other end of `connection`, which is closed here; returns its process
        id."""
        loop = asyncio.get_running_loop()
        turn = self._turns.setdefault(loop, asyncio.Lock())
        async with turn:
            with connection:
                return await self._fork(connection, log)

    async def _fork(self, connection: socket.socket, log: Path) -> int:
        if self._process is None or self._process.poll() is not None or self._control is None:
            self._start(log)
        assert self._control is not None
        try:
            socket.send_fds(self._control, [str(log.absolute()).encode()], [connection.fileno()])
            found = await asyncio.get_running_loop().sock_recv(self._control, 8)
        except OSError:
            found = b""
        except asyncio.CancelledError:  # the event loop ends
            self._end()
            raise
        if len(found) < 8:
            self._end()
            raise WorkerLostError(f"the process that forks workers has ended; see {log}")
        return int.from_bytes(found)

    def _start(self, log: Path) -> None:
        near, far = socket.socketpair()
        near.setblocking(False)
        with far, log.open("ab") as file:
            self._process = _popen("forks", far, file)
        self._control = near

    def _end(self) -> None:
        if self._control is not None:
            self._control.close()
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        self._control = self._process = None


_forks: Final = _ForkServer()


async def _spawn(connection: socket.socket, log: Path) -> int:
    with connection, log.open("ab") as file:
        return _popen("work", connection, file, str(log.absolute())).pid


def _popen(what: str, connection: socket.socket, file: Any, *arguments: str) -> subprocess.Popen[bytes]:
    paths = os.pathsep.join(filter(None, sys.path))
    return subprocess.Popen(
        [sys.executable, "-m", _PROGRAM, what, str(connection.fileno()), *arguments],
        pass_fds=[connection.fileno()],
        stdin=subprocess.DEVNULL,
        stdout=file,
        stderr=file,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": paths},
        start_new_session=True,  # Ctrl-C goes to the run, which ends its workers itself
    )


def pickled(setup: WorkerSetup) -> bytes:
    """
    Raises:
        ConfigError: a part of the setup exists only in this process.
    """
    try:
        return pickle.dumps(setup)
    except Exception as error:  # whatever a user's object holds
        raise ConfigError(
            f"workers are processes of their own, and {error}; define environment and experience model in a "
            "module, pass them by name or FILE.py:CLASS, or set train.workers=0"
        ) from None
