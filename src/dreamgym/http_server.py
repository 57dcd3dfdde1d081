"""Runs an ASGI application with uvicorn inside a running event loop, with limits and a clean stop."""

from __future__ import annotations

import asyncio
import signal
import socket
from collections.abc import Callable
from contextlib import nullcontext, suppress
from typing import Any, Self

from dreamgym.errors import MissingExtraError, StoreError
from dreamgym.gc_pause import gc_frozen

MAX_CONNECTIONS = 1024
"""More get status 503."""
_MAX_MESSAGE = 1 << 20
"""Bytes of a WebSocket message."""
_PING_SECONDS = 20.0
_HEADER_SECONDS = 10.0
"""A connection that has sent no complete request header by then is closed."""


class HttpServer:
    """Listens on loopback by default; may be started again at the same port after `aclose`."""

    def __init__(self, app: Any, *, websockets: bool = False) -> None:
        try:
            import uvicorn  # noqa: F401

            if websockets:
                import websockets as _  # noqa: F401
        except ImportError:
            raise MissingExtraError("a server", "serve") from None
        self._app = app
        self._websockets = websockets
        self._server: Any = None
        self._running: asyncio.Task[None] | None = None
        self.host, self.port = "127.0.0.1", 0

    @property
    def url(self) -> str:
        return f"http://{self.host}:{self.port}"

    async def start(self, host: str = "127.0.0.1", port: int = 0) -> None:
        """Port 0 means any free port."""
        listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((host, port))
        except OSError as error:
            listener.close()
            raise StoreError(
                f"cannot serve at {host}:{port}: {error.strerror or error}; choose another --port"
            ) from None
        self.host, self.port = host, int(listener.getsockname()[1])
        self._server = _make_server(self._reject_ambiguous, websockets=self._websockets)
        self._running = asyncio.create_task(self._server.serve(sockets=[listener]))
        while not self._server.started and not self._running.done():  # noqa: ASYNC110
            await asyncio.sleep(0)
        if self._running.done():
            await self._running  # raises the reason

    async def _reject_ambiguous(self, scope: Any, receive: Any, send: Any) -> None:
        """RFC 9112: a request with both lengths may hide a second request, so its connection is closed."""
        names = {name for name, _ in scope["headers"]}
        if {b"content-length", b"transfer-encoding"} <= names:
            from starlette.responses import PlainTextResponse

            refusal = PlainTextResponse("two lengths", 400, {"connection": "close"})
            await refusal(scope, receive, send)
            return
        await self._app(scope, receive, send)

    async def aclose(self) -> None:
        """Refuse new connections, close the open ones and cancel their handlers. May be called twice."""
        if self._running is None:
            return
        server, running = self._server, self._running
        self._running = None
        for each in server.servers:
            each.close()
        handlers = list(server.server_state.tasks)
        for connection in list(server.server_state.connections):
            connection.transport.abort()
        for handler in handlers:
            handler.cancel()
        server.should_exit = server.force_exit = True
        await asyncio.gather(running, *handlers, return_exceptions=True)

    async def run(self, host: str, port: int, announce: Callable[[str], None]) -> None:
        """Serve until SIGINT or SIGTERM; `announce` receives the address."""
        await self.start(host, port)
        try:
            announce(self.url)
            stopped = asyncio.Event()
            loop = asyncio.get_running_loop()
            for number in (signal.SIGINT, signal.SIGTERM):
                with suppress(NotImplementedError):  # not on Windows
                    loop.add_signal_handler(number, stopped.set)
            with gc_frozen():
                await stopped.wait()
        finally:
            await self.aclose()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()


def _make_server(app: Any, *, websockets: bool) -> Any:
    import uvicorn
    from uvicorn.protocols.http.h11_impl import H11Protocol

    class Protocol(H11Protocol):
        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            self.loop.call_later(_HEADER_SECONDS, self._close_without_request)

        def _close_without_request(self) -> None:
            if getattr(self, "scope", None) is None:  # typed as never None
                self.transport.close()

    class Server(uvicorn.Server):
        def capture_signals(self) -> Any:
            return nullcontext()  # the command or test that runs the event loop handles signals

    return Server(
        uvicorn.Config(
            app,
            http=Protocol,
            interface="asgi3",
            proxy_headers=False,
            server_header=False,
            ws="websockets-sansio" if websockets else "none",
            ws_max_size=_MAX_MESSAGE,
            ws_ping_interval=_PING_SECONDS,
            ws_ping_timeout=_PING_SECONDS,
            ws_per_message_deflate=False,
            lifespan="off",
            log_config=None,
            access_log=False,
            backlog=MAX_CONNECTIONS,
            limit_concurrency=MAX_CONNECTIONS,
            timeout_keep_alive=60,
        )
    )
