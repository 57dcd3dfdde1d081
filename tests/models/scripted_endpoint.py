"""A real small model behind a real HTTP server on loopback, in the test's own event loop."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from dreamgym.config import EndpointConfig
from dreamgym.http_server import HttpServer
from dreamgym.models.local.language_model import LocalLanguageModel
from dreamgym.models.serve import model_app
from tests.models import small_models

MODEL = "nano"


@dataclass
class RecordedRequest:
    method: str
    headers: dict[str, str]
    body: bytes = b""


class Served:
    """A server that also records its requests."""

    def __init__(self, local: LocalLanguageModel, *, key: str = "") -> None:
        self.local = local
        self.requests: list[RecordedRequest] = []
        self._app = model_app(MODEL, plain=local, chat=local, context=1024, key=key)
        self.http = HttpServer(self._record)

    @property
    def url(self) -> str:
        return self.http.url

    @property
    def completions(self) -> int:
        return sum(request.method == "POST" for request in self.requests)

    async def _record(self, scope: Any, receive: Any, send: Any) -> None:
        headers = {name.decode(): value.decode() for name, value in scope["headers"]}
        recorded = RecordedRequest(scope["method"], headers)
        self.requests.append(recorded)

        async def recording() -> Any:
            message = await receive()
            recorded.body += message.get("body", b"")
            return message

        await self._app(scope, recording, send)

    def settings(self, **changes: Any) -> EndpointConfig:
        quick = {"url": self.url, "model": MODEL, "kind": "completions", "backoff_seconds": 0.01}
        return EndpointConfig.model_validate(quick | changes)


@asynccontextmanager
async def served(*, key: str = "", seed: int = 0) -> AsyncIterator[Served]:
    local = LocalLanguageModel(small_models.model(seed=seed), small_models.tokenizer())
    server = Served(local, key=key)
    await server.http.start()
    try:
        yield server
    finally:
        await server.http.aclose()
        await local.aclose()
