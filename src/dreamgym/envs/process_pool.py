"""A pool of episode processes: each episode of a heavy simulator runs in a forked process of its own.

`ProcessPool` starts a fork server (`process_worker`), which imports the simulator once and forks a child for
each episode. A child that crashes or hangs is an `EpisodeFailedError` of that episode. A fork server that
crashes or hangs is replaced.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

from dreamgym.envs.process_worker import NUMBER, READY
from dreamgym.errors import DreamGymError, EpisodeFailedError
from dreamgym.types import FailureKind, JsonValue

_MAX_REPLY_BYTES = 64 * 2**20
_CONTROL_TIMEOUT = 30.0
"""Seconds for the fork server to fork or end a process, which takes milliseconds."""
_Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class ProcessPool:
    """At most `limit` episode processes at once; further ones wait.

    A pool belongs to the event loop of its first use and restarts when used in another one.
    """

    def __init__(
        self,
        target: str,
        arguments: Mapping[str, JsonValue],
        *,
        limit: int,
        start_timeout: float = 300.0,
        control_timeout: float = _CONTROL_TIMEOUT,
    ) -> None:
        """`target`: the ``module:Class`` of a `RequestHandler`, made by the fork server with `arguments`."""
        self._target = target
        self._arguments = json.dumps(dict(arguments))
        self._limit = limit
        self._start_timeout = start_timeout
        self._control_timeout = control_timeout
        self._loop: asyncio.AbstractEventLoop | None = None
        self._server: _ForkServer | None = None

    async def open(self) -> EpisodeProcess:
        """A new process; the caller closes it."""
        loop = asyncio.get_running_loop()
        if self._loop is not loop:
            self.close()
            self._loop, self._places, self._starting = loop, asyncio.Semaphore(self._limit), asyncio.Lock()
            # Episodes only compute. With more of them running than cores, a timeout would measure the queue;
            # one extra covers the latency of messages.
            self._work = asyncio.Semaphore((os.cpu_count() or 1) + 1)
        places = self._places
        await places.acquire()
        try:
            async with self._starting:
                if self._server is None or not self._server.alive:
                    self._server = await _ForkServer.start(
                        self._target, self._arguments, self._start_timeout, self._control_timeout
                    )
                return await self._server.fork(places, self._work)
        except BaseException:
            places.release()
            raise

    def close(self) -> None:
        """End the fork server and every process. Open episodes fail."""
        if self._server is not None:
            self._server.close()
            self._server = None


class EpisodeProcess:
    """The client side of one episode process."""

    def __init__(
        self,
        server: _ForkServer,
        pid: int,
        streams: _Streams,
        places: asyncio.Semaphore,
        work: asyncio.Semaphore,
    ) -> None:
        self._server = server
        self.pid = pid
        self._reader, self._writer = streams
        self._places: asyncio.Semaphore | None = places
        self._work = work

    async def ask(self, request: Mapping[str, JsonValue], *, timeout: float) -> dict[str, Any]:  # noqa: ASYNC109
        """Send one request and wait for its reply.

        Raises:
            EpisodeFailedError: the process raised an exception or died (`crashed`), or did not reply in time
                (`timeout`). The process is closed then.
        """
        data = json.dumps(request).encode()
        try:
            async with self._work, asyncio.timeout(timeout):
                self._writer.write(NUMBER.pack(len(data)) + data)
                await self._writer.drain()
                (size,) = NUMBER.unpack(await self._reader.readexactly(NUMBER.size))
                if not 0 < size <= _MAX_REPLY_BYTES:
                    raise ConnectionError(f"expected a reply of at most {_MAX_REPLY_BYTES} bytes, got {size}")
                reply = json.loads(await self._reader.readexactly(size))
        except TimeoutError:
            await self.aclose()
            raise EpisodeFailedError(
                FailureKind.TIMEOUT,
                f"the episode process did not answer {request.get('do')!r} within {timeout:g} s",
            ) from None
        except (ConnectionError, asyncio.IncompleteReadError) as error:
            status = await self.aclose()
            raise EpisodeFailedError(
                FailureKind.CRASHED,
                f"the episode process died at {request.get('do')!r} (exit status {status}): {error}",
            ) from None
        if "error" in reply:
            await self.aclose()
            raise EpisodeFailedError(
                FailureKind.CRASHED, f"the episode process raised:\n{reply['error']['traceback']}"
            )
        return dict(reply["reply"])

    async def aclose(self) -> int | None:
        """End the process and free its slot; returns its exit status the first time."""
        if self._places is None:
            return None
        places, self._places = self._places, None
        self._writer.close()
        try:
            return await asyncio.shield(self._server.end(self.pid))
        finally:
            places.release()


class _ForkServer:
    def __init__(
        self, process: subprocess.Popen[bytes], control: socket.socket, control_timeout: float
    ) -> None:
        self._process = process
        self._control = control
        self._control_timeout = control_timeout
        self._loop = asyncio.get_running_loop()
        self._turn = asyncio.Lock()
        self._unwanted = set[asyncio.Future[None]]()

    @property
    def alive(self) -> bool:
        return self._process.poll() is None and self._control.fileno() >= 0

    @classmethod
    async def start(cls, target: str, arguments: str, seconds: float, control_timeout: float) -> _ForkServer:
        """
        Raises:
            DreamGymError: the simulator cannot be loaded.
            EpisodeFailedError: the server died or did not get ready in time.
        """
        near, far = socket.socketpair()
        near.setblocking(False)
        process = subprocess.Popen(  # noqa: ASYNC220  (returns at once)
            [sys.executable, "-m", "dreamgym.envs.process_worker", str(far.fileno()), target, arguments],
            pass_fds=[far.fileno()],
            stdin=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "PYTHONHASHSEED": "0"},
            start_new_session=True,  # Ctrl-C goes to the run, which ends its processes itself
        )
        far.close()
        server = cls(process, near, control_timeout)
        try:
            async with asyncio.timeout(seconds):
                size = await server._number()
                if size != READY:
                    problem = (await server._receive(size)).decode(errors="replace")
                    raise DreamGymError(f"{target} could not be loaded:\n{problem}")
        except (TimeoutError, ConnectionError) as error:
            server.close()
            late = isinstance(error, TimeoutError)
            raise EpisodeFailedError(
                FailureKind.TIMEOUT if late else FailureKind.CRASHED,
                f"the fork server of {target} "
                + (f"was not ready within {seconds:g} s" if late else f"died while it started: {error}"),
            ) from None
        except BaseException:
            server.close()
            raise
        return server

    async def fork(self, places: asyncio.Semaphore, work: asyncio.Semaphore) -> EpisodeProcess:
        # Replies carry no request id: a reply left unread by a cancelled caller would be read as that of the
        # next request. So the exchange is completed in any case.
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
            async with self._turn, asyncio.timeout(self._control_timeout):
                socket.send_fds(self._control, [b"F" + NUMBER.pack(0)], [far.fileno()])
                pid = await self._number()
        except TimeoutError:
            near.close()
            self._kill()
            raise EpisodeFailedError(
                FailureKind.TIMEOUT, f"the fork server did not answer within {self._control_timeout:g} s"
            ) from None
        except OSError as error:
            near.close()
            self._close_control()  # not alive any more, even if the process is not reaped yet
            raise EpisodeFailedError(FailureKind.CRASHED, f"the fork server died: {error}") from None
        finally:
            far.close()
        return pid, await asyncio.open_connection(sock=near)

    async def _end_unwanted(self, forking: asyncio.Future[tuple[int, _Streams]]) -> None:
        with contextlib.suppress(EpisodeFailedError):
            pid, (_, writer) = await forking
            writer.close()
            await self.end(pid)

    async def end(self, pid: int) -> int | None:
        try:
            async with self._turn, asyncio.timeout(self._control_timeout):
                await asyncio.get_running_loop().sock_sendall(self._control, b"E" + NUMBER.pack(pid))
                return await self._number()
        except TimeoutError:
            self._kill()
        except OSError:
            pass  # the server has died
        return None

    async def _number(self) -> int:
        return int(NUMBER.unpack(await self._receive(NUMBER.size))[0])

    async def _receive(self, size: int) -> bytes:
        parts = bytearray()
        while len(parts) < size:
            part = await asyncio.get_running_loop().sock_recv(self._control, size - len(parts))
            if not part:
                raise ConnectionResetError("the fork server has ended")
            parts += part
        return bytes(parts)

    def close(self) -> None:
        self._close_control()  # at the end of the stream the server ends its children and itself
        try:
            self._process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            self._kill()

    def _close_control(self) -> None:
        """Closing a socket that a coroutine still reads leaves its number in the event loop: the next
        socket with that number would never be read."""
        if self._control.fileno() >= 0 and not self._loop.is_closed():
            self._loop.remove_reader(self._control.fileno())
            self._loop.remove_writer(self._control.fileno())
        self._control.close()

    def _kill(self) -> None:
        """Kill a server that hangs, with its children: without it, none of them can be ended."""
        self._close_control()
        if self._process.returncode is None:  # else its number may be that of another process by now
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
