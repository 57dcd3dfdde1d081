"""A server that passes every request to one handler, and can break connections."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from dreamgym.http_server import HttpServer


class HandlerServer(HttpServer):
    def __init__(self, handler: Callable[[Request], Awaitable[Response]]) -> None:
        async def app(scope: Any, receive: Any, send: Any) -> None:
            response = await handler(Request(scope, receive))
            await response(scope, receive, send)

        super().__init__(app)

    async def drop(self, request: Request) -> None:
        """Close the connection of a request without a reply, or in the middle of one."""
        for connection in list(self._server.server_state.connections):
            if connection.client == tuple(request.scope["client"]):
                connection.transport.abort()
        await asyncio.sleep(0)  # uvicorn learns of it in the next iteration of the event loop
