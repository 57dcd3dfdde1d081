"""A small HTTP/1.1 server on h11, enough for JSON on loopback: keep-alive, limits, and work that ends when
its asker has gone.

An `Answer` can also be sent badly on purpose (cut off, drop by drop), for those who test clients.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from dreamgym.errors import MissingExtraError, StoreError

_LARGEST_BODY = 32 << 20
_PIECE = 64 << 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    method: str
    path: str
    """Without the query."""
    headers: Mapping[str, str]
    """By their names in small letters."""
    body: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    status: int = 200
    body: bytes = b""
    headers: Mapping[str, str] = field(default_factory=dict)
    cut: int | None = None
    """Only so many bytes of the body are sent; then the connection is dropped."""
    drip: float = 0.0
    """Seconds between pieces of the body."""

    @classmethod
    def json(cls, value: Any, status: int = 200) -> Answer:
        body = json.dumps(value, separators=(",", ":")).encode()
        return cls(status=status, body=body, headers={"content-type": "application/json"})


Handler = Callable[[Asked], Awaitable[Answer | None]]
"""Answers a request; None drops the connection without a word."""


class HttpServer:
    """Serves until closed."""

    def __init__(self, handler: Handler) -> None:
        try:
            import h11
        except ImportError:
            raise MissingExtraError("serving a model", "endpoint") from None
        self._h11 = h11
        self._handler = handler
        self._server: asyncio.Server | None = None
        self._connections: set[asyncio.Task[None]] = set()
        self.host, self.port = "", 0

    @property
    def url(self) -> str:
        return f"http://{self.host}:{self.port}"

    async def start(self, host: str = "127.0.0.1", port: int = 0) -> None:
        """
        Args:
            port: 0 for any that is free.

        Raises:
            StoreError: the address cannot be had.
        """
        try:
            self._server = await asyncio.start_server(self._serve, host, port, backlog=1024)
        except OSError as error:
            raise StoreError(
                f"cannot serve at {host}:{port}: {error.strerror}; choose another --port"
            ) from None
        self.host, self.port = host, int(self._server.sockets[0].getsockname()[1])

    async def aclose(self) -> None:
        """Refuses new connections and drops the open ones. May be called twice, and started again."""
        if self._server is None:
            return
        self._server.close()
        self._server = None
        for connection in list(self._connections):
            connection.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        try:
            await _Connection(self._h11, reader, writer, self._handler).run()
        except (ConnectionError, self._h11.RemoteProtocolError, asyncio.CancelledError):
            pass  # gone, or speaking something else than HTTP, or we are closing
        finally:
            self._connections.discard(task)
            writer.transport.abort()


class _GoneError(ConnectionError):
    """The other side has hung up, or shall be."""


class _Connection:
    def __init__(
        self, h11: Any, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, handler: Handler
    ) -> None:
        self._h11 = h11
        self._state = h11.Connection(h11.SERVER)
        self._reader = reader
        self._writer = writer
        self._handler = handler
        self._fresh = asyncio.Event()
        self._gone = False
        self._unread = 0
        self._answering: asyncio.Future[Answer | None] | None = None

    async def run(self) -> None:
        pump = asyncio.create_task(self._pump())
        try:
            while (asked := await self._asked()) is not None:
                answer = await self._answer(asked)
                if answer is None:
                    return
                await self._send(answer)
                if self._state.our_state is not self._h11.DONE:
                    return
                self._state.start_next_cycle()
        finally:
            pump.cancel()

    async def _pump(self) -> None:
        """Reads all the time, so that an asker who hangs up is noticed while the answer is being made."""
        data = b"."
        while data:
            try:
                data = await self._reader.read(_PIECE)
            except ConnectionError:
                data = b""
            self._unread += len(data)
            if self._unread > 2 * _LARGEST_BODY:
                data = b""
            self._state.receive_data(data)
            self._fresh.set()
        self._gone = True
        if self._answering is not None:
            self._answering.cancel()

    async def _answer(self, asked: Asked) -> Answer | None:
        if self._hung_up():
            return None
        self._answering = asyncio.ensure_future(self._handler(asked))
        try:
            return await self._answering
        except asyncio.CancelledError:
            if self._hung_up():
                return None
            self._answering.cancel()
            raise
        finally:
            self._answering = None

    def _hung_up(self) -> bool:
        return self._gone

    async def _asked(self) -> Asked | None:
        """The next request; None at the end of the connection."""
        h11 = self._h11
        request, body = None, bytearray()
        while True:
            event = self._state.next_event()
            if event is h11.NEED_DATA:
                if self._state.they_are_waiting_for_100_continue:
                    self._writer.write(
                        self._state.send(h11.InformationalResponse(status_code=100, headers=[]))
                    )
                await self._fresh.wait()
                self._fresh.clear()
            elif isinstance(event, h11.Request):
                request = event
            elif isinstance(event, h11.Data):
                body += event.data
                if len(body) > _LARGEST_BODY:
                    await self._send(Answer.json({"error": {"message": "the body is too large"}}, 413))
                    return None
            elif isinstance(event, h11.EndOfMessage) and request is not None:
                self._unread = 0
                return Asked(
                    method=request.method.decode(),
                    path=request.target.decode().partition("?")[0],
                    headers={name.decode(): value.decode("latin-1") for name, value in request.headers},
                    body=bytes(body),
                )
            else:
                return None

    async def _send(self, answer: Answer) -> None:
        h11 = self._h11
        headers = [*answer.headers.items(), ("content-length", str(len(answer.body)))]
        head = self._state.send(h11.Response(status_code=answer.status, headers=headers))
        body = answer.body if answer.cut is None else answer.body[: answer.cut]
        if answer.drip:
            self._writer.write(head)
            for start in range(0, len(body), max(1, len(body) // 8)):
                self._writer.write(
                    self._state.send(h11.Data(data=body[start : start + max(1, len(body) // 8)]))
                )
                await self._writer.drain()
                await asyncio.sleep(answer.drip)
        else:
            self._writer.write(head + self._state.send(h11.Data(data=body)))
        if answer.cut is not None and answer.cut < len(answer.body):
            await self._writer.drain()
            self._writer.close()
            raise _GoneError
        self._writer.write(self._state.send(h11.EndOfMessage()))
        await self._writer.drain()
