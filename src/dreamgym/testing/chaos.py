"""A real HTTP proxy on loopback that breaks replies by a seeded plan, to test whoever talks through it.

async with ChaosProxy("http://127.0.0.1:8000", ChaosPlan(seed=1, dropped=0.1, limited=0.1)) as proxy:
    ...  # talk to proxy.url; proxy.faults counts what was done to you
"""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from dataclasses import dataclass, fields, replace
from types import TracebackType
from typing import Self

from dreamgym.errors import ConfigError, MissingExtraError
from dreamgym.models.endpoint.transport import make_client, own_connections
from dreamgym.models.http_server import Answer, Asked, HttpServer

_HOP = frozenset({"host", "content-length", "connection", "transfer-encoding", "accept-encoding"})
_REPLACED = {
    "empty": b"",
    "not_json": b"<html><body>Bad gateway</body></html>",
    "wrong_shape": b'{"object":"list","data":[],"choices":[]}',
    "silent": b'{"choices":[{"index":0,"finish_reason":"stop","message":{"content":null}}]}',
}
"""Bodies that come with status 200 instead of the server's own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChaosPlan:
    """The share of requests that each fault befalls. Number n of a seed always gets the same one."""

    seed: int = 0
    limited: float = 0.0
    """429 with Retry-After."""
    failing: float = 0.0
    """500, 502 or 503, without asking the server."""
    dropped: float = 0.0
    """The connection is closed instead of a reply, before or after the server was asked."""
    slow: float = 0.0
    """The reply comes `delay` seconds late."""
    drip: float = 0.0
    """The reply comes in pieces, `delay` seconds in all."""
    truncated: float = 0.0
    """The connection is closed in the middle of the body."""
    cut_json: float = 0.0
    """The body is whole for HTTP, and half of its JSON."""
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
        """What happens to request `number`, and the dice for its details."""
        dice = random.Random(f"{self.seed}:{number}")
        drawn = dice.random()
        for name, share in self.shares.items():
            drawn -= share
            if drawn < 0:
                return name, dice
        return None, dice


class ChaosProxy:
    """Stands before a server, passes requests on, and breaks what comes back."""

    def __init__(self, upstream: str, plan: ChaosPlan | None = None) -> None:
        self.plan = plan if plan is not None else ChaosPlan()
        self.faults: Counter[str] = Counter()
        self.passed_on = 0
        """Requests that reached the server."""
        self._upstream = upstream.rstrip("/")
        self._number = 0
        self._server = HttpServer(self._handle)
        try:
            import httpx
        except ImportError:
            raise MissingExtraError("the chaos proxy", "endpoint") from None
        self._client = make_client(own_connections((upstream,)), timeout=None)
        self._http_error = httpx.HTTPError

    @property
    def url(self) -> str:
        return self._server.url

    async def start(self) -> None:
        """Begin, or begin again at the same address after `stop`."""
        await self._server.start(port=self._server.port)

    async def stop(self) -> None:
        """As if the server had been killed: connections break, new ones are refused."""
        await self._server.aclose()

    async def aclose(self) -> None:
        await self._server.aclose()
        await self._client.aclose()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    async def _handle(self, asked: Asked) -> Answer | None:
        self._number += 1
        fault, dice = self.plan.fault(self._number)
        if fault is not None:
            self.faults[fault] += 1
        if fault == "limited":
            return _refusal(429, {"retry-after": f"{self.plan.retry_after:g}"})
        if fault == "failing":
            return _refusal(dice.choice((500, 502, 503)))
        if fault == "dropped" and dice.random() < 0.5:
            return None
        answer = await self._passed_on(asked)
        if fault == "dropped":
            return None
        if fault == "slow":
            await asyncio.sleep(self.plan.delay)
        elif fault == "drip":
            return replace(answer, drip=self.plan.delay / 8)
        elif fault == "truncated":
            return replace(answer, cut=len(answer.body) // 2)
        elif fault == "cut_json":
            return replace(answer, status=200, body=answer.body[: len(answer.body) // 2])
        elif fault in _REPLACED:
            return replace(answer, status=200, body=_REPLACED[fault])
        return answer

    async def _passed_on(self, asked: Asked) -> Answer:
        headers = {name: value for name, value in asked.headers.items() if name not in _HOP}
        self.passed_on += 1
        try:
            reply = await self._client.request(
                asked.method, f"{self._upstream}{asked.path}", content=asked.body, headers=headers
            )
        except self._http_error:
            return _refusal(502)
        kept = {
            name: reply.headers[name] for name in ("content-type", "retry-after") if name in reply.headers
        }
        return Answer(status=reply.status_code, body=reply.content, headers=kept)


def _refusal(status: int, headers: dict[str, str] | None = None) -> Answer:
    body = json.dumps({"error": {"message": "chaos", "code": status}}).encode()
    return Answer(status=status, body=body, headers=headers or {})
