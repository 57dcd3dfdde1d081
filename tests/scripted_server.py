"""A scripted language model behind a real HTTP server on loopback, for tests of endpoint clients."""

from __future__ import annotations

import asyncio
import json
import threading
from types import TracebackType
from typing import Any, Self

from dreamgym.http_server import HttpServer
from dreamgym.models.serve import model_app
from dreamgym.testing.scripted import Script, ScriptedLanguageModel
from dreamgym.types import CompletionRequest


class ScriptedServer:
    """OpenAI-compatible, in its own thread, so that commands can be run against it.

    >>> with ScriptedServer(lambda request: "yes") as server:
    ...     server.name.startswith("endpoint:scripted@http://127.0.0.1:")
    True
    """

    def __init__(self, script: Script, *, model: str = "scripted", schemas: bool = True) -> None:
        """
        Args:
            schemas: whether every JSON schema is accepted (and ignored). Else schemas that allow infinitely
                many replies are refused, as by servers without grammars.
        """
        self.model = model
        self.schemas: list[dict[str, Any] | None] = []
        """The schema of each request."""
        self._language_model = ScriptedLanguageModel(script)
        self._app = model_app(model, plain=self._language_model, chat=self._language_model)
        self._http = HttpServer(self._without_schema if schemas else self._app)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)

    @property
    def requests(self) -> list[CompletionRequest]:
        """All requests, in order."""
        return self._language_model.requests

    @property
    def url(self) -> str:
        return self._http.url

    @property
    def name(self) -> str:
        """The name of the model for commands."""
        return f"endpoint:{self.model}@{self.url}"

    def __enter__(self) -> Self:
        self._thread.start()
        self._run(self._http.start())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._run(self._http.aclose())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _run(self, coroutine: Any) -> None:
        asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(timeout=30)

    async def _without_schema(self, scope: Any, receive: Any, send: Any) -> None:
        """Record the schema of each request and remove it from the body."""
        if scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        body, more = b"", True
        while more:
            message = await receive()
            body, more = body + message.get("body", b""), message.get("more_body", False)
        value = json.loads(body)
        wanted = value.pop("response_format", None)
        self.schemas.append(wanted["json_schema"]["schema"] if wanted else None)
        messages = [{"type": "http.request", "body": json.dumps(value).encode(), "more_body": False}]

        async def again() -> Any:
            return messages.pop() if messages else await receive()

        await self._app(scope, again, send)
