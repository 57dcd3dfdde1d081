"""An MCP server without the SDK, so that it starts at once and can do everything wrong.

Speaks the handshake of 2025-06-18 on its standard input. The first argument is the mistake of its start.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

MISTAKE = sys.argv[1] if len(sys.argv) > 1 else ""
NUMBER = {"type": "object", "properties": {"n": {"type": "integer", "minimum": 0}}, "required": ["n"]}
TOOLS = {
    "count": NUMBER,
    "echo": {"type": "object", "properties": {"text": {"type": "string"}}},
    "die": {"type": "object"},
    "hang": {"type": "object"},
    "fail": {"type": "object"},
    "refuse": {"type": "object"},
    "garble": {"type": "object"},
    "picture": {"type": "object"},
    "silent": {"type": "object"},
    "elsewhere": {"type": "object", "properties": {"a": {"$ref": "http://127.0.0.1:9/schema.json"}}},
    "broken": {"type": "object", "properties": {"a": {"type": "no such type"}}},
}
counted = [0]


def send(message: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(message) + "\n")
    sys.stdout.flush()


def text(words: str, **more: Any) -> dict[str, Any]:
    return {"content": [{"type": "text", "text": words}], **more}


def call(name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    if name == "count":
        counted[0] += arguments["n"]
        return text(f"The count is {counted[0]}.")
    if name == "echo":
        return text(arguments.get("text", ""))
    if name == "die":
        sys.stderr.write("out of order\n")
        sys.exit(3)
    if name == "hang":
        time.sleep(600)
    if name == "fail":
        return text("it did not work", isError=True)
    if name == "garble":
        return {"content": "no list"}
    if name == "picture":
        return {"content": [{"type": "image", "data": "aGk=", "mimeType": "image/png"}]}
    if name == "silent":
        return {"content": []}
    return text("done")


def listed(cursor: str | None) -> dict[str, Any]:
    tools = [{"name": name, "description": name * 100, "inputSchema": each} for name, each in TOOLS.items()]
    if MISTAKE == "endless":
        return {"tools": tools[:1], "nextCursor": "more"}
    return {"tools": tools[5:]} if cursor else {"tools": tools[:5], "nextCursor": "2"}


def answer(message: dict[str, Any]) -> None:
    method, params = message["method"], message.get("params") or {}
    reply: dict[str, Any] = {"jsonrpc": "2.0", "id": message["id"]}
    if method == "initialize":
        about = {"name": "misbehaving", "version": "1"}
        result: dict[str, Any] = {
            "protocolVersion": "2025-06-18",
            "capabilities": {"tools": {}},
            "serverInfo": about,
        }
    elif method == "tools/list":
        result = listed(params.get("cursor"))
    elif method == "tools/call" and params["name"] == "refuse":
        send({**reply, "error": {"code": -32602, "message": "not like this"}})
        return
    elif method == "tools/call":
        result = call(params["name"], params.get("arguments") or {})
    else:
        send({**reply, "error": {"code": -32601, "message": "no such method"}})
        return
    send({**reply, "result": result})


if __name__ == "__main__":
    if MISTAKE == "crash":
        sys.exit("no database\n")
    if MISTAKE == "chatty":
        print("Welcome! This line is not JSON.", flush=True)
    for line in sys.stdin:
        if MISTAKE == "mute":
            continue
        found = json.loads(line)
        if "id" in found:
            answer(found)
