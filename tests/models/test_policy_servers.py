"""A served policy takes nothing that its server did not sample: wrong replies are failures with a kind."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from dreamgym.config import EndpointConfig
from dreamgym.errors import EpisodeFailedError
from dreamgym.http_server import HttpServer
from dreamgym.models.endpoint.policy_servers import PolicyServer, ServedPolicy
from dreamgym.models.local.tokens import TextCodec, TokenHistory
from dreamgym.types import CompletionRequest, FailureKind
from tests.models import small_models

CODEC = TextCodec(small_models.tokenizer())
IDS = CODEC.more(" look\n")
REQUEST = CompletionRequest(prompt="look\n>", max_tokens=8, stop=("\n",), conversation="episode", seed=2**62)
PROMPT = CODEC.start(REQUEST.prompt)
GOOD: dict[str, Any] = {
    **{"token_ids": IDS, "prompt_token_ids": PROMPT, "text": "", "finish_reason": "stop"},
    "logprobs": {"token_logprobs": [-0.5] * len(IDS)},
}


@dataclass
class Scripted:
    """A server that answers every completion with this choice, at this version of its weights."""

    choice: Mapping[str, Any] = field(default_factory=lambda: GOOD)
    version: str = "v1"
    status: int = 200
    bodies: list[dict[str, Any]] = field(default_factory=list)

    async def complete(self, request: Request) -> JSONResponse:
        self.bodies.append(await request.json())
        return JSONResponse({"choices": [self.choice]}, self.status)

    async def info(self, request: Request) -> JSONResponse:
        return JSONResponse({"weight_version": self.version})


@asynccontextmanager
async def policy_on(*scripted: Scripted, **settings: Any) -> AsyncIterator[ServedPolicy]:
    servers, opened = list[PolicyServer](), list[HttpServer]()
    for number, each in enumerate(scripted):
        routes = [
            Route("/v1/completions", each.complete, methods=["POST"]),
            Route("/weight_info", each.info),
        ]
        server = HttpServer(Starlette(routes=routes))
        await server.start()
        opened.append(server)
        quick = {"url": server.url, "model": "m", "backoff_seconds": 0.001, "max_attempts": 2}
        servers.append(
            PolicyServer(f"server {number}", EndpointConfig.model_validate(quick | settings), adapter=False)
        )
    policy = ServedPolicy(servers, CODEC, TokenHistory(CODEC), vocabulary=len(small_models.tokenizer()))
    policy.version = "v1"
    try:
        yield policy
    finally:
        await policy.aclose()
        for server in opened:
            await server.aclose()


async def test_a_sample_has_the_servers_tokens_and_the_text_of_our_tokenizer() -> None:
    server = Scripted(choice=GOOD | {"text": "something else"})
    async with policy_on(server) as policy:
        found = await policy.complete(REQUEST)
        assert (found.text, found.token_ids, found.prompt_token_ids) == (" look", tuple(IDS), tuple(PROMPT))
        more = replace(REQUEST, prompt=f"{REQUEST.prompt} look\nYou see a drawer 1.\n>")
        server.choice = {name: value for name, value in GOOD.items() if name != "prompt_token_ids"}
        await policy.complete(more)
    sent = server.bodies[1]["prompt"]
    assert sent[: len(PROMPT) + len(IDS)] == [*PROMPT, *IDS], "sampled tokens are not tokenized again"
    asked = {"seed": 2**62, "model": "m", "temperature": 0.0, "top_p": 1.0, "top_k": -1, "min_p": 0.0}
    assert asked.items() <= server.bodies[0].items()


@pytest.mark.parametrize(
    ("changed", "kind", "message"),
    [
        ({"token_ids": None}, FailureKind.PARSE_ERROR, "one log-prob per token id"),
        ({"logprobs": {"token_logprobs": [-1.0]}}, FailureKind.PARSE_ERROR, "one log-prob per token id"),
        ({"token_ids": [2**70, *IDS[1:]]}, FailureKind.PARSE_ERROR, "tokens below"),
        ({"token_ids": [-1, *IDS[1:]]}, FailureKind.PARSE_ERROR, "tokens below"),
        ({"prompt_token_ids": [1, 2, 3]}, FailureKind.PARSE_ERROR, "the tokens of the prompt"),
        ({"token_ids": CODEC.more(" look at")[: len(IDS)]}, FailureKind.PARSE_ERROR, "aborted"),
        ({"text": 3}, FailureKind.PARSE_ERROR, "malformed"),
    ],
)
async def test_a_reply_that_no_learner_could_use_is_a_failure(
    changed: dict[str, Any], kind: FailureKind, message: str
) -> None:
    async with policy_on(server := Scripted(choice=GOOD | changed)) as policy:
        with pytest.raises(EpisodeFailedError, match=message) as caught:
            await policy.complete(REQUEST)
    assert caught.value.kind is kind
    assert len(server.bodies) == 2, "after as many rounds as max_attempts says"


async def test_a_sample_of_other_weights_is_a_contradiction() -> None:
    async with policy_on(Scripted(version="default")) as policy:
        with pytest.raises(EpisodeFailedError, match="expected weights 'v1', it has 'default'") as caught:
            await policy.complete(REQUEST)
    assert caught.value.kind is FailureKind.CONTRADICTION


async def test_another_server_answers_and_the_failing_one_is_avoided_from_then_on() -> None:
    stale, fresh = Scripted(version="default"), Scripted()
    for servers in ((stale, fresh), (fresh, stale)):
        stale.bodies.clear()
        async with policy_on(*servers) as policy:
            for number in range(20):
                found = await policy.complete(replace(REQUEST, conversation=f"episode {number}"))
                assert found.token_ids == tuple(IDS)
        assert len(stale.bodies) == 1


async def test_a_request_that_the_server_refuses_is_not_sent_again() -> None:
    async with policy_on(server := Scripted(status=400), Scripted()) as policy:
        policy.servers[1].avoided_until = float("inf")
        with pytest.raises(EpisodeFailedError) as caught:
            await policy.complete(REQUEST)
    assert (caught.value.kind, len(server.bodies)) == (FailureKind.REFUSED, 1)


async def test_a_prompt_beyond_the_context_is_a_budget_failure_and_a_long_reply_is_cut() -> None:
    async with policy_on(server := Scripted(), context_length=len(PROMPT) + len(IDS)) as policy:
        await policy.complete(REQUEST)
        assert server.bodies[0]["max_tokens"] == len(IDS)
        with pytest.raises(EpisodeFailedError, match="reads at most") as caught:
            await policy.complete(replace(REQUEST, prompt=REQUEST.prompt * 9, conversation=None))
    assert caught.value.kind is FailureKind.BUDGET
