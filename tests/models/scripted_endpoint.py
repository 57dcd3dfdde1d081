"""A real small model behind a real HTTP server on loopback, in the test's own event loop."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from dreamgym.config import EndpointConfig
from dreamgym.models.http_server import Answer as HttpAnswer
from dreamgym.models.http_server import Asked, HttpServer
from dreamgym.models.local.language_model import LocalLanguageModel
from dreamgym.models.serve import ModelServer
from tests.models import small_models

MODEL = "nano"


class Served:
    """A server that also remembers what it was asked."""

    def __init__(self, local: LocalLanguageModel, *, key: str = "") -> None:
        self.local = local
        self.asked: list[Asked] = []
        self._handler = ModelServer(MODEL, plain=local, chat=local, context=1024, key=key)
        self.http = HttpServer(self._handle)

    @property
    def url(self) -> str:
        return self.http.url

    @property
    def completions(self) -> int:
        return sum(asked.method == "POST" for asked in self.asked)

    async def _handle(self, asked: Asked) -> HttpAnswer:
        self.asked.append(asked)
        return await self._handler(asked)

    def settings(self, **changes: Any) -> EndpointConfig:
        quick = {"url": self.url, "model": MODEL, "kind": "completions", "pause_seconds": 0.01}
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
