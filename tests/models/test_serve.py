"""`models serve` as a server: hostile requests get an error, and the others are served all the same."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from dreamgym import http_server
from dreamgym.errors import ConfigError
from dreamgym.http_server import HttpServer
from dreamgym.models import tiny
from dreamgym.models.local.language_model import LocalLanguageModel
from dreamgym.models.schema_choices import schema_choices
from dreamgym.models.serve import model_app
from dreamgym.models.weight_updates import WeightUpdates
from dreamgym.protocols import LanguageModel
from dreamgym.testing.scripted import ScriptedLanguageModel
from dreamgym.types import Completion, CompletionRequest
from tests.models import small_models
from tests.models.scripted_endpoint import served


@asynccontextmanager
async def serving(model: LanguageModel) -> AsyncIterator[HttpServer]:
    async with HttpServer(model_app("m", plain=model, chat=model)) as server:
        yield server


async def post(server: HttpServer, body: Any, path: str = "completions") -> tuple[int, Any]:
    async with aiohttp.ClientSession() as session:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        async with session.post(f"{server.url}/v1/{path}", data=data) as reply:
            return reply.status, await reply.json()


def with_schema(schema: Any) -> dict[str, Any]:
    return {"prompt": "x", "response_format": {"type": "json_schema", "json_schema": {"schema": schema}}}


def schema_bomb(levels: int = 7, width: int = 10) -> dict[str, Any]:
    """`width` properties on each of `levels` levels: 10^7 leaves in 3 kB, half a minute if all are listed."""
    names = [f"p{number}" for number in range(width)]

    def level(inner: dict[str, Any]) -> dict[str, Any]:
        return {"type": "object", "properties": dict.fromkeys(names, inner), "required": names}

    definitions = {f"d{each}": level({"$ref": f"#/$defs/d{each + 1}"}) for each in range(levels - 1)}
    definitions[f"d{levels - 1}"] = level({"const": 1})
    return {"$defs": definitions, "$ref": "#/$defs/d0"}


async def test_a_schema_that_expands_without_bound_is_refused_and_the_server_stays_responsive() -> None:
    async with serving(ScriptedLanguageModel(lambda request: "yes")) as server:
        started = time.perf_counter()
        status, reply = await post(server, with_schema(schema_bomb()))
        assert (status, time.perf_counter() - started < 5) == (400, True)
        assert "too large" in reply["error"]["message"]
        assert (await post(server, {"prompt": "x"}))[0] == 200


@pytest.mark.parametrize(
    "schema",
    [
        {"$defs": 5, "type": "boolean"},
        {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": 7},
        {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": [[1]]},
        {"type": "object", "properties": {"a": 3}, "required": ["a"]},
        {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}},
        {"type": "integer", "minimum": 0, "maximum": 10**30},
        {"type": "string"},
        {"enum": []},
        {"enum": list(range(3000))},
        {},
    ],
    ids=range(10),
)
async def test_a_schema_that_is_malformed_or_infinite_is_status_400(schema: Any) -> None:
    async with serving(ScriptedLanguageModel(lambda request: "yes")) as server:
        status, reply = await post(server, with_schema(schema))
        assert status == 400
        assert "response_format" in reply["error"]["message"]


def test_long_constants_are_not_multiplied_into_gigabytes() -> None:
    properties = {"long": {"const": "x" * 1_000_000}, "n": {"type": "integer", "minimum": 1, "maximum": 1500}}
    with pytest.raises(ConfigError, match="too large"):
        schema_choices({"type": "object", "properties": properties, "required": ["long", "n"]})


def test_choices_of_a_schema_are_all_its_texts() -> None:
    item = {"type": "object", "properties": {"a": {"enum": ["é", 2]}}, "required": ["a"]}
    schema = {"$defs": {"item": item}, "type": "object", "required": ["x", "y"]}
    properties = {"x": {"$ref": "#/$defs/item"}, "y": {"type": "null"}}
    assert schema_choices(schema | {"properties": properties}) == (
        '{"x": {"a": "é"}, "y": null}',
        '{"x": {"a": 2}, "y": null}',
    )


@pytest.mark.parametrize("tiny", [{"temperature": 1e-300}, {"top_p": 1e-300}])
async def test_a_vanishing_temperature_or_top_p_is_greedy(tiny: dict[str, float]) -> None:
    async with served() as server:
        body = {"prompt": "You see a fridge 1, a drawer", "max_tokens": 8}
        greedy = await post(server.http, body | {"temperature": 0})
        found = await post(server.http, body | tiny)
        assert found[0] == 200
        assert found[1]["choices"][0]["text"] == greedy[1]["choices"][0]["text"]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("completions", b""),
        ("completions", b"{"),
        ("completions", b"[" * 100_000),
        ("completions", {"prompt": 3}),
        ("completions", {"prompt": "x", "max_tokens": 0}),
        ("completions", {"prompt": "x", "temperature": -1}),
        ("completions", {"prompt": "x", "stream": True}),
        ("chat/completions", {"messages": []}),
        ("chat/completions", {"messages": [{"role": "assistant", "content": "x"}]}),
    ],
)
async def test_a_wrong_request_is_status_400(path: str, body: Any) -> None:
    async with serving(ScriptedLanguageModel(lambda request: "yes")) as server:
        assert (await post(server, body, path))[0] == 400
        assert (await post(server, {"prompt": "x"}))[0] == 200


class SlowModel:
    def __init__(self) -> None:
        self.started, self.cancelled = asyncio.Event(), asyncio.Event()

    async def complete(self, request: CompletionRequest) -> Completion:
        self.started.set()
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            self.cancelled.set()
            raise
        raise AssertionError


async def test_a_request_whose_client_has_gone_is_not_computed_further() -> None:
    model = SlowModel()
    async with serving(model) as server, asyncio.timeout(10):
        asking = asyncio.create_task(post(server, {"prompt": "x"}))
        await model.started.wait()
        asking.cancel()
        await model.cancelled.wait()


async def test_closing_the_server_cancels_its_requests_quickly() -> None:
    model = SlowModel()
    async with asyncio.timeout(10):
        async with serving(model) as server:
            asking = asyncio.create_task(post(server, {"prompt": "x"}))
            await model.started.wait()
        await model.cancelled.wait()
        with pytest.raises(aiohttp.ClientError):
            await asking


async def test_connections_without_a_request_are_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "_HEADER_SECONDS", 0.2)
    async with serving(ScriptedLanguageModel(lambda request: "yes")) as server, asyncio.timeout(10):
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\n")
        assert await reader.read() == b""
        writer.close()


async def test_a_request_with_two_lengths_is_refused_and_its_connection_closed() -> None:
    model = ScriptedLanguageModel(lambda request: "yes")
    async with serving(model) as server, asyncio.timeout(10):
        reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
        head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\n"
        head += b"content-length: 4\r\ntransfer-encoding: chunked\r\n\r\n"
        hidden = b"GET /v1/models HTTP/1.1\r\nhost: x\r\n\r\n"
        writer.write(head + b"0\r\n\r\n" + hidden)
        reply = await reader.read()
        assert reply.startswith(b"HTTP/1.1 400")
        assert reply.count(b"HTTP/1.1") == 1
        writer.close()
    assert not model.requests


async def test_more_connections_than_the_limit_get_status_503(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "MAX_CONNECTIONS", 3)
    async with serving(ScriptedLanguageModel(lambda request: "yes")) as server, asyncio.timeout(10):
        idle = [await asyncio.open_connection("127.0.0.1", server.port) for _ in range(4)]
        async with aiohttp.ClientSession() as session, session.get(f"{server.url}/health") as reply:
            assert reply.status == 503
        for _, writer in idle:
            writer.close()


@asynccontextmanager
async def updatable(key: str = "") -> AsyncIterator[tuple[HttpServer, LocalLanguageModel]]:
    local = LocalLanguageModel(small_models.model(), small_models.tokenizer())
    app = model_app("m", plain=local, chat=local, key=key, updates=WeightUpdates(local))
    try:
        async with HttpServer(app) as server:
            yield server, local
    finally:
        await local.aclose()


async def send(server: HttpServer, path: str, body: Any) -> tuple[int, Any]:
    return await post(server, body, f"../{path}")


async def test_weights_can_be_replaced_only_where_the_owner_allows_it() -> None:
    async with serving(ScriptedLanguageModel(lambda request: "yes")) as server:
        for route in ("pause", "collective_rpc", "v1/load_lora_adapter", "update_weight_version"):
            assert (await send(server, route, {}))[0] == 404
    async with updatable(key="secret") as (server, _):
        assert (await send(server, "collective_rpc", {}))[0] == 401


@pytest.mark.parametrize(
    ("route", "body", "problem"),
    [
        ("collective_rpc", {"method": "shutdown"}, "expected the method reload_weights"),
        ("collective_rpc", {"method": "reload_weights"}, "expected a directory"),
        ("collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": "/"}}, "names and shapes"),
        ("v1/load_lora_adapter", {"lora_name": "a", "lora_path": "/"}, "cannot load"),
        ("collective_rpc", {"method": ["reload_weights"]}, "method"),
    ],
)
async def test_a_wrong_update_is_status_400_and_changes_nothing(
    route: str, body: dict[str, Any], problem: str
) -> None:
    async with updatable() as (server, _):
        ask = {"prompt": "You see a fridge 1, a drawer", "max_tokens": 8, "temperature": 0}
        before = (await post(server, ask))[1]["choices"]
        status, reply = await send(server, route, body)
        assert status == 400
        assert problem in reply["error"]["message"]
        assert (await post(server, ask))[1]["choices"] == before


async def test_a_paused_server_answers_after_it_resumes_with_its_new_weights(tmp_path: Path) -> None:
    other = small_models.model(seed=1)
    tiny.save(other, small_models.tokenizer(), tmp_path / "other")
    ask = {
        "prompt": "You see a fridge 1, a drawer",
        "max_tokens": 8,
        "temperature": 0,
        "return_token_ids": True,
    }
    async with updatable() as (server, _):
        await send(server, "pause", {})
        waiting = asyncio.create_task(post(server, ask))
        reload = {"method": "reload_weights", "kwargs": {"weights_path": str(tmp_path / "other")}}
        assert (await send(server, "collective_rpc", reload))[0] == 200
        await send(server, "update_weight_version", {"new_version": "v1"})
        assert not waiting.done()
        await send(server, "resume", {})
        choice = (await waiting)[1]["choices"][0]
        async with aiohttp.ClientSession() as session, session.get(f"{server.url}/weight_info") as reply:
            assert (await reply.json())["weight_version"] == "v1"
    assert choice["token_ids"] == small_models.generated(other, choice["prompt_token_ids"], 8)


async def test_weights_change_while_no_request_runs(tmp_path: Path) -> None:
    tiny.save(small_models.model(seed=1), small_models.tokenizer(), tmp_path / "other")
    reload = {"method": "reload_weights", "kwargs": {"weights_path": str(tmp_path / "other")}}
    local = LocalLanguageModel(small_models.model(), small_models.tokenizer())
    updates = WeightUpdates(local)
    async with updates.request():
        change = asyncio.create_task(updates.answer("/collective_rpc", json.dumps(reload).encode()))
        await asyncio.wait({change}, timeout=0.5)
        assert not change.done(), "a reply would begin with old weights and end with new ones"
    assert (await change)["success"]
    async with asyncio.timeout(10), updates.request():
        pass
    await local.aclose()
