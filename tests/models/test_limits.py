"""Rate limits and retries: never too many requests, never too soon."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from dreamgym.config import EndpointConfig
from dreamgym.errors import EpisodeFailedError
from dreamgym.http_client import retry_after, retry_delay
from dreamgym.models.endpoint.client import Endpoint
from dreamgym.models.endpoint.rate_limit import RateLimiter
from dreamgym.models.usage import Usage
from dreamgym.types import CompletionRequest, FailureKind
from tests.chaos import ChaosProxy
from tests.handler_server import HandlerServer
from tests.models.scripted_endpoint import served


def question(number: int) -> CompletionRequest:
    return CompletionRequest(prompt=f"You see a drawer {number}", max_tokens=4, stop=("\n",))


async def test_no_minute_holds_more_requests_than_allowed() -> None:
    minute = 0.3
    limiter = RateLimiter(concurrency=50, requests_per_minute=5, minute=minute)
    began: list[float] = []

    async def ask() -> None:
        slot = await limiter.acquire(10)
        began.append(asyncio.get_running_loop().time())
        limiter.release(slot)

    await asyncio.gather(*(ask() for _ in range(17)))
    for place, at in enumerate(began[5:]):
        assert at - began[place] >= minute


async def test_tokens_count_as_they_were_used_and_a_request_above_the_limit_is_admitted_alone() -> None:
    minute = 0.3
    limiter = RateLimiter(concurrency=50, tokens_per_minute=100, minute=minute)
    loop = asyncio.get_running_loop()
    began = loop.time()
    for _ in range(5):  # reserved as 60 and used as 15: five fit into the same minute
        slot = await limiter.acquire(60 if loop.time() - began < minute else 0)
        limiter.release(slot, 10)
    assert loop.time() - began < minute
    limiter.release(await limiter.acquire(500))
    assert loop.time() - began >= minute
    limiter.release(await limiter.acquire(1))
    assert loop.time() - began >= 2 * minute


async def test_no_more_are_in_flight_than_allowed_and_a_pause_delays_all() -> None:
    limiter = RateLimiter(concurrency=3)
    inside = most = 0

    async def ask() -> None:
        nonlocal inside, most
        slot = await limiter.acquire(1)
        inside += 1
        most = max(most, inside)
        await asyncio.sleep(0.01)
        inside -= 1
        limiter.release(slot)

    await asyncio.gather(*(ask() for _ in range(10)))
    assert most == 3
    began = asyncio.get_running_loop().time()
    limiter.pause(0.2)
    await asyncio.gather(*(ask() for _ in range(3)))
    assert asyncio.get_running_loop().time() - began >= 0.2


async def test_a_cancelled_waiter_frees_its_slot() -> None:
    limiter = RateLimiter(concurrency=1, requests_per_minute=1, minute=0.2)
    limiter.release(await limiter.acquire(1))
    waiting = asyncio.create_task(limiter.acquire(1))
    await asyncio.sleep(0.01)
    waiting.cancel()
    async with asyncio.timeout(2):
        limiter.release(await limiter.acquire(1))


def test_retry_after_is_understood_in_seconds_and_as_a_date() -> None:
    now = datetime(2026, 11, 16, 12, tzinfo=UTC)
    later = format_datetime(now + timedelta(seconds=90), usegmt=True)
    assert retry_after({"retry-after": later}, now=now) == 90.0
    assert retry_after({"retry-after": format_datetime(now - timedelta(days=1))}, now=now) == 0.0
    assert retry_after({"retry-after": "7"}) == 7.0
    assert retry_after({"retry-after-ms": "250", "retry-after": "7"}) == 0.25
    assert retry_after({}) is None


@given(st.text())
def test_any_retry_after_header_gives_none_or_a_delay(value: str) -> None:
    pause = retry_after({"retry-after": value})
    assert pause is None or pause >= 0


def test_backoff_doubles_with_jitter_and_is_never_below_retry_after() -> None:
    for failures in range(1, 12):
        drawn = {retry_delay(failures, None, first=0.5) for _ in range(20)}
        most = min(30.0, 0.5 * 2 ** (failures - 1))
        assert len(drawn) > 1
        assert all(most / 2 <= pause <= most for pause in drawn)
        assert retry_delay(failures, 40.0, first=0.5) >= 40.0


async def test_the_server_gets_no_request_before_its_retry_after() -> None:
    times: list[float] = []

    async def handle(request: Request) -> Response:
        times.append(asyncio.get_running_loop().time())
        if len(times) == 1:
            return Response(status_code=429, headers={"retry-after": "0.4"})
        return JSONResponse({"choices": [{"text": "yes", "finish_reason": "stop"}]})

    server = HandlerServer(handle)
    await server.start()
    async with served() as other:
        endpoint = Endpoint("x", other.settings(url=server.url))
        first = asyncio.create_task(endpoint.complete(question(1), role="agent"))
        await asyncio.sleep(0.1)
        await asyncio.gather(first, *(endpoint.complete(question(n), role="agent") for n in range(2, 6)))
        assert min(times[1:]) - times[0] >= 0.4
        await endpoint.aclose()
    await server.aclose()


async def test_a_retry_after_beyond_the_deadline_fails_at_once() -> None:
    async def handle(request: Request) -> Response:
        return Response(status_code=429, headers={"retry-after": "3600"})

    server = HandlerServer(handle)
    await server.start()
    async with served() as other, asyncio.timeout(5):
        endpoint = Endpoint("x", other.settings(url=server.url, deadline_seconds=2))
        with pytest.raises(EpisodeFailedError, match="1 attempts") as caught:
            await endpoint.complete(question(1), role="agent")
        assert caught.value.kind is FailureKind.RATE_LIMITED
        await endpoint.aclose()
    await server.aclose()


async def test_a_server_that_never_ends_its_reply_is_a_timeout_even_if_it_drips() -> None:
    async def dripping() -> AsyncIterator[bytes]:
        for _ in range(10):
            yield b" " * 100
            await asyncio.sleep(0.1)

    async def handle(request: Request) -> Response:
        return StreamingResponse(dripping())

    server = HandlerServer(handle)
    await server.start()
    async with served() as other, asyncio.timeout(10):
        usage = Usage()
        endpoint = Endpoint(
            "x", other.settings(url=server.url, timeout_seconds=0.3, max_attempts=2), usage=usage
        )
        with pytest.raises(EpisodeFailedError) as caught:
            await endpoint.complete(question(1), role="agent")
        assert caught.value.kind is FailureKind.TIMEOUT
        assert (usage.total.sent, usage.total.retries, usage.total.failures) == (2, 1, 1)
        await endpoint.aclose()
    await server.aclose()


async def test_a_slow_server_gets_more_time_instead_of_the_same_request_again_and_again() -> None:
    async def handle(request: Request) -> Response:
        await asyncio.sleep(0.7)
        return JSONResponse({"choices": [{"text": "yes", "finish_reason": "stop"}]})

    async with HandlerServer(handle) as server, asyncio.timeout(10):
        settings = {"url": server.url, "model": "m", "kind": "completions", "backoff_seconds": 0.01}
        endpoint = Endpoint("x", EndpointConfig.model_validate(settings | {"timeout_seconds": 0.25}))
        assert (await endpoint.complete(question(1), role="agent")).text == "yes"
        assert endpoint.usage.total.sent == 3  # 0.25, 0.5 and 1 second
        await endpoint.aclose()


@pytest.mark.parametrize("value", ["Mon, 16 Nov 2026 12:00:30 +99999999999999999999", "9" * 400])
async def test_a_retry_after_that_overflows_is_a_typed_failure(value: str) -> None:
    async def handle(request: Request) -> Response:
        return Response(status_code=429, headers={"retry-after": value})

    async with HandlerServer(handle) as server, asyncio.timeout(10):
        settings = {"url": server.url, "model": "m", "max_attempts": 2, "backoff_seconds": 0.01}
        endpoint = Endpoint("x", EndpointConfig.model_validate(settings))
        with pytest.raises(EpisodeFailedError) as caught:
            await endpoint.complete(question(1), role="agent")
        assert caught.value.kind is FailureKind.RATE_LIMITED
        await endpoint.aclose()


async def test_a_killed_server_is_waited_for_and_nothing_is_lost_when_it_is_back() -> None:
    async with served() as server, ChaosProxy(server.url) as proxy:
        endpoint = Endpoint("x", server.settings(url=proxy.url, backoff_seconds=0.05, concurrency=8))
        await endpoint.complete(question(99), role="agent")
        await proxy.stop()
        asking = asyncio.gather(*(endpoint.complete(question(n), role="agent") for n in range(30)))
        await asyncio.sleep(0.5)
        assert not asking.done()
        await proxy.start()
        async with asyncio.timeout(10):
            replies = await asking
        assert [reply.text for reply in replies] == [
            (await server.local.complete(question(n))).text for n in range(30)
        ]
        await endpoint.aclose()


async def test_a_server_that_stays_away_is_a_typed_failure_at_the_deadline() -> None:
    async with served() as server, ChaosProxy(server.url) as proxy:
        endpoint = Endpoint("x", server.settings(url=proxy.url, deadline_seconds=0.5, max_attempts=100))
        await endpoint.complete(question(99), role="agent")
        await proxy.stop()
        async with asyncio.timeout(5):
            with pytest.raises(EpisodeFailedError) as caught:
                await endpoint.complete(question(1), role="agent")
        assert caught.value.kind is FailureKind.SERVER_DOWN
        await endpoint.aclose()
