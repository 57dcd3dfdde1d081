"""Endpoints over real HTTP: the same replies as in process, single flight, cache and typed failures."""

from __future__ import annotations

import asyncio
import json
import sqlite3
from pathlib import Path
from typing import Any

import pytest
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from dreamgym.config import Config, EndpointConfig, validate
from dreamgym.errors import ConfigError, EndpointError, EpisodeFailedError, StoreError
from dreamgym.experience.rubric_judge import RubricJudge, Scores
from dreamgym.http_client import RequestFailedError, decode_json
from dreamgym.models.endpoint import protocol
from dreamgym.models.endpoint.cache import ReplyCache
from dreamgym.models.endpoint.client import Endpoint, EndpointLanguageModel
from dreamgym.models.registry import LanguageModels, check_language_model, find_endpoint
from dreamgym.models.usage import Usage
from dreamgym.types import (
    Completion,
    CompletionRequest,
    FailureKind,
    Outcome,
    State,
    Task,
    Transition,
)
from tests.handler_server import HandlerServer
from tests.models.scripted_endpoint import MODEL, served

QUESTION = CompletionRequest(prompt="You see a fridge 1, a drawer", max_tokens=8)


async def test_a_reply_over_http_is_the_one_that_the_model_gives_in_process() -> None:
    async with served() as server:
        endpoint = Endpoint("x", server.settings(logprobs=True))
        chat = Endpoint("x", server.settings(kind="chat", logprobs=True))
        for request in (
            QUESTION,
            CompletionRequest(prompt="go to", system="You are an agent.", max_tokens=5),
            CompletionRequest(prompt="go to", system="Act.", turns=(("look", "a fridge 1"),), max_tokens=5),
            CompletionRequest(prompt="open", temperature=1.0, top_p=0.9, seed=7, max_tokens=6, stop=("\n",)),
            CompletionRequest(prompt="", prompt_token_ids=(5, 6, 7), max_tokens=3),
        ):
            right = await server.local.complete(request)
            assert await endpoint.complete(request, role="agent") == right
            if request.prompt_token_ids is None:
                assert await chat.complete(request, role="agent") == right
        await endpoint.aclose()
        await chat.aclose()


async def test_equal_requests_in_flight_are_sent_once_and_another_seed_is_not_equal() -> None:
    async with served() as server:
        usage = Usage()
        endpoint = Endpoint("x", server.settings(), usage=usage)
        first = await asyncio.gather(*(endpoint.complete(QUESTION, role="agent") for _ in range(20)))
        assert len(set(first)) == 1
        assert server.completions == 1
        row = usage.total
        assert (row.requests, row.shared, row.calls, row.hit_rate) == (1, 19, 20, 0.95)
        sampled = [
            CompletionRequest(prompt="You see", temperature=1.0, seed=seed, max_tokens=8, stop=("\n",))
            for seed in range(6)
        ]
        replies = await asyncio.gather(*(endpoint.complete(each, role="agent") for each in sampled))
        assert server.completions == 7
        assert len({reply.text for reply in replies}) > 1
        await endpoint.aclose()


async def test_a_cancelled_request_does_not_cancel_its_equals() -> None:
    async with served() as server:
        endpoint = Endpoint("x", server.settings())
        leader = asyncio.create_task(endpoint.complete(QUESTION, role="agent"))
        follower = asyncio.create_task(endpoint.complete(QUESTION, role="agent"))
        await asyncio.sleep(0)
        leader.cancel()
        assert (await follower).text
        assert server.completions == 1
        alone = asyncio.create_task(endpoint.complete(CompletionRequest(prompt="open"), role="agent"))
        await asyncio.sleep(0)
        alone.cancel()  # a request after it must not get the cancelled result
        request = CompletionRequest(prompt="open", stop=("\n",))
        reply = await endpoint.complete(request, role="agent")
        assert reply.text == (await server.local.complete(request)).text
        await endpoint.aclose()


async def test_when_the_leader_is_cancelled_the_next_follower_sends_the_request() -> None:
    sent, go = 0, asyncio.Event()

    async def handle(request: Request) -> Response:
        nonlocal sent
        sent += 1
        await go.wait()
        return JSONResponse({"choices": [{"text": "mug 1", "finish_reason": "stop"}]})

    server = HandlerServer(handle)
    await server.start()
    endpoint = Endpoint("x", EndpointConfig(url=server.url, model=MODEL, kind="completions"))
    leader, *followers = (asyncio.create_task(endpoint.complete(QUESTION, role="agent")) for _ in range(4))
    while not sent:  # noqa: ASYNC110
        await asyncio.sleep(0.001)
    leader.cancel()
    go.set()
    assert {reply.text for reply in await asyncio.gather(*followers)} == {"mug 1"}
    assert sent == 2
    row = endpoint.usage.total
    assert (row.sent, row.requests, row.shared) == (2, 1, 3)
    with pytest.raises(asyncio.CancelledError):
        await leader
    await endpoint.aclose()
    await server.aclose()


async def test_an_error_reaches_all_followers() -> None:
    async with served() as server:
        endpoint = Endpoint("x", server.settings(model="another"))
        found = await asyncio.gather(
            *(endpoint.complete(QUESTION, role="agent") for _ in range(3)), return_exceptions=True
        )
        assert [type(each) for each in found] == [EndpointError] * 3
        assert endpoint.usage.total.sent == 1
        await endpoint.aclose()


async def test_closing_fails_all_pending_requests() -> None:
    async def handle(request: Request) -> Response:
        await asyncio.sleep(60)
        raise AssertionError

    server = HandlerServer(handle)
    await server.start()
    endpoint = Endpoint("x", EndpointConfig(url=server.url, model=MODEL, concurrency=2))
    requests = [CompletionRequest(prompt=f"{number}") for number in range(4)]  # two of them wait for a place
    asking = [asyncio.create_task(endpoint.complete(each, role="agent")) for each in requests]
    await asyncio.sleep(0.1)
    await endpoint.aclose()
    found = await asyncio.wait_for(asyncio.gather(*asking, return_exceptions=True), 5)
    assert [type(each) for each in found] == [EpisodeFailedError] * 4
    assert "closed" in str(found[-1])
    await server.aclose()


async def test_cached_replies_survive_the_process(tmp_path: Path) -> None:
    async with served() as server:
        config = validate(Config, {"endpoints": {"near": server.settings().model_dump()}})
        sampled = CompletionRequest(prompt="go", temperature=1.0, seed=3, max_tokens=4, stop=("\n",))
        for _ in range(2):
            async with LanguageModels(config, folder=tmp_path) as models:
                model = models.open("endpoint:near", role="annotator")
                kept = await model.complete(QUESTION)
                await model.complete(sampled)
        endpoint = Endpoint("x", server.settings())
        assert kept == await EndpointLanguageModel(endpoint, role="x").complete(QUESTION)
        await endpoint.aclose()
        # The greedy one once, the sampled one twice (not cached), then ours.
        assert server.completions == 1 + 2 + 1
        spent = json.loads((tmp_path / "usage.json").read_text(encoding="utf-8"))
        (row,) = spent["rows"]
        assert (row["endpoint"], row["role"], row["requests"], row["cache_hits"]) == (
            "near",
            "annotator",
            3,
            1,
        )
        assert spent["hit_rate"] == 0.25


def test_a_damaged_cache_costs_its_replies_and_no_more(tmp_path: Path) -> None:
    cache = ReplyCache(tmp_path / "replies.sqlite")
    said = Completion(text="ja ☃", token_ids=(1, 2), logprobs=(-0.5, -1.0), finish_reason="length")
    cache.put(b"one", said)
    assert cache.get(b"one") == said
    assert cache.get(b"two") is None
    with sqlite3.connect(tmp_path / "replies.sqlite") as rows:
        rows.execute("UPDATE replies SET reply = x'00ff'")
    assert cache.get(b"one") is None
    cache.put(b"one", said)
    assert cache.get(b"one") == said
    cache.close()
    (tmp_path / "other").write_text("not a database, but long enough to be looked at as one " * 40)
    with pytest.raises(StoreError, match="cannot cache replies"):
        ReplyCache(tmp_path / "other")


async def test_a_judge_gets_valid_scores_from_a_server_that_follows_schemas() -> None:
    """Random weights would never write JSON by themselves: it is the schema that does it."""

    async with served() as server:
        endpoint = Endpoint("x", server.settings(kind="chat"))
        request = CompletionRequest(prompt="Judge.", schema=Scores.model_json_schema(), max_tokens=200)
        reply = await endpoint.complete(request, role="judge")
        assert Scores.model_validate_json(reply.text)
        unbounded = CompletionRequest(
            prompt="You see a fridge 1, a drawer",
            max_tokens=4,
            schema={"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]},
        )
        assert (await endpoint.complete(unbounded, role="judge")).text  # rejected, then sent without it
        assert not endpoint.features.json_schema
        sent = [json.loads(each.body) for each in server.requests]
        assert ["response_format" in body for body in sent] == [True, True, False]
        await endpoint.aclose()


async def test_a_prompt_that_is_too_long_fails_as_with_a_local_model() -> None:
    async with served() as server:
        endpoint = Endpoint("x", server.settings())
        judge = RubricJudge(EndpointLanguageModel(endpoint, role="judge"), name="nano", max_tokens=12)
        outcome = Outcome(next_state=State(text="a drawer 2"), reward=0.0, terminated=False)
        step = Transition(state=State(text="a fridge 1"), action="look", outcome=outcome)
        task = Task(id="t", instruction="look", environment="kitchen")
        with pytest.raises(EpisodeFailedError, match="reads at most 1024 tokens") as caught:
            await judge.score(task, (), step)
        assert caught.value.kind is FailureKind.BUDGET
        assert server.completions == 1  # once more would not make it shorter
        await endpoint.aclose()


@pytest.mark.parametrize("json_schema", ["auto", "no"])
async def test_choices_are_enforced_by_the_server_or_fail(json_schema: str) -> None:
    async with served() as server:
        endpoint = Endpoint("x", server.settings(json_schema=json_schema))
        request = CompletionRequest(
            prompt="You see", choices=(" go north", " look"), max_tokens=30, stop=("\n",)
        )
        if json_schema == "auto":
            assert (await endpoint.complete(request, role="agent")).text in (" go north", " look")
        else:
            with pytest.raises(EpisodeFailedError, match="expected one of 2 choices") as caught:
                await endpoint.complete(request, role="agent")
            assert caught.value.kind is FailureKind.PARSE_ERROR
            assert server.completions == 1  # asking a greedy model again would not help
        await endpoint.aclose()


@pytest.mark.parametrize(
    ("key", "model", "message"),
    [
        ("other", MODEL, "the server refused the API key"),
        ("", "gpt", "this server has the model 'nano' only"),
    ],
)
async def test_a_wrong_key_or_model_fails_at_once(
    key: str, model: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with served(key="right" if key else "") as server:
        monkeypatch.setenv("DREAMGYM_API_KEY", key)
        endpoint = Endpoint("x", server.settings(model=model))
        with pytest.raises(EndpointError, match=message):
            await endpoint.complete(QUESTION, role="agent")
        assert server.completions == 1
        await endpoint.aclose()


@pytest.mark.parametrize(
    "said",
    [
        "This model's maximum context length is 8192 tokens. However, your prompt contains at least 8193 "
        "input tokens, which exceeds this limit even without any output tokens.",
        "max_tokens=9000 cannot be greater than max_model_len=8192. Please request fewer output tokens. "
        "(parameter=max_tokens, value=9000)",
    ],
)
async def test_the_messages_of_vllm_about_long_requests_are_understood(said: str) -> None:
    """Its words, as vLLM 0.32 has answered."""

    async def handle(request: Request) -> Response:
        return JSONResponse({"error": {"message": said, "type": "BadRequestError", "code": 400}}, 400)

    server = HandlerServer(handle)
    await server.start()
    endpoint = Endpoint("x", EndpointConfig(url=server.url, model="m", backoff_seconds=0.01))
    with pytest.raises(EpisodeFailedError, match="1 attempts") as caught:
        await endpoint.complete(QUESTION, role="agent")
    assert caught.value.kind is FailureKind.BUDGET
    await endpoint.aclose()
    await server.aclose()


async def test_rejected_fields_are_left_out_from_then_on() -> None:
    """A server in the manner of newer hosted ones: another name for the limit, no seeds."""
    bodies: list[dict[str, Any]] = []

    async def handle(request: Request) -> Response:
        body = json.loads(await request.body())
        bodies.append(body)
        for name, problem in (("max_tokens", "use max_completion_tokens"), ("seed", "unknown field seed")):
            if name in body:
                return JSONResponse({"error": {"message": f"Unsupported parameter: {problem}"}}, 400)
        said = {"role": "assistant", "content": "yes"}
        return JSONResponse({"choices": [{"message": said, "finish_reason": "stop"}]})

    server = HandlerServer(handle)
    await server.start()
    endpoint = Endpoint("x", EndpointConfig(url=server.url, model="o", backoff_seconds=0.01))
    request = CompletionRequest(prompt="well?", temperature=0.5)
    assert (await endpoint.complete(request, role="agent")).text == "yes"
    await endpoint.complete(CompletionRequest(prompt="sure?", temperature=0.5), role="agent")
    assert [("max_tokens" in body, "seed" in body) for body in bodies] == [
        (True, True),
        (False, True),
        (False, False),
        (False, False),
    ]
    await endpoint.aclose()
    await server.aclose()


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"null",
        b"[]",
        b'{"choices": []}',
        b'{"choices": [{"text": 3}]}',
        b'{"choices": [{"text": "\\ud800"}]}',
        b'{"choices": [{"text": "  "}]}',
        b'{"choices": [{"message": {"content": null}}]}',
        b'{"choices": [{"text": "a", "token_ids": ["x"]}]}',
        b'{"choices": [{"text": "a", "logprobs": {"token_logprobs": [NaN]}}]}',
        b'{"choices": [{"text": "a"}], "usage": {"prompt_tokens": -1}}',
        b'{"choices": [{"text": "a"}], "usage": {"prompt_tokens": 1' + b"0" * 400 + b"}}",
        b'{"choices": [{"text": "a"}]',
        b"\xff\xfe",
    ],
)
def test_a_malformed_reply_is_a_parse_error(raw: bytes) -> None:
    with pytest.raises(RequestFailedError) as caught:
        protocol.parse_reply(decode_json(raw), QUESTION, enforced=False)
    assert caught.value.kind is FailureKind.PARSE_ERROR


def test_a_refusal_is_distinguished_from_a_malformed_reply() -> None:
    for raw in (
        b'{"choices": [{"message": {"content": null, "refusal": "no"}}]}',
        b'{"choices": [{"message": {"content": ""}, "finish_reason": "content_filter"}]}',
    ):
        with pytest.raises(RequestFailedError) as caught:
            protocol.parse_reply(decode_json(raw), QUESTION, enforced=False)
        assert (caught.value.kind, caught.value.retry) == (FailureKind.REFUSED, False)


def test_names_are_checked_before_anything_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("STRONG_KEY", raising=False)
    strong = {"url": "http://localhost:1", "model": "m", "api_key_env": "STRONG_KEY"}
    config = validate(Config, {"endpoints": {"strong": strong}, "budget": {"money": 1.0}})
    with pytest.raises(ConfigError, match=r"no endpoint 'strog'; did you mean 'strong'\?"):
        find_endpoint("endpoint:strog", config.endpoints)
    with pytest.raises(ConfigError, match=r"\$STRONG_KEY, which is not set"):
        check_language_model("endpoint:strong", config)
    monkeypatch.setenv("STRONG_KEY", "sk-1")
    with pytest.raises(ConfigError, match="needs its input_price and output_price"):
        check_language_model("endpoint:strong", config)
    with pytest.raises(ConfigError, match="expected hf:NAME_OR_PATH, endpoint:NAME"):
        check_language_model("gpt", config)
    assert find_endpoint("a@b@http://localhost:2/v1", {}).model == "a@b"
