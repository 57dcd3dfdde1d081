"""The client of one OpenAI-compatible endpoint, shared by all callers, with one rate limiter.

A request is answered from the cache, or joined to an equal one in flight, or sent: within the budget, with
retries, until its deadline. The result is a completion or one typed error.
"""

from __future__ import annotations

import asyncio
import os
import time
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from dreamgym.config import DEFAULT_KEY, EndpointConfig
from dreamgym.errors import ConfigError, EndpointError, EpisodeFailedError
from dreamgym.http_client import HttpClient, RequestFailedError, retry_delay
from dreamgym.models.endpoint import protocol
from dreamgym.models.endpoint.cache import ReplyCache
from dreamgym.models.endpoint.rate_limit import RateLimiter
from dreamgym.models.usage import Reservation, Usage, UsageRow
from dreamgym.single_flight import SingleFlight
from dreamgym.types import Completion, CompletionRequest, FailureKind

_MAX_EMPTY_REPLIES = 3
"""To one request: a model that writes nothing at temperature 0 does so again."""
_PROBE_SECONDS = 5.0


class Endpoint:
    def __init__(
        self,
        name: str,
        settings: EndpointConfig,
        *,
        usage: Usage | None = None,
        cache: ReplyCache | None = None,
    ) -> None:
        """Opens no connection yet."""
        self.name = name
        self.settings = settings
        self.url = base_url(settings.url)
        self.usage = usage if usage is not None else Usage()
        self.features = protocol.Features.of(settings)
        check_settings(name, settings, in_money=self.usage.budget.money is not None)
        self._cache = cache
        self._http = HttpClient(self.url, max_connections=settings.concurrency + 4)
        self._limiter = RateLimiter(
            concurrency=settings.concurrency,
            requests_per_minute=settings.requests_per_minute,
            tokens_per_minute=settings.tokens_per_minute,
        )
        self._single_flight: SingleFlight[Completion] = SingleFlight()
        self._contacted = False
        """Whether the server has ever sent a reply."""
        self._first_contact = asyncio.Lock()
        self._contact_deadline: float | None = None
        self._problem: RequestFailedError | None = None
        """Of the last probe."""
        self._closed = False

    async def complete(self, request: CompletionRequest, *, role: str) -> Completion:
        """
        Raises:
            EpisodeFailedError: `timeout`, `rate_limited`, `server_down`, `refused` or `parse_error`, after
                all attempts.
            EndpointError: key, model or address are wrong: no request can succeed.
            BudgetSpentError: the request might cost more than the rest of the budget.
        """
        row = self.usage.row(role, self.name)
        cache = self._cache if request.temperature == 0 or self.settings.cache_sampled else None
        cache_key = None if cache is None else protocol.cache_key(request, self.settings)
        if cache is not None and cache_key is not None and (cached := cache.get(cache_key)) is not None:
            row.cache_hits += 1
            return cached

        async def send() -> Completion:
            completion = await self._send_with_retries(request, row)
            if cache is not None and cache_key is not None:
                cache.put(cache_key, completion)
            return completion

        key = protocol.request_key(request)
        row.shared += key in self._single_flight
        return await self._single_flight.do(key, send)

    async def check_reachable(self) -> None:
        """Wait `start_seconds` for a first reply of the server; returns at once if there was one."""
        try:
            await self._wait_for_first_contact()
        except RequestFailedError as problem:
            raise self._final_error(problem, _RequestState()) from None

    async def probe(self) -> tuple[RequestFailedError | None, Any]:
        """The reason why the server does not answer (None if it does), and its reply to ``GET /models``."""
        try:
            status, listed = await self._http.get(
                f"{self.url}/models", key=api_key(self.settings), seconds=_PROBE_SECONDS
            )
        except RequestFailedError as error:
            return error, None
        self._contacted = True
        if status >= 500:
            return RequestFailedError(FailureKind.SERVER_DOWN, f"status {status}"), None
        return None, listed

    async def aclose(self) -> None:
        """Pending requests fail. May be called twice."""
        self._closed = True
        await self._http.aclose()

    async def _send_with_retries(self, request: CompletionRequest, row: UsageRow) -> Completion:
        state = _RequestState()
        try:
            async with asyncio.timeout(None) as state.deadline:
                while True:
                    try:
                        return await self._attempt(request, row, state)
                    except RequestFailedError as error:
                        await self._recover(error, state)
        except RequestFailedError as error:
            problem = error
        except TimeoutError:
            problem = state.problem or RequestFailedError(
                FailureKind.TIMEOUT, f"no reply within {self.settings.deadline_seconds:g} seconds"
            )
        row.failures += 1
        raise self._final_error(problem, state)

    async def _attempt(self, request: CompletionRequest, row: UsageRow, state: _RequestState) -> Completion:
        prompt, reply = protocol.max_prompt_tokens(request), request.max_tokens
        reserved = Reservation(money=self.settings.cost(prompt, reply), tokens=prompt + reply, requests=1)
        used: int | None = None
        slot = await self._limiter.acquire(prompt + reply)
        try:
            if self._closed:
                raise RequestFailedError(FailureKind.SERVER_DOWN, "this endpoint is closed", retry=False)
            state.start(self.settings.deadline_seconds)
            await self.usage.reserve(reserved)
            try:
                parsed = await self._send(request, row, state, reserved)
            finally:
                self.usage.release(reserved)
            used = parsed.prompt_tokens + parsed.reply_tokens
        finally:
            self._limiter.release(slot, used)
        row.seconds += state.seconds
        return parsed.completion

    async def _send(
        self, request: CompletionRequest, row: UsageRow, state: _RequestState, reserved: Reservation
    ) -> protocol.ParsedReply:
        state.features = self.features
        body = protocol.request_body(request, self.settings, self.features)
        path = "chat/completions" if self.settings.kind == "chat" else "completions"
        row.sent += 1
        row.retries += state.sent > 0
        state.sent += 1
        started = time.perf_counter()
        try:
            reply = await self._http.post(
                f"{self.url}/{path}",
                body,
                key=api_key(self.settings),
                # A slow server gets more time at each attempt, not the same work again and again.
                seconds=self.settings.timeout_seconds * 2**state.timeouts,
            )
            parsed = protocol.parse_reply(reply, request, enforced="response_format" in body)
        except RequestFailedError as error:
            row.unconfirmed_money += reserved.money if error.maybe_billed else 0.0
            self._contacted |= not error.not_connected
            raise
        except asyncio.CancelledError:
            row.unconfirmed_money += reserved.money
            raise
        self._contacted = True
        self.usage.latencies.append(time.perf_counter() - started)
        row.requests += 1
        row.prompt_tokens += parsed.prompt_tokens
        row.reply_tokens += parsed.reply_tokens
        row.money += self.settings.cost(parsed.prompt_tokens, parsed.reply_tokens)
        return parsed

    async def _recover(self, error: RequestFailedError, state: _RequestState) -> None:
        """Wait until the next attempt, or raise the error if there is none."""
        if error.complaint:
            if state.features != self.features:
                return  # another request has already dropped the rejected field
            if (fewer := self.features.without_rejected(error.complaint, self.settings)) is not None:
                self.features = fewer
                return
        state.problem = error
        if error.not_connected and not self._contacted:
            await self._wait_for_first_contact()
            return
        state.failures += 1
        # A server that was there and is restarted is waited for until the deadline.
        state.attempts += not error.not_connected
        state.timeouts += error.kind is FailureKind.TIMEOUT
        state.empty_replies += error.empty_reply
        if not error.retry or self._closed or state.attempts >= self.settings.max_attempts:
            raise error
        if state.empty_replies >= _MAX_EMPTY_REPLIES:
            raise error
        delay = retry_delay(state.failures, error.retry_after, first=self.settings.backoff_seconds)
        if error.not_connected:
            delay = min(delay, _PROBE_SECONDS)
        if delay > state.seconds_left:
            raise error
        if error.kind is FailureKind.RATE_LIMITED and error.retry_after:
            self._limiter.pause(error.retry_after)
        await asyncio.sleep(delay)

    async def _wait_for_first_contact(self) -> None:
        """A server that never answered is probably not started or at another address: the wait is short."""
        clock = asyncio.get_running_loop().time
        if self._contact_deadline is None:
            self._contact_deadline = clock() + self.settings.start_seconds
        delay = self.settings.backoff_seconds
        async with self._first_contact:
            while not self._contacted:
                left = self._contact_deadline - clock()
                if left > 0 or self._problem is None:  # later requests fail by their own connection
                    self._problem, _ = await self.probe()
                    if self._problem is None or self._contacted:
                        return
                    if self._problem.fatal:
                        raise self._problem
                if left <= 0:
                    raise RequestFailedError(
                        FailureKind.SERVER_DOWN,
                        f"no connection to {self.url} in {self.settings.start_seconds:g} s (start_seconds): "
                        f"{self._problem}; start the server, or check the url",
                        retry=False,
                        fatal=True,
                    )
                await asyncio.sleep(min(delay, max(left, 0.0)))
                delay = min(2 * delay, _PROBE_SECONDS)

    def _final_error(
        self, problem: RequestFailedError, state: _RequestState
    ) -> EpisodeFailedError | EndpointError:
        if problem.fatal:
            advice = ""
            if problem.kind is not FailureKind.SERVER_DOWN:
                advice = f"; check its url, model and kind, and the key in ${self.settings.api_key_env}"
            return EndpointError(
                f"expected a completion by {self.settings.model!r} from endpoint {self.name!r}, "
                f"got {problem}{advice}"
            )
        return EpisodeFailedError(
            problem.kind, f"endpoint {self.name!r}, {state.sent} attempts, {state.seconds:.1f} s: {problem}"
        )


class EndpointLanguageModel:
    """One role's view of an endpoint, in the place of a local model. Usage is counted per role.

    Log-probs are the server's own. `conversation` is ignored: servers find common prefixes themselves.
    """

    def __init__(self, endpoint: Endpoint, *, role: str) -> None:
        self.endpoint = endpoint
        self._role = role

    async def complete(self, request: CompletionRequest) -> Completion:
        return await self.endpoint.complete(request, role=self._role)


@dataclass(slots=True)
class _RequestState:
    """The attempts at one request so far."""

    sent: int = 0
    failures: int = 0
    attempts: int = 0
    """Failures that count against `max_attempts`."""
    timeouts: int = 0
    empty_replies: int = 0
    problem: RequestFailedError | None = None
    features: protocol.Features | None = None
    deadline: asyncio.Timeout | None = None
    started: float = 0.0

    def start(self, seconds: float) -> None:
        """The deadline counts from the first attempt, not from the wait for the rate limiter."""
        if not self.started:
            self.started = asyncio.get_running_loop().time()
            assert self.deadline is not None
            self.deadline.reschedule(self.started + seconds)

    @property
    def seconds(self) -> float:
        return asyncio.get_running_loop().time() - self.started if self.started else 0.0

    @property
    def seconds_left(self) -> float:
        end = self.deadline.when() if self.deadline is not None else None
        return float("inf") if end is None else end - asyncio.get_running_loop().time()


def check_settings(name: str, settings: EndpointConfig, *, in_money: bool = False) -> None:
    """Check API key and prices before anything starts, without quoting the key."""
    key = api_key(settings)
    if not key and settings.api_key_env != DEFAULT_KEY:
        raise ConfigError(
            f"endpoint {name!r}: expected its API key in ${settings.api_key_env}, which is not set"
        )
    if not key.isascii() or not key.isprintable() or " " in key:
        raise ConfigError(
            f"endpoint {name!r}: the text in ${settings.api_key_env} cannot be an API key: "
            "expected ASCII characters without spaces"
        )
    if in_money and (settings.input_price is None or settings.output_price is None):
        raise ConfigError(
            f"endpoint {name!r}: budget.money needs its input_price and output_price; "
            "set them to 0 for a server of your own"
        )


def base_url(url: str) -> str:
    """
    >>> base_url("http://localhost:8000"), base_url("https://api.example.com/v1/chat/completions")
    ('http://localhost:8000/v1', 'https://api.example.com/v1')
    """
    plain = url.rstrip("/").removesuffix("/chat/completions").removesuffix("/completions")
    return plain if urlsplit(plain).path else f"{plain}/v1"


def api_key(settings: EndpointConfig) -> str:
    """Read from the environment for each request and not stored."""
    return os.environ.get(settings.api_key_env, "").strip()
