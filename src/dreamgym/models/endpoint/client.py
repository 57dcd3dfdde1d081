"""One OpenAI-compatible endpoint: everything that asks it goes through here, under one governor.

A request is looked up in the cache, joined to an equal one in flight, or sent: within the budget, to the
replica with the least to do, again after failures that pass, until its deadline. What comes of it is a
completion or one typed error.
"""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from dreamgym.config import DEFAULT_KEY, EndpointConfig
from dreamgym.errors import ConfigError, EndpointError, EpisodeFailedError, MissingExtraError
from dreamgym.models.endpoint import bounds, protocol
from dreamgym.models.endpoint.cache import ReplyCache
from dreamgym.models.endpoint.rate_limit import RateLimiter
from dreamgym.models.endpoint.replicas import Replica, Replicas
from dreamgym.models.endpoint.retry import AttemptFailedError, pause_after, refusal
from dreamgym.models.endpoint.sameness import Sameness
from dreamgym.models.endpoint.single_flight import SingleFlight
from dreamgym.models.endpoint.transport import Reply, make_client, own_connections
from dreamgym.models.usage import Most, Prices, Spending, Spent
from dreamgym.types import Completion, CompletionRequest, FailureKind

_MALFORMED_REPLIES = 3
"""To one request in good form; a model that says nothing, greedily, will do so again."""
_PROBE_SECONDS = 5.0
_JSON = json.JSONEncoder(separators=(",", ":"), allow_nan=False)
"""All in ASCII: half a character, which a model may well write, has no other form on the wire."""
_TOLD = (
    b"accept: application/json\r\naccept-encoding: identity\r\nuser-agent: dreamgym\r\n"
    b"content-type: application/json\r\n"
)


class Endpoint:
    def __init__(
        self,
        name: str,
        settings: EndpointConfig,
        *,
        spending: Spending | None = None,
        cache: ReplyCache | None = None,
    ) -> None:
        """Opens no connection yet; must be made where its event loop runs.

        Raises:
            ConfigError: its key is missing, or the budget is in money and it has no prices.
            MissingExtraError: httpx is not installed.
        """
        try:
            import httpx
        except ImportError:
            raise MissingExtraError("an endpoint", "endpoint") from None
        self.name = name
        self.settings = settings
        self.spending = spending if spending is not None else Spending()
        self.dialect = protocol.Dialect.of(settings)
        self._prices = Prices.of(settings)
        self._cache = cache
        check_settings(name, settings, in_money=self.spending.budget.money is not None)
        self._httpx = httpx
        self._connections = own_connections(settings.urls)
        limits = httpx.Limits(max_connections=settings.concurrency + 4)
        self._client = make_client(self._connections, timeout=None, limits=limits)
        self._governor = RateLimiter(
            concurrency=settings.concurrency,
            requests_per_minute=settings.requests_per_minute,
            tokens_per_minute=settings.tokens_per_minute,
        )
        self._replicas = Replicas(
            [base_address(url) for url in settings.urls], self.answers, pause=settings.pause_seconds
        )
        self._flights: SingleFlight[Completion] = SingleFlight()
        self._closed = False
        self._sameness: dict[str, Sameness] = {}
        self._met = False
        """Whether any replica has ever said anything."""
        self._looking = asyncio.Lock()
        self._patience: float | None = None
        self._in_vain = 0.0

    @property
    def replicas(self) -> Replicas:
        return self._replicas

    async def ask(self, request: CompletionRequest, *, role: str) -> Completion:
        """
        Raises:
            EpisodeFailedError: `timeout`, `rate_limited`, `server_down`, `refused` or `parse_error`, after
                all attempts.
            EndpointError: key, model or address are wrong: no request will ever be answered.
            BudgetSpentError: it might have cost more than is left.
        """
        row = self.spending.row(role, self.name)
        cache = self._cache if request.temperature == 0 or self.settings.seeded else None
        key = None if cache is None else protocol.key(request, self.settings)
        if cache is not None and key is not None and (known := cache.get(key)) is not None:
            row.cache_hits += 1
            return known
        same = protocol.sameness(request)
        row.shared += same in self._flights
        return await self._flights.join(same, lambda: self._fly(request, row, role, cache, key))

    async def reach(self) -> None:
        """Wait until some replica shows that it is there; at once if one ever has.

        Raises:
            EndpointError: none has, in `start_seconds`.
        """
        try:
            await self._meet()
        except AttemptFailedError as problem:
            raise self._given_up(problem, _Effort()) from None

    async def answers(self, url: str) -> bool:
        """Whether a server is there at all: any status but a server's error will do."""
        try:
            async with asyncio.timeout(_PROBE_SECONDS):
                reply = await self._client.get(f"{url}/models", headers=self._headers())
            self._met = True
            return reply.status_code < 500
        except (self._httpx.HTTPError, TimeoutError):
            return False

    async def post(self, url: str, path: str, sent: Mapping[str, Any]) -> bytes:
        """One attempt: the body of a reply with status 200.

        Raises:
            AttemptFailedError: anything else.
        """
        httpx = self._httpx
        try:
            async with asyncio.timeout(self.settings.timeout_seconds):
                reply = await self._posted(f"{url}/{path}", sent)
        except (httpx.ConnectError, httpx.ConnectTimeout) as error:
            raise AttemptFailedError(
                FailureKind.SERVER_DOWN, type(error).__name__, server_at_fault=True, unconnected=True
            ) from None
        except (TimeoutError, httpx.TimeoutException):
            raise AttemptFailedError(
                FailureKind.TIMEOUT,
                f"no reply within {self.settings.timeout_seconds:g} seconds",
                server_at_fault=True,
                perhaps_paid=True,
            ) from None
        except (httpx.TransportError, httpx.DecodingError) as error:
            # Only its name: the text may quote what was sent.
            raise AttemptFailedError(
                FailureKind.SERVER_DOWN, type(error).__name__, server_at_fault=True, perhaps_paid=True
            ) from None
        raw = self._scrubbed(reply.body)
        if reply.status != 200:
            raise refusal(reply.status, httpx.Headers(reply.headers), raw.decode(errors="replace"))
        return raw

    async def _posted(self, url: str, sent: Mapping[str, Any]) -> Reply:
        content = _JSON.encode(sent).encode()
        if self._connections is None:
            headers = {"content-type": "application/json", **self._headers()}
            reply = await self._client.post(url, content=content, headers=headers)
            return Reply(reply.status_code, reply.headers.raw, reply.content)
        key = _key(self.settings).encode()
        return await self._connections.post(
            url, content, b"%bauthorization: Bearer %b\r\n" % (_TOLD, key) if key else _TOLD
        )

    async def models(self) -> Any:
        """What ``GET /models`` of the first replica that is up tells."""
        replica = await self._replicas.pick()
        reply = await self._client.get(f"{replica.url}/models", headers=self._headers())
        return reply.json() if reply.status_code == 200 else None

    async def aclose(self) -> None:
        """Whoever still waits gets an error. May be called twice."""
        self._closed = True
        await self._replicas.aclose()
        await self._client.aclose()

    async def _fly(
        self, request: CompletionRequest, row: Spent, role: str, cache: ReplyCache | None, key: bytes | None
    ) -> Completion:
        completion = await self._attempts(request, row)
        if completion.finish_reason == "length" and request.schema and self._bounds:
            # Half an object is none: once more, with lengths that fit.
            characters = bounds.room_for(request.max_tokens, completion.text)
            completion = await self._attempts(request, row, characters)
        same = self._sameness.setdefault(role, Sameness(role, self.name))
        row.repeated += same.seen(request.prompt, completion.text)
        if cache is not None and key is not None:
            cache.put(key, completion)
        return completion

    @property
    def _bounds(self) -> bool:
        return self.dialect.json_schema and self.dialect.bounds

    async def _attempts(
        self, request: CompletionRequest, row: Spent, characters: int | None = None
    ) -> Completion:
        effort = _Effort(characters=characters)
        try:
            async with asyncio.timeout(None) as effort.clock:
                while True:
                    try:
                        return await self._attempt(request, row, effort)
                    except AttemptFailedError as error:
                        await self._recover(error, effort)
        except AttemptFailedError as error:
            problem = error
        except TimeoutError:
            problem = effort.problem or AttemptFailedError(FailureKind.SERVER_DOWN, "no server is up")
        row.failures += 1
        raise self._given_up(problem, effort)

    async def _attempt(self, request: CompletionRequest, row: Spent, effort: _Effort) -> Completion:
        prompt, reply = protocol.most_prompt_tokens(request), request.max_tokens
        most = Most(money=self._prices.cost(prompt, reply), tokens=prompt + reply, requests=1)
        used: int | None = None
        admission = await self._governor.admit(prompt + reply)
        try:
            if self._closed:
                raise AttemptFailedError(FailureKind.SERVER_DOWN, "this endpoint is closed", again=False)
            effort.begin(self.settings.deadline_seconds)
            await self.spending.reserve(most)
            try:
                answer = await self._sent(request, row, effort, most)
            finally:
                self.spending.release(most)
            used = answer.prompt_tokens + answer.reply_tokens
        finally:
            self._governor.leave(admission, used)
        row.seconds += effort.seconds
        return answer.completion

    async def _sent(
        self, request: CompletionRequest, row: Spent, effort: _Effort, most: Most
    ) -> protocol.Answer:
        effort.dialect = dialect = self.dialect
        effort.last = replica = await self._replicas.pick(effort.last)
        sent = protocol.body(request, self.settings, dialect, characters=effort.characters)
        path = "chat/completions" if self.settings.kind == "chat" else "completions"
        row.sent += 1
        row.retries += effort.sent > 0
        effort.sent += 1
        replica.in_flight += 1
        began = time.perf_counter()
        try:
            raw = await self.post(replica.url, path, sent)
            answer = protocol.read(raw, request, enforced="response_format" in sent)
        except AttemptFailedError as error:
            row.perhaps += most.money if error.perhaps_paid else 0.0
            self._met |= not error.unconnected
            if error.server_at_fault and self._met:
                self._replicas.failed(replica)
            raise
        except asyncio.CancelledError:
            row.perhaps += most.money
            raise
        finally:
            replica.in_flight -= 1
        self._met = True
        self._replicas.succeeded(replica)
        self.spending.latencies.append(time.perf_counter() - began)
        row.requests += 1
        row.prompt_tokens += answer.prompt_tokens
        row.reply_tokens += answer.reply_tokens
        row.money += self._prices.cost(answer.prompt_tokens, answer.reply_tokens)
        return answer

    async def _recover(self, error: AttemptFailedError, effort: _Effort) -> None:
        """Wait until the next attempt, or raise the error if there is none."""
        if error.complaint:
            if effort.dialect != self.dialect:
                return  # another request has heard the same complaint
            if (plainer := self.dialect.without(error.complaint, self.settings)) is not None:
                self.dialect = plainer
                return
        effort.problem = error
        if error.unconnected and not self._met:
            await self._meet()
            return
        effort.failures += 1
        effort.malformed += error.kind is FailureKind.PARSE_ERROR and not error.server_at_fault
        if not error.again or self._closed or effort.failures >= self.settings.attempts:
            raise error
        if effort.malformed >= _MALFORMED_REPLIES:
            raise error
        pause = pause_after(effort.failures, error.asked_pause, first=self.settings.pause_seconds)
        if pause > effort.seconds_left:
            raise error
        if error.kind is FailureKind.RATE_LIMITED and error.asked_pause:
            self._governor.hold(error.asked_pause)
        await asyncio.sleep(pause)

    async def _meet(self) -> None:
        """Look for a first sign of any replica. One that goes away later is waited for much longer: whoever
        was never there is more likely at another address, or not started.

        Raises:
            AttemptFailedError: there is none, in the time that the endpoint has for it.
        """
        clock = asyncio.get_running_loop().time
        came, pause = clock(), self.settings.pause_seconds
        if self._patience is None:
            self._patience = came + self.settings.start_seconds
        async with self._looking:
            while True:
                left = self._patience - clock()
                if not self._met and self._in_vain <= came:  # else others have just looked, while we waited
                    await asyncio.gather(*map(self.answers, self._replicas.urls))
                if self._met:
                    return
                if left <= 0:
                    self._in_vain = max(self._in_vain, clock())
                    places = ", ".join(self._replicas.urls)
                    raise AttemptFailedError(
                        FailureKind.SERVER_DOWN, f"no connection to {places}", again=False, fatal=True
                    )
                await asyncio.sleep(min(pause, left))
                pause = min(2 * pause, _PROBE_SECONDS)

    def _given_up(self, problem: AttemptFailedError, effort: _Effort) -> EpisodeFailedError | EndpointError:
        if problem.fatal:
            advice = f"check its url, model and kind, and the key in ${self.settings.key_from}"
            if problem.kind is FailureKind.SERVER_DOWN:
                waited = f"{self.settings.start_seconds:g} s (start_seconds of the endpoint)"
                advice = f"nobody has answered there in {waited}: start the server, or check its url"
            return EndpointError(
                f"expected a completion by {self.settings.model!r} from endpoint {self.name!r}, "
                f"got {problem}; {advice}"
            )
        return EpisodeFailedError(
            problem.kind, f"endpoint {self.name!r}, {effort.sent} attempts, {effort.seconds:.1f} s: {problem}"
        )

    def _headers(self) -> dict[str, str]:
        key = _key(self.settings)
        return {"Authorization": f"Bearer {key}"} if key else {}

    def _scrubbed(self, raw: bytes) -> bytes:
        """Without the key, which some servers quote: it would end up in logs and run folders."""
        key = _key(self.settings).encode()
        return raw.replace(key, b"...") if key and key in raw else raw


@dataclass(slots=True)
class _Effort:
    """What has been tried for one request."""

    characters: int | None = None
    """That the reply may have, where it has been cut off before."""
    failures: int = 0
    malformed: int = 0
    sent: int = 0
    last: Replica | None = None
    problem: AttemptFailedError | None = None
    dialect: protocol.Dialect | None = None
    clock: asyncio.Timeout | None = None
    began: float = 0.0

    def begin(self, deadline: float) -> None:
        """The clock starts with the first attempt: waiting for one's turn is no failure of the server."""
        if not self.began:
            self.began = asyncio.get_running_loop().time()
            assert self.clock is not None
            self.clock.reschedule(self.began + deadline)

    @property
    def seconds(self) -> float:
        return asyncio.get_running_loop().time() - self.began if self.began else 0.0

    @property
    def seconds_left(self) -> float:
        end = self.clock.when() if self.clock is not None else None
        return float("inf") if end is None else end - asyncio.get_running_loop().time()


def check_settings(name: str, settings: EndpointConfig, *, in_money: bool = False) -> None:
    """Say what is wrong before anything starts, without ever quoting the key.

    Raises:
        ConfigError: the key is missing or cannot be one, or a budget in money has no prices to count with.
    """
    key = _key(settings)
    if not key and settings.key_from != DEFAULT_KEY:
        raise ConfigError(
            f"endpoint {name!r}: expected its API key in ${settings.key_from}, which is not set"
        )
    if not key.isascii() or not key.isprintable() or " " in key:
        raise ConfigError(
            f"endpoint {name!r}: the text in ${settings.key_from} cannot be an API key: "
            "expected plain characters without spaces"
        )
    if in_money and (settings.input_price is None or settings.output_price is None):
        raise ConfigError(
            f"endpoint {name!r}: budget.money needs its input_price and output_price; "
            "set them to 0 for a server of your own"
        )


def base_address(url: str) -> str:
    """
    >>> base_address("http://localhost:8000"), base_address("https://api.example.com/v1/chat/completions")
    ('http://localhost:8000/v1', 'https://api.example.com/v1')
    """
    plain = url.rstrip("/").removesuffix("/chat/completions").removesuffix("/completions")
    return plain if urlsplit(plain).path else f"{plain}/v1"


def _key(settings: EndpointConfig) -> str:
    """Read each time and kept nowhere."""
    return os.environ.get(settings.key_from, "").strip()
