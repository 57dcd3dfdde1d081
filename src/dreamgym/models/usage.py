"""Usage of endpoints by stage, role and endpoint (requests, tokens, seconds, money), and the budget.

Money is computed from the server's own token counts. A request that was sent and never answered may be billed
too: its upper bound is counted as `unconfirmed_money`, and the budget includes it.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from dreamgym.config import BudgetConfig
from dreamgym.errors import BudgetSpentError, StoreError
from dreamgym.files import write_text

FILE = "usage.json"
_stage: ContextVar[str] = ContextVar("stage", default="")
_SECONDS_BETWEEN_WRITES = 2.0
_MAX_LATENCIES = 4096
_UNLIMITED = BudgetConfig()


@contextmanager
def stage(name: str) -> Iterator[None]:
    """Count requests made within, also by tasks created there, under this stage."""
    token = _stage.set(name)
    try:
        yield
    finally:
        _stage.reset(token)


@dataclass(slots=True, kw_only=True)
class UsageRow:
    """Usage of one endpoint by one role in one stage."""

    requests: int = 0
    """Answered by the server."""
    sent: int = 0
    """All attempts, including retries and unanswered ones."""
    retries: int = 0
    failures: int = 0
    """Requests without a completion after all attempts."""
    cache_hits: int = 0
    shared: int = 0
    """Answered by an equal request that was already in flight."""
    prompt_tokens: int = 0
    reply_tokens: int = 0
    seconds: float = 0.0
    """From the first attempt to the reply, summed over answered requests."""
    money: float = 0.0
    unconfirmed_money: float = 0.0
    """Upper bound of what unanswered requests may have cost."""

    def add(self, other: UsageRow) -> None:
        for each in fields(UsageRow):
            setattr(self, each.name, getattr(self, each.name) + getattr(other, each.name))

    @property
    def calls(self) -> int:
        """All requested completions, whether they were sent or not."""
        return self.requests + self.cache_hits + self.shared + self.failures

    @property
    def hit_rate(self) -> float:
        return (self.cache_hits + self.shared) / max(1, self.calls)


@dataclass(slots=True, kw_only=True)
class Reservation:
    """An upper bound of what requests in flight can use."""

    money: float = 0.0
    tokens: int = 0
    requests: int = 0

    def add(self, other: Reservation, sign: int = 1) -> None:
        self.money += sign * other.money
        self.tokens += sign * other.tokens
        self.requests += sign * other.requests


RowKey = tuple[str, str, str]
"""(stage, role, endpoint)."""


@dataclass(slots=True)
class Usage:
    """Counts usage and enforces the budget. With a `file`, a resumed run continues the counts."""

    budget: BudgetConfig = field(default_factory=BudgetConfig)
    file: Path | None = None
    rows: dict[RowKey, UsageRow] = field(default_factory=dict)
    latencies: deque[float] = field(default_factory=lambda: deque(maxlen=_MAX_LATENCIES))
    _reserved: Reservation = field(default_factory=Reservation)
    _released: asyncio.Event = field(default_factory=asyncio.Event)
    _written: float = 0.0

    def __post_init__(self) -> None:
        if self.file is None or not self.file.exists():
            return
        try:
            for row in json.loads(self.file.read_text(encoding="utf-8"))["rows"]:
                key = (str(row.pop("stage")), str(row.pop("role")), str(row.pop("endpoint")))
                self.rows[key] = UsageRow(**row)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise StoreError(
                f"{self.file}: expected the usage of the run so far, {error!r}; remove it to count from 0"
            ) from None

    def row(self, role: str, endpoint: str) -> UsageRow:
        """The row of the current stage."""
        return self.rows.setdefault((_stage.get(), role, endpoint), UsageRow())

    def add(self, rows: Mapping[RowKey, UsageRow]) -> None:
        """Count what a worker used."""
        for key, row in rows.items():
            self.rows.setdefault(key, UsageRow()).add(row)

    def move(self, source: str, target: str) -> UsageRow:
        """Count what one stage used under another one; returns its sum."""
        moved = UsageRow()
        for key in [key for key in self.rows if key[0] == source]:
            row = self.rows.pop(key)
            moved.add(row)
            self.rows.setdefault((target, *key[1:]), UsageRow()).add(row)
        return moved

    @property
    def total(self) -> UsageRow:
        total = UsageRow()
        for row in self.rows.values():
            total.add(row)
        return total

    async def reserve(self, wanted: Reservation) -> None:
        """Reserve the upper bound of a request; return it with `release`.

        Waits while other requests in flight may turn out cheaper than reserved; `BudgetSpentError` if the
        request does not fit even without them.
        """
        while (problem := self._exceeded(wanted)) is not None:
            if not self._reserved.requests:
                raise BudgetSpentError(
                    f"{problem}; no more requests are sent. Results are saved: raise the budget to resume"
                )
            self._released.clear()
            await self._released.wait()
        self._reserved.add(wanted)

    def release(self, reserved: Reservation) -> None:
        self._reserved.add(reserved, -1)
        self._released.set()
        if self.file is not None and time.monotonic() - self._written > _SECONDS_BETWEEN_WRITES:
            self.save()

    def _exceeded(self, wanted: Reservation) -> str | None:
        """The first limit that the request might exceed."""
        budget, reserved = self.budget, self._reserved
        if budget == _UNLIMITED:
            return None
        used = self.total
        for name, limit, spent in (
            ("money", budget.money, used.money + used.unconfirmed_money),
            ("tokens", budget.tokens, used.prompt_tokens + used.reply_tokens),
            ("requests", budget.requests, used.sent),
        ):
            more = getattr(wanted, name)
            if limit is not None and spent + getattr(reserved, name) + more > limit:
                return (
                    f"budget.{name}={limit:g}: {spent:.6g} is spent, and the next request may need {more:.6g}"
                )
        return None

    def to_dict(self) -> dict[str, Any]:
        rows = [
            {"stage": stage, "role": role, "endpoint": endpoint, **asdict(row)}
            for (stage, role, endpoint), row in sorted(self.rows.items())
        ]
        return {"rows": rows, "hit_rate": round(self.total.hit_rate, 4), **self.percentiles()}

    def percentiles(self) -> dict[str, float]:
        """Seconds from sending to reply, over the newest requests."""
        known = sorted(self.latencies)
        if not known:
            return {}
        return {
            f"p{share}_seconds": round(known[min(len(known) - 1, len(known) * share // 100)], 4)
            for share in (50, 95)
        }

    def summary(self) -> str:
        """One line for a progress bar.

        >>> Usage().summary()
        '0 requests, 0% cached, 0 tokens, money 0.0000'
        """
        total = self.total
        tokens = total.prompt_tokens + total.reply_tokens
        return (
            f"{total.calls:,} requests, {total.hit_rate:.0%} cached, {tokens:,} tokens, "
            f"money {total.money + total.unconfirmed_money:.4f}"
        )

    def save(self) -> None:
        """Write the file atomically."""
        if self.file is None or not self.rows:
            return
        self._written = time.monotonic()
        write_text(self.file, json.dumps(self.to_dict(), indent=2) + "\n")
