"""JSON over HTTP with aiohttp: limits, typed failures and retry delays, shared by all clients of servers.

The API key goes to the configured server only (no redirects, no cookies), and is removed from everything that
the server sends back.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
from collections.abc import Mapping
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from functools import lru_cache
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

from dreamgym.errors import MissingExtraError
from dreamgym.types import FailureKind

MAX_BODY = 64 << 20
_CONNECT_SECONDS = 10.0
_MAX_BACKOFF = 30.0
_MAX_SHOWN = 200
"""Characters of a server's error message that are quoted."""
_MAX_ERROR_BODY = 4000
_OVERLOADED = frozenset({429, 529})
_TRANSIENT = frozenset({408, 409, 425, 500, 502, 503, 504})
_CONTEXT_EXCEEDED = (
    *("context_length_exceeded", "maximum context length", "greater than max_model_len"),
    "exceeds the available context",
)
"""Words of OpenAI, vLLM (for the prompt, for max_tokens) and llama.cpp."""
_HEADERS = {
    "Accept": "application/json",
    "Accept-Encoding": "identity",
    "Content-Type": "application/json",
    "User-Agent": "dreamgym",
}
_JSON = json.JSONEncoder(separators=(",", ":"), allow_nan=False)
"""ASCII only: a lone surrogate, which a model may write, has no UTF-8 form."""


class RequestFailedError(Exception):
    """One attempt at a request failed. Clients turn it into an error of `dreamgym.errors`."""

    def __init__(
        self,
        kind: FailureKind,
        message: str,
        *,
        retry: bool = True,
        retry_after: float | None = None,
        maybe_billed: bool = False,
        fatal: bool = False,
        complaint: str = "",
        not_connected: bool = False,
        empty_reply: bool = False,
    ) -> None:
        """
        Args:
            retry: whether another attempt may succeed.
            retry_after: seconds that the server asks to wait.
            maybe_billed: the request was sent and no readable reply came back.
            fatal: a setting is wrong (key, model, address), so every other request fails too.
            complaint: the server's message about the request itself (status 4xx).
            not_connected: no connection was established.
            empty_reply: the reply is well-formed and contains no text.
        """
        super().__init__(message)
        self.kind = kind
        self.retry = retry
        self.retry_after = retry_after
        self.maybe_billed = maybe_billed
        self.fatal = fatal
        self.complaint = complaint
        self.not_connected = not_connected
        self.empty_reply = empty_reply


class HttpClient:
    """A pool of connections to one server."""

    def __init__(self, url: str, *, max_connections: int = 100) -> None:
        """`url` is any address on the server; it decides whether a proxy of the environment is used."""
        try:
            import aiohttp
        except ImportError:
            raise MissingExtraError("an HTTP endpoint", "endpoint") from None
        self._aiohttp = aiohttp
        self._max_connections = max_connections
        self._proxy = _proxy_for(url)
        self._session: Any = None
        self._closed = False

    async def post(self, url: str, payload: Mapping[str, Any], *, key: str = "", seconds: float) -> Any:
        """The decoded JSON of a reply with status 200; anything else is a `RequestFailedError`."""
        return decode_json(await self.send(url, payload, key=key, seconds=seconds), key)

    async def send(self, url: str, payload: Mapping[str, Any], *, key: str = "", seconds: float) -> bytes:
        """The body of a reply with status 200, which need not be JSON."""
        status, headers, body = await self._request("POST", url, _JSON.encode(payload).encode(), key, seconds)
        if status != 200:
            raise failure_of_status(status, headers, body, key)
        return body

    async def get(self, url: str, *, key: str = "", seconds: float) -> tuple[int, Any]:
        """The status, and the decoded JSON of a reply with status 200 (None if it is not JSON)."""
        status, _, body = await self._request("GET", url, None, key, seconds)
        try:
            return status, decode_json(body, key) if status == 200 else None
        except RequestFailedError:
            return status, None

    async def aclose(self) -> None:
        """Pending requests fail. May be called twice."""
        self._closed = True
        if self._session is not None:
            await self._session.close()

    async def _request(
        self, method: str, url: str, data: bytes | None, key: str, seconds: float
    ) -> tuple[int, Mapping[str, str], bytes]:
        aiohttp = self._aiohttp
        if self._closed:
            raise RequestFailedError(FailureKind.SERVER_DOWN, "the client is closed", retry=False)
        if self._session is None:
            self._session = _make_session(aiohttp, self._max_connections)
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        try:
            async with (
                asyncio.timeout(seconds),
                self._session.request(
                    method, url, data=data, headers=headers, allow_redirects=False, proxy=self._proxy
                ) as reply,
            ):
                return reply.status, reply.headers, await _read(reply)
        except aiohttp.ClientConnectorCertificateError as error:
            origin = "{0.scheme}://{0.netloc}".format(urlsplit(url))
            reason = getattr(error.certificate_error, "verify_message", "") or "verification failed"
            raise RequestFailedError(
                FailureKind.SERVER_DOWN,
                f"the TLS certificate of {origin} was not accepted ({reason}); to trust it, add its "
                "issuer to the file in $SSL_CERT_FILE",
                retry=False,
                fatal=True,
            ) from None
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
            raise RequestFailedError(
                FailureKind.SERVER_DOWN, _connect_problem(error), not_connected=True
            ) from None
        except TimeoutError:
            raise RequestFailedError(
                FailureKind.TIMEOUT, f"no reply within {seconds:g} seconds", maybe_billed=True
            ) from None
        except (aiohttp.ClientError, ConnectionError, ValueError, RuntimeError) as error:
            # Only its type: the text may quote what was sent.
            raise RequestFailedError(
                FailureKind.SERVER_DOWN,
                f"the connection broke or the reply is not HTTP ({type(error).__name__})",
                maybe_billed=True,
            ) from None


def _make_session(aiohttp: Any, max_connections: int) -> Any:
    class Connector(aiohttp.TCPConnector):  # type: ignore[misc]
        async def _get(self, *args: Any) -> Any:
            # aiohttp would take bytes that arrived on an idle connection as the reply to the next request.
            while (connection := await super()._get(*args)) is not None:
                if not connection.protocol.should_close:
                    return connection
                connection.close()
            return None

    return aiohttp.ClientSession(
        connector=Connector(limit=max_connections),
        cookie_jar=aiohttp.DummyCookieJar(),
        headers=_HEADERS,
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_SECONDS),
        auto_decompress=False,
    )


async def _read(reply: Any) -> bytes:
    if reply.headers.get("Content-Encoding", "identity") != "identity":
        # Not requested: a small compressed body may expand to a huge one.
        raise RequestFailedError(
            FailureKind.SERVER_DOWN, "the reply is compressed, which was not requested", maybe_billed=True
        )
    body = bytearray()
    async for chunk in reply.content.iter_any():
        body += chunk
        if len(body) > MAX_BODY:
            raise RequestFailedError(
                FailureKind.SERVER_DOWN, f"the reply has more than {MAX_BODY} bytes", maybe_billed=True
            )
    return bytes(body)


def _proxy_for(url: str) -> str | None:
    """The proxy that the environment names for this address (HTTP_PROXY, HTTPS_PROXY, NO_PROXY)."""
    address = urlsplit(url)
    if proxy_bypass(address.hostname or ""):
        return None
    return getproxies().get(address.scheme)


def _connect_problem(error: Any) -> str:
    cause = getattr(error, "os_error", None)
    number = getattr(cause, "errno", None) or 0
    reason = os.strerror(number) if number > 0 else getattr(cause, "strerror", None)
    reason = reason or type(cause or error).__name__
    return f"connection failed: {reason}"


def decode_json(body: bytes, secret: str = "") -> Any:
    """Strict JSON (no duplicate keys, NaN or Infinity), without the secret.

    >>> decode_json(rb'{"text": "key s\\u006b-1"}', "sk-1")
    {'text': 'key ...'}
    """
    try:
        value = json.loads(body, object_pairs_hook=_unique_keys, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        reason = str(error) if isinstance(error, _StrictJsonError) else "not valid JSON"
        raise RequestFailedError(
            FailureKind.PARSE_ERROR, f"malformed reply: {reason}, in {len(body)} bytes", maybe_billed=True
        ) from None
    return _scrub_value(value, secret) if secret else value


class _StrictJsonError(ValueError):
    """Valid for `json`, refused here. Never leaves this module."""


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise _StrictJsonError("a key appears twice in one object")
    return found


def _refuse_constant(name: str) -> Any:
    raise _StrictJsonError(f"{name} is not a JSON number")


def _scrub_value(value: Any, secret: str) -> Any:
    if isinstance(value, str):
        return scrub(value, secret)
    if isinstance(value, list):
        return [_scrub_value(each, secret) for each in value]
    if isinstance(value, dict):
        return {scrub(name, secret): _scrub_value(each, secret) for name, each in value.items()}
    return value


def scrub(text: str, secret: str) -> str:
    r"""The text without the secret, also where a JSON or URL escape hides it.

    >>> scrub(r'{"error": "bad key s\u006b\/1"}', "sk/1")
    '{"error": "bad key ..."}'
    """
    if not secret:
        return text
    text = text.replace(secret, "...")
    return _escaped(secret).sub("...", text) if "\\" in text or "%" in text else text


@lru_cache(maxsize=8)
def _escaped(secret: str) -> re.Pattern[str]:
    forms = [
        rf"(?:\\{{0,8}}{re.escape(letter)}|\\{{1,8}}u00{ord(letter):02x}|%{ord(letter):02x})"
        for letter in secret
    ]
    return re.compile("".join(forms), re.IGNORECASE)


def _error_message(body: bytes, secret: str) -> str:
    """The message in an error's JSON, or the whole text if there is none; without the secret."""
    try:
        found = decode_json(body, secret)["error"]["message"]
    except (RequestFailedError, KeyError, TypeError):
        found = body[:_MAX_ERROR_BODY].decode(errors="replace")
    return scrub(str(found), secret)


def failure_of_status(
    status: int, headers: Mapping[str, str], body: bytes, secret: str = ""
) -> RequestFailedError:
    """What a status other than 200 means."""
    text = scrub(body[:_MAX_ERROR_BODY].decode(errors="replace"), secret)
    shown = f"status {status}: {_error_message(body, secret)[:_MAX_SHOWN]!r}"
    if status in _OVERLOADED:
        return RequestFailedError(FailureKind.RATE_LIMITED, shown, retry_after=retry_after(headers))
    if status in (401, 403):
        shown = f"status {status}: the server refused the API key"
        return RequestFailedError(FailureKind.REFUSED, shown, retry=False, fatal=True)
    if status in (404, 405):
        return RequestFailedError(FailureKind.REFUSED, shown, retry=False, fatal=True)
    if status in _TRANSIENT or status >= 500:
        return RequestFailedError(FailureKind.SERVER_DOWN, shown, retry_after=retry_after(headers))
    if any(words in text for words in _CONTEXT_EXCEEDED):
        return RequestFailedError(FailureKind.BUDGET, shown, retry=False)
    return RequestFailedError(FailureKind.REFUSED, shown, retry=False, complaint=text)


def retry_after(headers: Mapping[str, str], *, now: datetime | None = None) -> float | None:
    """Seconds to wait, from ``Retry-After`` (seconds or a date) or ``retry-after-ms``.

    >>> retry_after({"retry-after": "2.5"}), retry_after({"retry-after": "soon"})
    (2.5, None)
    >>> noon = datetime(2026, 11, 16, 12, tzinfo=UTC)
    >>> retry_after({"retry-after": "Mon, 16 Nov 2026 12:00:30 GMT"}, now=noon)
    30.0
    """
    for name, unit in (("retry-after-ms", 1000.0), ("retry-after", 1.0)):
        value = headers.get(name, "").strip()
        if value and value.replace(".", "", 1).isdecimal():
            return float(value) / unit
    try:
        until = parsedate_to_datetime(headers.get("retry-after", ""))
        if until.tzinfo is None:
            until = until.replace(tzinfo=UTC)
        return max(0.0, (until - (now or datetime.now(UTC))).total_seconds())
    except (TypeError, ValueError, OverflowError):
        return None


def retry_delay(failures: int, requested: float | None, *, first: float) -> float:
    """Seconds before the next attempt: exponential backoff with jitter, at least what the server requested.
    `first` is the longest delay after one failure."""
    backoff = min(_MAX_BACKOFF, first * 2.0 ** (failures - 1)) * random.uniform(0.5, 1.0)
    return backoff if requested is None else requested + 0.1 * backoff
