"""A real HTTP server on loopback whose model says what it is told to: for tests of what asks endpoints."""

from __future__ import annotations

import asyncio
import json
import threading
from dataclasses import replace
from types import TracebackType
from typing import Any, Self

from dreamgym.models.http_server import Answer, Asked, HttpServer
from dreamgym.models.serve import ModelServer
from dreamgym.testing.scripted import Script, ScriptedLanguageModel
from dreamgym.types import CompletionRequest


class ScriptedServer:
    """OpenAI-compatible, in a thread of its own, so that commands can be run against it.

    >>> with ScriptedServer(lambda request: "yes") as server:
    ...     server.name.startswith("endpoint:scripted@http://127.0.0.1:")
    True
    """

    def __init__(self, script: Script, *, model: str = "scripted", schemas: bool = True) -> None:
        """
        Args:
            schemas: whether any JSON schema is taken, though not held to; else those of infinitely many
                replies are refused, as by servers without grammars.
        """
        self.model = model
        self.schemas: list[dict[str, Any] | None] = []
        """What each reply was to be held to."""
        self._spoken = ScriptedLanguageModel(script)
        self._serve = ModelServer(model, plain=self._spoken, chat=self._spoken)
        self._takes_schemas = schemas
        self._http: HttpServer | None = None
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)

    @property
    def requests(self) -> list[CompletionRequest]:
        """What was asked and answered, in order."""
        return self._spoken.requests

    @property
    def url(self) -> str:
        assert self._http is not None
        return self._http.url

    @property
    def name(self) -> str:
        """By which commands know it."""
        return f"endpoint:{self.model}@{self.url}"

    def __enter__(self) -> Self:
        self._thread.start()
        self._http = HttpServer(self._answer)
        self._run(self._http.start())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._http is not None
        self._run(self._http.aclose())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _run(self, waiting: Any) -> None:
        asyncio.run_coroutine_threadsafe(waiting, self._loop).result(timeout=30)

    async def _answer(self, asked: Asked) -> Answer:
        if asked.method == "POST" and self._takes_schemas:
            body = json.loads(asked.body)
            wanted = body.pop("response_format", None)
            self.schemas.append(wanted["json_schema"]["schema"] if wanted else None)
            asked = replace(asked, body=json.dumps(body).encode())
        return await self._serve(asked)
