"""What endpoints cost: counted once, by stage and role, and never above the budget."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from dreamgym.config import BudgetConfig, Config, EndpointConfig, validate
from dreamgym.errors import BudgetSpentError, EpisodeFailedError, StoreError
from dreamgym.models.endpoint.client import Endpoint
from dreamgym.models.registry import LanguageModels
from dreamgym.models.usage import Usage, UsageRow, stage
from dreamgym.types import CompletionRequest, FailureKind
from tests.chaos import ChaosPlan, ChaosProxy
from tests.handler_server import HandlerServer
from tests.models.scripted_endpoint import served


def question(number: int) -> CompletionRequest:
    return CompletionRequest(prompt=f"You see a drawer {number}", max_tokens=8, stop=("\n",))


async def test_usage_is_counted_by_stage_and_role_with_the_tokens_of_the_server() -> None:
    async with served() as server:
        settings = server.settings(input_price=1.0, output_price=10.0)
        config = validate(Config, {"endpoints": {"near": settings.model_dump()}})
        async with LanguageModels(config) as models:
            annotator = models.open("endpoint:near", role="annotator")
            judge = models.open("endpoint:near", role="judge")
            with stage("annotation"):
                await annotator.complete(question(1))
            with stage("train"):
                await asyncio.gather(*(judge.complete(question(n)) for n in range(2, 5)))
            stats = server.local.stats
            total = models.usage.total
            assert total.prompt_tokens == stats.prompt_tokens
            assert total.reply_tokens == stats.sampled_tokens
            assert total.money == pytest.approx(total.prompt_tokens / 1e6 + total.reply_tokens / 1e5)
            counted = {place: row.requests for place, row in models.usage.rows.items()}
            assert counted == {("annotation", "annotator", "near"): 1, ("train", "judge", "near"): 3}
            assert models.endpoint("near") is models.endpoint("endpoint:near")


@pytest.mark.parametrize("limit", [{"money": 0.00005}, {"tokens": 400}, {"requests": 7}])
async def test_a_run_stops_before_its_budget_is_exceeded_and_replies_are_kept(
    limit: dict[str, float], tmp_path: Path
) -> None:
    async with served() as server:
        endpoints = {"near": server.settings(input_price=0.1, output_price=1.0).model_dump()}
        config = validate(Config, {"endpoints": endpoints, "budget": limit})
        async with LanguageModels(config, folder=tmp_path) as models:
            model = models.open("endpoint:near", role="agent")
            answers = await asyncio.gather(
                *(model.complete(question(n)) for n in range(60)), return_exceptions=True
            )
        refused = [answer for answer in answers if isinstance(answer, BudgetSpentError)]
        answered = [answer for answer in answers if not isinstance(answer, BaseException)]
        assert len(refused) + len(answered) == 60
        assert refused
        assert answered
        assert "raise the budget" in str(refused[0])
        spent = models.usage.total
        assert spent.money + spent.unconfirmed_money <= limit.get("money", 1)
        assert spent.prompt_tokens + spent.reply_tokens <= limit.get("tokens", 1e9)
        assert spent.sent <= limit.get("requests", 1e9)
        sent = server.completions
        async with LanguageModels(config, folder=tmp_path) as again:  # a resumed run has the same budget
            model = again.open("endpoint:near", role="agent")
            assert await model.complete(question(0)) == answers[0]  # from the cache, which costs nothing
            with pytest.raises(BudgetSpentError):
                await asyncio.gather(*(model.complete(question(n)) for n in range(100, 160)))
        assert server.completions <= sent + 1
        richer = config.model_copy(update={"budget": BudgetConfig(money=100.0)})
        async with LanguageModels(richer, folder=tmp_path) as more:
            model = more.open("endpoint:near", role="agent")
            await asyncio.gather(*(model.complete(question(n)) for n in range(60)))


async def test_unanswered_requests_count_against_the_budget() -> None:
    async with served() as server, ChaosProxy(server.url, ChaosPlan(truncated=1.0)) as proxy:
        settings = server.settings(url=proxy.url, input_price=0.0, output_price=1e6, max_attempts=50)
        usage = Usage(BudgetConfig(money=20.0))  # a reply of 8 tokens may cost 8
        endpoint = Endpoint("x", settings, usage=usage)
        with pytest.raises(BudgetSpentError, match=r"16 is spent, and the next request may need 8"):
            await endpoint.complete(question(1), role="agent")
        assert (usage.total.money, usage.total.unconfirmed_money, usage.total.sent) == (0.0, 16.0, 2)
        await endpoint.aclose()


@pytest.mark.parametrize("counted", [{"prompt_tokens": 0, "completion_tokens": 0}, {}, None])
async def test_a_server_that_reports_no_tokens_is_counted_by_estimate(counted: dict[str, int] | None) -> None:
    async def handle(request: Request) -> Response:
        reply = {"choices": [{"text": "a" * 400, "finish_reason": "stop"}]}
        return JSONResponse(reply if counted is None else reply | {"usage": counted})

    async with HandlerServer(handle) as server:
        prices = {"input_price": 1e6, "output_price": 1e6}
        settings = {"url": server.url, "model": "m", "kind": "completions"}
        endpoint = Endpoint("x", EndpointConfig.model_validate(settings | prices))
        await endpoint.complete(CompletionRequest(prompt="b" * 80), role="agent")
        total = endpoint.usage.total
        assert (total.prompt_tokens, total.reply_tokens, total.money) == (20, 101, 121.0)
        await endpoint.aclose()


async def test_an_absurd_number_of_tokens_is_a_typed_failure() -> None:
    async def handle(request: Request) -> Response:
        usage = f'{{"prompt_tokens": 1{"0" * 400}, "completion_tokens": 1}}'
        return Response(f'{{"choices": [{{"text": "a"}}], "usage": {usage}}}')

    async with HandlerServer(handle) as server:
        settings = {"url": server.url, "model": "m", "kind": "completions", "backoff_seconds": 0.01}
        prices = {"input_price": 1.0, "output_price": 1.0, "max_attempts": 2}
        endpoint = Endpoint("x", EndpointConfig.model_validate(settings | prices))
        with pytest.raises(EpisodeFailedError, match=r"usage\.prompt_tokens") as caught:
            await endpoint.complete(question(1), role="agent")
        assert caught.value.kind is FailureKind.PARSE_ERROR
        await endpoint.aclose()


def test_a_damaged_usage_file_is_an_error(tmp_path: Path) -> None:
    file = tmp_path / "usage.json"
    usage = Usage(file=file)
    usage.row("agent", "x").add(UsageRow(requests=3, money=1.5))
    usage.save()
    assert Usage(file=file).total == UsageRow(requests=3, money=1.5)
    assert json.loads(file.read_text(encoding="utf-8"))["rows"][0]["money"] == 1.5
    for damaged in ("", "{}", '{"rows": [{}]}', '{"rows": [3]}'):
        file.write_text(damaged, encoding="utf-8")
        with pytest.raises(StoreError, match="the usage of the run so far"):
            Usage(file=file)
