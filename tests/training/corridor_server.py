"""An OpenAI-compatible server, in a process of its own, that plays corridors: going east wins, no more."""

from __future__ import annotations

import asyncio
import json
from multiprocessing.connection import Connection

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from tests.handler_server import HandlerServer


async def answer(request: Request) -> Response:
    body = await request.body()
    prompt = json.loads(body)["prompt"] if body else ""
    action = prompt.rstrip("\n").rsplit("\n", 1)[-1]
    won = action == "action: go east"
    text = f"think: so it is.\nchange:\nnext: You hear: {action}.\nend: {'success' if won else 'no'}"
    return JSONResponse(
        {
            "choices": [{"index": 0, "text": text, "finish_reason": "stop"}],
            "usage": {"prompt_tokens": 9, "completion_tokens": 9},
        }
    )


async def serve(port: int, report: Connection) -> None:
    server = HandlerServer(answer)
    await server.start(port=port)
    report.send(server.url)
    await asyncio.Event().wait()


def in_a_process(port: int, report: Connection) -> None:
    """Its whole life; it reports its address."""
    asyncio.run(serve(port, report))
