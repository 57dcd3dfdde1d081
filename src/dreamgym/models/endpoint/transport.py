"""Connections: HTTP/1.1 by h11 over asyncio's streams, one request at a time on each, under httpx or without.

httpx's own pool looks at every connection for every request, and its requests and responses cost as
much again as h11 (docs/decisions/0009-endpoints.md). So what is sent thousands of times goes to `post`, and
httpx does the rest, and everything where the environment names a proxy. `post` reads a reply of the plainest
form without h11 too; at the first sign of anything else h11 gets all that has come.
"""

from __future__ import annotations

import asyncio
import re
import ssl
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

if TYPE_CHECKING:
    import httpx

_PIECE = 64 << 10
_CONNECT_SECONDS = 10.0
LARGEST_BODY = 64 << 20

_Place = tuple[str, str, int]
Headers = list[tuple[bytes, bytes]]


@dataclass(frozen=True, slots=True)
class Reply:
    """A whole response, its body not packed."""

    status: int
    headers: Headers
    body: bytes


_Exchanged = tuple[Reply, bool]
"""A reply, and whether its connection can be used again."""


class _Line:
    """One connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    @property
    def usable(self) -> bool:
        return not self.reader.at_eof() and not self.writer.is_closing()


class LeanTransport:
    """What `httpx.AsyncClient(transport=…)` asks for."""

    def __init__(self) -> None:
        import h11
        import httpx

        self._h11 = h11
        self._httpx = httpx
        self._idle: dict[_Place, deque[_Line]] = {}
        self._busy: set[_Line] = set()
        self._ssl: ssl.SSLContext | None = None

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        url = request.url
        place = (url.scheme, url.raw_host.decode(), url.port or 0)
        head = self._h11.Request(method=request.method, target=url.raw_path, headers=request.headers.raw)
        reply = await self._on_a_line(place, lambda line: self._exchange(line, head, request.content))
        return self._httpx.Response(reply.status, headers=reply.headers, content=reply.body)

    async def post(self, url: str, content: bytes, headers: bytes) -> Reply:
        """Without httpx's requests and responses, but with its errors.

        Args:
            headers: whole lines, in lower case, without host and length.

        Raises:
            httpx.TransportError: no connection, or it broke.
            httpx.DecodingError: the body is packed or huge.
        """
        place, path, host = _target(url)
        head = b"host: %b\r\ncontent-length: %d\r\n%b" % (host, len(content), headers)
        return await self._on_a_line(place, lambda line: self._posted(line, path, head, content))

    async def _on_a_line(self, place: _Place, exchange: Callable[[_Line], Awaitable[_Exchanged]]) -> Reply:
        line = await self._line(place)
        self._busy.add(line)
        try:
            reply, again = await exchange(line)
        except (self._h11.RemoteProtocolError, ConnectionError, ssl.SSLError) as error:
            line.writer.transport.abort()
            raise self._httpx.RemoteProtocolError(type(error).__name__) from None
        except BaseException:  # whoever was waiting has given up: what comes now would be somebody else's
            line.writer.transport.abort()
            raise
        finally:
            self._busy.discard(line)
        if again:
            self._idle.setdefault(place, deque()).append(line)
        else:
            line.writer.transport.abort()
        return reply

    async def aclose(self) -> None:
        """Whoever still waits for a reply gets an error."""
        for line in [*self._busy, *(line for lines in self._idle.values() for line in lines)]:
            line.writer.transport.abort()
        self._idle.clear()
        await asyncio.sleep(0)  # transports close in the next turn of the loop

    async def __aenter__(self) -> LeanTransport:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def _line(self, place: _Place) -> _Line:
        idle = self._idle.get(place)
        while idle:
            line = idle.pop()
            if line.usable:
                return line
            line.writer.transport.abort()
        scheme, host, port = place
        if scheme == "https" and self._ssl is None:
            self._ssl = self._httpx.create_ssl_context()
        try:
            async with asyncio.timeout(_CONNECT_SECONDS):
                reader, writer = await asyncio.open_connection(
                    host,
                    port or (443 if scheme == "https" else 80),
                    ssl=self._ssl if scheme == "https" else None,
                )
        except (OSError, TimeoutError) as error:
            raise self._httpx.ConnectError(type(error).__name__) from None
        return _Line(reader, writer)

    async def _posted(self, line: _Line, path: bytes, told: bytes, content: bytes) -> _Exchanged:
        line.writer.write(b"POST %b HTTP/1.1\r\n%b\r\n%b" % (path, told, content))
        await line.writer.drain()
        received = await line.reader.read(_PIECE)
        plain = plain_head(received)
        if plain is None:
            lines = (each.partition(b": ") for each in told.split(b"\r\n")[:-1])
            headers = [(name, value) for name, _, value in lines]
            head = self._h11.Request(method="POST", target=path, headers=headers)
            return await self._rest(line, self._state(head, content)[0], received)
        start, length, found = plain
        body = bytearray(received[start:])
        while len(body) < length:
            piece = await line.reader.read(_PIECE)
            if not piece:
                raise ConnectionError("closed in the middle of an answer")
            body += piece
        # More than was announced belongs to nobody: the answer stands, the connection does not.
        return Reply(200, found, bytes(body[:length])), len(body) == length

    async def _exchange(self, line: _Line, head: Any, content: bytes) -> _Exchanged:
        state, told = self._state(head, content)
        line.writer.write(told)
        await line.writer.drain()
        return await self._rest(line, state, await line.reader.read(_PIECE))

    def _state(self, head: Any, content: bytes) -> tuple[Any, bytes]:
        """A connection of h11's that has sent a request, and its bytes."""
        h11 = self._h11
        state = h11.Connection(h11.CLIENT)
        told = state.send(head)
        if content:
            told += state.send(h11.Data(data=content))
        return state, told + state.send(h11.EndOfMessage())

    async def _rest(self, line: _Line, state: Any, received: bytes) -> _Exchanged:
        """The answer that begins with what was received, and whether the connection is good for more."""
        h11 = self._h11
        state.receive_data(received)
        response, body = None, bytearray()
        while True:
            event = state.next_event()
            if event is h11.NEED_DATA:
                state.receive_data(await line.reader.read(_PIECE))
            elif isinstance(event, h11.Response):
                response = event
            elif isinstance(event, h11.Data):
                body += event.data
                if len(body) > LARGEST_BODY:
                    raise self._httpx.DecodingError(f"more than {LARGEST_BODY} bytes")
            elif isinstance(event, h11.EndOfMessage) and response is not None:
                break
            elif isinstance(event, h11.ConnectionClosed):
                raise h11.RemoteProtocolError("closed without an answer")
        headers = list(response.headers)
        packed = dict(headers).get(b"content-encoding", b"identity")
        if packed != b"identity":  # we asked for plain text; a small body may unpack to a huge one
            raise self._httpx.DecodingError("packed although asked not to be")
        again = state.our_state is h11.DONE and state.their_state is h11.DONE and not state.trailing_data[0]
        return Reply(response.status_code, headers, bytes(body)), again


_PLAIN = re.compile(
    rb"HTTP/1\.1 200(?: [^\r\n]*)?\r\n"
    rb"((?:(?!transfer-encoding|content-encoding|connection|upgrade|trailer)[\w-]+:[^\r\n\0]*\r\n){1,64})\r\n",
    re.IGNORECASE,
)
_LENGTH = re.compile(rb"(?:^|\n)content-length:[ \t]*([^\r]*?)[ \t]*\r", re.IGNORECASE)


def plain_head(received: bytes) -> tuple[int, int, Headers] | None:
    """Where the body begins, its length, and the headers; None unless it is all there and without oddities.

    >>> plain_head(b"HTTP/1.1 200 OK\\r\\nContent-Length: 2\\r\\n\\r\\n{}")
    (38, 2, [(b'content-length', b'2')])
    >>> plain_head(b"HTTP/1.1 200 OK\\r\\nTransfer-Encoding: chunked\\r\\n\\r\\n") is None
    True
    """
    found = _PLAIN.match(received)
    if found is None:
        return None
    lengths = _LENGTH.findall(found[1])
    if len(lengths) != 1 or not lengths[0].isdigit() or len(lengths[0]) > 7:  # 10 MB are not plain any more
        return None
    lines = (line.partition(b":") for line in found[1].split(b"\r\n")[:-1])
    return found.end(), int(lengths[0]), [(name.lower(), value.strip(b" \t")) for name, _, value in lines]


@lru_cache(maxsize=256)
def _target(url: str) -> tuple[_Place, bytes, bytes]:
    """
    >>> _target("http://localhost:8000/v1/completions")
    (('http', 'localhost', 8000), b'/v1/completions', b'localhost:8000')
    """
    import httpx

    parsed = httpx.URL(url)
    return (parsed.scheme, parsed.raw_host.decode(), parsed.port or 0), parsed.raw_path, parsed.netloc


def own_connections(urls: tuple[str, ...]) -> LeanTransport | None:
    """None where the environment names a proxy for some of the addresses."""
    proxies = getproxies()
    direct = all(
        urlsplit(url).scheme not in proxies or proxy_bypass(urlsplit(url).hostname or "") for url in urls
    )
    return LeanTransport() if direct else None


def make_client(transport: LeanTransport | None, **settings: Any) -> httpx.AsyncClient:
    """A client with these connections, or with httpx's own."""
    import httpx

    under: Any = transport
    return httpx.AsyncClient(transport=under, headers={"Accept-Encoding": "identity"}, **settings)
