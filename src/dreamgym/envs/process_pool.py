"""Heavy engines, each episode in a process of its own, many at once.

`Engines` starts one host process (`engine_host`), which loads the engine once and forks a child per episode.
A child that crashes or hangs becomes an `EpisodeFailedError` of that episode alone.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

from dreamgym.envs.process_worker import NUMBER, READY
from dreamgym.errors import DreamGymError, EpisodeFailedError
from dreamgym.types import FailureKind, JsonValue

_LARGEST_REPLY = 64 * 2**20
_Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class Engines:
    """At most `limit` episodes at once; a further one waits for a place.

    Belongs to the event loop it is first used in; in another one it starts afresh.
    """

    def __init__(
        self, target: str, arguments: Mapping[str, JsonValue], *, limit: int, start_timeout: float = 300.0
    ) -> None:
        """`target` is the engine's ``module:Class``, constructed in the host with `arguments`."""
        self._target = target
        self._arguments = json.dumps(dict(arguments))
        self._limit = limit
        self._start_timeout = start_timeout
        self._loop: asyncio.AbstractEventLoop | None = None
        self._host: _Host | None = None

    async def open(self) -> EpisodeProcess:
        """A fresh engine; the caller closes it."""
        loop = asyncio.get_running_loop()
        if self._loop is not loop:
            self.close()
            self._loop, self._places, self._starting = loop, asyncio.Semaphore(self._limit), asyncio.Lock()
            # Engines only compute: more of them at work than there are cores would just take turns, and a
            # time-out would measure the queue. The one extra covers for messages on their way.
            self._work = asyncio.Semaphore((os.cpu_count() or 1) + 1)
        places = self._places
        await places.acquire()
        try:
            async with self._starting:
                if self._host is None or not self._host.alive:
                    self._host = await _Host.start(self._target, self._arguments, self._start_timeout)
                return await self._host.fork(places, self._work)
        except BaseException:
            places.release()
            raise

    def close(self) -> None:
        """End the host and every engine. Episodes still open fail."""
        if self._host is not None:
            self._host.close()
            self._host = None


class EpisodeProcess:
    """The near end of one engine."""

    def __init__(
        self,
        host: _Host,
        pid: int,
        streams: _Streams,
        places: asyncio.Semaphore,
        work: asyncio.Semaphore,
    ) -> None:
        self._host = host
        self.pid = pid
        self._reader, self._writer = streams
        self._places: asyncio.Semaphore | None = places
        self._work = work

    async def ask(self, request: Mapping[str, JsonValue], *, timeout: float) -> dict[str, Any]:  # noqa: ASYNC109
        """Send one request and wait for its reply.

        Raises:
            EpisodeFailedError: the engine raised or died (`crashed`), or did not answer in time (`timeout`).
                The engine is gone then.
        """
        data = json.dumps(request).encode()
        try:
            async with self._work, asyncio.timeout(timeout):
                self._writer.write(NUMBER.pack(len(data)) + data)
                await self._writer.drain()
                (size,) = NUMBER.unpack(await self._reader.readexactly(NUMBER.size))
                if not 0 < size <= _LARGEST_REPLY:
                    raise ConnectionError(f"a reply of {size} bytes was announced")
                reply = json.loads(await self._reader.readexactly(size))
        except TimeoutError:
            await self.aclose()
            raise EpisodeFailedError(
                FailureKind.TIMEOUT, f"the engine did not answer {request.get('do')!r} within {timeout:g} s"
            ) from None
        except (ConnectionError, asyncio.IncompleteReadError) as error:
            status = await self.aclose()
            raise EpisodeFailedError(
                FailureKind.CRASHED,
                f"the engine died at {request.get('do')!r} (exit status {status}): {error}",
            ) from None
        if "error" in reply:
            await self.aclose()
            raise EpisodeFailedError(
                FailureKind.CRASHED, f"the engine raised:\n{reply['error']['traceback']}"
            )
        return dict(reply["reply"])

    async def aclose(self) -> int | None:
        """End the engine and give its place back; returns its exit status the first time."""
        if self._places is None:
            return None
        places, self._places = self._places, None
        self._writer.close()
        try:
            return await asyncio.shield(self._host.end(self.pid))
        finally:
            places.release()


class _Host:
    def __init__(self, process: subprocess.Popen[bytes], control: socket.socket) -> None:
        self._process = process
        self._control = control
        self._turn = asyncio.Lock()
        self._unwanted = set[asyncio.Future[None]]()

    @property
    def alive(self) -> bool:
        return self._process.poll() is None and self._control.fileno() >= 0

    @classmethod
    async def start(cls, target: str, arguments: str, seconds: float) -> _Host:
        near, far = socket.socketpair()
        near.setblocking(False)
        process = subprocess.Popen(  # noqa: ASYNC220  (returns at once)
            [sys.executable, "-m", "dreamgym.envs.process_worker", str(far.fileno()), target, arguments],
            pass_fds=[far.fileno()],
            stdin=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "PYTHONHASHSEED": "0"},
            start_new_session=True,  # Ctrl-C is for the run, which then ends its engines itself
        )
        far.close()
        host = cls(process, near)
        try:
            async with asyncio.timeout(seconds):
                size = await host._number()
                if size != READY:
                    problem = (await host._receive(size)).decode(errors="replace")
                    raise DreamGymError(f"the engine {target} could not be loaded:\n{problem}")
        except (TimeoutError, ConnectionError) as error:
            host.close()
            raise DreamGymError(
                f"the engine {target} was not ready within {seconds:g} s: {error!r}"
            ) from None
        except BaseException:
            host.close()
            raise
        return host

    async def fork(self, places: asyncio.Semaphore, work: asyncio.Semaphore) -> EpisodeProcess:
        # Answers have no names, only an order: one left unread by a caller who was cancelled would be taken
        # for the next caller's, so the exchange goes to its end in any case.
        forking = asyncio.ensure_future(self._fork())
        try:
            pid, streams = await asyncio.shield(forking)
        except asyncio.CancelledError:
            unwanted = asyncio.ensure_future(self._end_unwanted(forking))
            self._unwanted.add(unwanted)
            unwanted.add_done_callback(self._unwanted.discard)
            raise
        return EpisodeProcess(self, pid, streams, places, work)

    async def _fork(self) -> tuple[int, _Streams]:
        near, far = socket.socketpair()
        try:
            async with self._turn:
                socket.send_fds(self._control, [b"F" + NUMBER.pack(0)], [far.fileno()])
                pid = await self._number()
        except OSError as error:
            near.close()
            raise EpisodeFailedError(FailureKind.CRASHED, f"the engine host is gone: {error}") from None
        finally:
            far.close()
        return pid, await asyncio.open_connection(sock=near)

    async def _end_unwanted(self, forking: asyncio.Future[tuple[int, _Streams]]) -> None:
        with contextlib.suppress(EpisodeFailedError):
            pid, (_, writer) = await forking
            writer.close()
            await self.end(pid)

    async def end(self, pid: int) -> int | None:
        with contextlib.suppress(OSError):
            async with self._turn:
                await asyncio.get_running_loop().sock_sendall(self._control, b"E" + NUMBER.pack(pid))
                return await self._number()
        return None

    async def _number(self) -> int:
        return int(NUMBER.unpack(await self._receive(NUMBER.size))[0])

    async def _receive(self, size: int) -> bytes:
        parts = bytearray()
        while len(parts) < size:
            part = await asyncio.get_running_loop().sock_recv(self._control, size - len(parts))
            if not part:
                raise ConnectionResetError("the host has ended")
            parts += part
        return bytes(parts)

    def close(self) -> None:
        self._control.close()  # the host ends its children and itself when it reads the end of the stream
        try:
            self._process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
