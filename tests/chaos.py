"""An HTTP proxy on loopback that breaks replies by a seeded plan, to test the clients that use it.

async with ChaosProxy("http://127.0.0.1:8000", ChaosPlan(seed=1, dropped=0.1, limited=0.1)) as proxy:
    ...  # send requests to proxy.url; proxy.faults counts the injected faults
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass, fields
from types import TracebackType
from typing import Any, Self

import aiohttp
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from dreamgym.errors import ConfigError
from tests.handler_server import HandlerServer

_HOP = frozenset({"host", "content-length", "connection", "transfer-encoding", "accept-encoding"})
_KEPT = ("content-type", "retry-after")
_PIECES = 8
_BODIES = {
    "empty": b"",
    "not_json": b"<html><body>Bad gateway</body></html>",
    "wrong_shape": b'{"object":"list","data":[],"choices":[]}',
    "silent": b'{"choices":[{"index":0,"finish_reason":"stop","message":{"content":null}}]}',
}
"""Bodies that replace the server's own, with status 200."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChaosPlan:
    """The share of requests with each fault. Request n of a seed always has the same fault."""

    seed: int = 0
    limited: float = 0.0
    """429 with Retry-After."""
    failing: float = 0.0
    """500, 502 or 503, without forwarding the request."""
    dropped: float = 0.0
    """The connection is closed without a reply, before or after the request is forwarded."""
    slow: float = 0.0
    """The reply is `delay` seconds late."""
    drip: float = 0.0
    """The reply is sent in pieces over `delay` seconds."""
    truncated: float = 0.0
    """The connection is closed in the middle of the body."""
    cut_json: float = 0.0
    """The body is complete for HTTP and contains half of its JSON."""
    empty: float = 0.0
    not_json: float = 0.0
    wrong_shape: float = 0.0
    silent: float = 0.0
    """A choice without text."""
    delay: float = 0.2
    retry_after: float = 0.05
    """Seconds."""

    def __post_init__(self) -> None:
        if not 0 <= sum(self.shares.values()) <= 1 or min(self.shares.values()) < 0:
            raise ConfigError(f"expected shares of at least 0 that add up to at most 1, got {self.shares}")

    @property
    def shares(self) -> dict[str, float]:
        numbers = {"seed", "delay", "retry_after"}
        return {each.name: getattr(self, each.name) for each in fields(self) if each.name not in numbers}

    def fault(self, number: int) -> tuple[str | None, random.Random]:
        """The fault of request `number`, and a generator for its details."""
        generator = random.Random(f"{self.seed}:{number}")
        drawn = generator.random()
        for name, share in self.shares.items():
            drawn -= share
            if drawn < 0:
                return name, generator
        return None, generator


class ChaosProxy:
    """Forwards requests to a server and breaks its replies."""

    def __init__(self, upstream: str, plan: ChaosPlan | None = None) -> None:
        self.plan = plan if plan is not None else ChaosPlan()
        self.faults: Counter[str] = Counter()
        self.forwarded = 0
        """Requests that reached the server."""
        self._upstream = upstream.rstrip("/")
        self._number = 0
        self._server = HandlerServer(self._handle)
        self._session: aiohttp.ClientSession | None = None

    @property
    def url(self) -> str:
        return self._server.url

    async def start(self) -> None:
        """Start, or start again at the same address after `stop`."""
        if self._session is None:
            connector = aiohttp.TCPConnector(limit=0)
            timeout = aiohttp.ClientTimeout(total=None)
            self._session = aiohttp.ClientSession(connector=connector, timeout=timeout)
        await self._server.start(port=self._server.port)

    async def stop(self) -> None:
        """Behave like a killed server: open connections break, new ones are refused."""
        await self._server.aclose()

    async def aclose(self) -> None:
        await self._server.aclose()
        if self._session is not None:
            await self._session.close()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    async def _handle(self, request: Request) -> Response:
        self._number += 1
        fault, generator = self.plan.fault(self._number)
        if fault is not None:
            self.faults[fault] += 1
        if fault == "limited":
            return _refusal(429, {"retry-after": f"{self.plan.retry_after:g}"})
        if fault == "failing":
            return _refusal(generator.choice((500, 502, 503)))
        if fault == "dropped" and generator.random() < 0.5:
            return await self._drop(request)
        status, body, headers = await self._forward(request)
        if fault == "dropped":
            return await self._drop(request)
        if fault == "slow":
            await asyncio.sleep(self.plan.delay)
        elif fault in ("drip", "truncated"):
            length = {"content-length": str(len(body))}
            return StreamingResponse(self._pieces(request, body, fault), status, headers | length)
        elif fault == "cut_json":
            status, body = 200, body[: len(body) // 2]
        elif fault in _BODIES:
            status, body = 200, _BODIES[fault]
        return Response(body, status, headers)

    async def _forward(self, request: Request) -> tuple[int, bytes, dict[str, str]]:
        assert self._session is not None
        headers = {name: value for name, value in request.headers.items() if name not in _HOP}
        url, data = f"{self._upstream}{request.url.path}", await request.body()
        self.forwarded += 1
        try:
            async with self._session.request(request.method, url, data=data, headers=headers) as reply:
                kept = {
                    name: reply.headers[name]
                    for name in ("content-type", "retry-after")
                    if name in reply.headers
                }
                return reply.status, await reply.read(), kept
        except aiohttp.ClientError:
            return 502, b"", {}

    async def _pieces(self, request: Request, body: bytes, fault: str) -> AsyncIterator[bytes]:
        if fault == "truncated":
            yield body[: len(body) // 2]
            await self._server.drop(request)
            return
        size = max(1, len(body) // _PIECES)
        for start in range(0, len(body), size):
            yield body[start : start + size]
            await asyncio.sleep(self.plan.delay / _PIECES)

    async def _drop(self, request: Request) -> Response:
        await self._server.drop(request)
        return Response()


def _refusal(status: int, headers: dict[str, Any] | None = None) -> Response:
    return JSONResponse({"error": {"message": "chaos", "code": status}}, status, headers)
