"""What goes wrong between us and a server, whether to try again, and when."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime

from dreamgym.types import FailureKind

_LONGEST_PAUSE = 30.0
_LONGEST_SHOWN = 200
"""Characters of a server's own words in a message."""
_LONGEST_COMPLAINT = 4000
_OVERLOADED = frozenset({429, 529})
_TOO_LONG = (
    *("context_length_exceeded", "maximum context length", "greater than max_model_len"),
    "exceeds the available context",
)
"""How OpenAI, vLLM (of a prompt, of max_tokens) and llama.cpp say that it is more than the model reads."""
_PASSING = frozenset({408, 409, 425, 500, 502, 503, 504})


class AttemptFailedError(Exception):
    """One attempt at a request came to nothing. Never leaves this package."""

    def __init__(
        self,
        kind: FailureKind,
        message: str,
        *,
        again: bool = True,
        asked_pause: float | None = None,
        server_at_fault: bool = False,
        perhaps_paid: bool = False,
        fatal: bool = False,
        complaint: str = "",
        unconnected: bool = False,
    ) -> None:
        """
        Args:
            again: whether another attempt may help.
            asked_pause: seconds that the server asks for, where it does.
            server_at_fault: whether it speaks against this replica.
            perhaps_paid: it was sent and nothing readable came back, so it may be on the bill.
            fatal: a setting is wrong (key, model, address): every other request will fail too.
            complaint: what the server says is wrong with the request itself.
            unconnected: nobody took the call.
        """
        super().__init__(message)
        self.kind = kind
        self.again = again
        self.asked_pause = asked_pause
        self.server_at_fault = server_at_fault
        self.perhaps_paid = perhaps_paid
        self.fatal = fatal
        self.complaint = complaint
        self.unconnected = unconnected


def refusal(status: int, headers: Mapping[str, str], text: str) -> AttemptFailedError:
    """What a reply other than 200 means.

    Args:
        text: what the server says about it, without any secret.
    """
    told = f"status {status}: {_said(text)[:_LONGEST_SHOWN]!r}"
    if status in _OVERLOADED:
        return AttemptFailedError(FailureKind.RATE_LIMITED, told, asked_pause=asked_pause(headers))
    if status in (401, 403):  # such bodies like to quote the key
        return AttemptFailedError(
            FailureKind.REFUSED, f"status {status}: the key was refused", again=False, fatal=True
        )
    if status in (404, 405):
        return AttemptFailedError(FailureKind.REFUSED, told, again=False, fatal=True)
    if status in _PASSING or status >= 500:
        return AttemptFailedError(
            FailureKind.SERVER_DOWN, told, asked_pause=asked_pause(headers), server_at_fault=True
        )
    if any(sign in text for sign in _TOO_LONG):
        return AttemptFailedError(FailureKind.BUDGET, told, again=False)
    return AttemptFailedError(FailureKind.REFUSED, told, again=False, complaint=text[:_LONGEST_COMPLAINT])


def _said(text: str) -> str:
    """The message in an error's JSON, or all of it where there is none."""
    try:
        return str(json.loads(text)["error"]["message"])
    except (ValueError, KeyError, TypeError, RecursionError):
        return text


def asked_pause(headers: Mapping[str, str], *, now: datetime | None = None) -> float | None:
    """Seconds that a server asks to wait, from ``Retry-After`` (seconds or a date) or ``retry-after-ms``.

    >>> asked_pause({"retry-after": "2.5"}), asked_pause({"retry-after": "soon"})
    (2.5, None)
    >>> noon = datetime(2026, 11, 16, 12, tzinfo=UTC)
    >>> asked_pause({"retry-after": "Mon, 16 Nov 2026 12:00:30 GMT"}, now=noon)
    30.0
    """
    for name, unit in (("retry-after-ms", 1000.0), ("retry-after", 1.0)):
        value = headers.get(name, "").strip()
        if value and value.replace(".", "", 1).isdecimal():
            return float(value) / unit
    try:
        until = parsedate_to_datetime(headers.get("retry-after", ""))
    except (TypeError, ValueError):
        return None
    if until.tzinfo is None:
        until = until.replace(tzinfo=UTC)
    return max(0.0, (until - (now or datetime.now(UTC))).total_seconds())


def pause_after(failures: int, asked: float | None, *, first: float) -> float:
    """Seconds before the next attempt: what the server asks for, else doubling; never all at the same time.

    Args:
        failures: attempts that have failed so far, at least 1.
        first: the longest pause after one failure.
    """
    own = min(_LONGEST_PAUSE, first * 2.0 ** (failures - 1)) * random.uniform(0.5, 1.0)
    return own if asked is None else asked + 0.1 * own
