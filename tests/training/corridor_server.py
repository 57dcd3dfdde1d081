"""An OpenAI-compatible server, in a process of its own, that plays corridors: going east wins, no more.

python corridor_server.py PORT
"""

from __future__ import annotations

import asyncio
import json
import sys

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


async def serve(port: int) -> None:
    server = HandlerServer(answer)
    await server.start(port=port)
    print(server.url, flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(serve(int(sys.argv[1])))
