"""Connections for httpx: HTTP/1.1 by h11 over asyncio's streams, one request at a time on each.

httpx's own pool looks at every connection for every request: with 64 in flight that took 7 ms of CPU time a
request, this takes 0.8 (docs/decisions/0009-endpoints.md). Proxies are left to httpx.
"""

from __future__ import annotations

import asyncio
import ssl
from collections import deque
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

if TYPE_CHECKING:
    import httpx

_PIECE = 64 << 10
_CONNECT_SECONDS = 10.0
LARGEST_BODY = 64 << 20

_Place = tuple[str, str, int]


class _Line:
    """One connection."""

    def __init__(self, h11: Any, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.state = h11.Connection(h11.CLIENT)
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
        self._ssl: ssl.SSLContext | None = None

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        httpx = self._httpx
        place = (request.url.scheme, request.url.raw_host.decode(), request.url.port or 0)
        line = await self._line(place)
        try:
            response = await self._exchange(line, request)
        except (self._h11.RemoteProtocolError, ConnectionError, ssl.SSLError) as error:
            line.writer.transport.abort()
            raise httpx.RemoteProtocolError(type(error).__name__, request=request) from None
        except BaseException:  # whoever was waiting has given up: what comes now would be somebody else's
            line.writer.transport.abort()
            raise
        if line.state.our_state is self._h11.DONE and line.state.their_state is self._h11.DONE:
            line.state.start_next_cycle()
            self._idle.setdefault(place, deque()).append(line)
        else:
            line.writer.transport.abort()
        return response

    async def aclose(self) -> None:
        for lines in self._idle.values():
            for line in lines:
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
        return _Line(self._h11, reader, writer)

    async def _exchange(self, line: _Line, request: httpx.Request) -> httpx.Response:
        h11, state = self._h11, line.state
        head = h11.Request(method=request.method, target=request.url.raw_path, headers=request.headers.raw)
        told = state.send(head)
        if request.content:
            told += state.send(h11.Data(data=request.content))
        line.writer.write(told + state.send(h11.EndOfMessage()))
        await line.writer.drain()
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
        packed = dict(response.headers).get(b"content-encoding", b"identity")
        if packed != b"identity":  # we asked for plain text; a small body may unpack to a huge one
            raise self._httpx.DecodingError("packed although asked not to be")
        return self._httpx.Response(response.status_code, headers=list(response.headers), content=bytes(body))


def make_client(urls: tuple[str, ...], **settings: Any) -> httpx.AsyncClient:
    """A client with our connections, or with httpx's own where the environment names a proxy."""
    import httpx

    proxies = getproxies()
    direct = all(
        urlsplit(url).scheme not in proxies or proxy_bypass(urlsplit(url).hostname or "") for url in urls
    )
    headers = {"Accept-Encoding": "identity"}
    if direct:
        transport: Any = LeanTransport()
        return httpx.AsyncClient(transport=transport, headers=headers, **settings)
    return httpx.AsyncClient(headers=headers, **settings)
