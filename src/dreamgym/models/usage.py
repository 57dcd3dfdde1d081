"""What endpoints have cost so far, by stage, role and endpoint, and the budget that it must stay within.

Money is what the server's own counts of tokens come to. A request that was sent and never answered may be on
the bill too: it is counted apart, at the most it can cost, and the budget counts it in.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from dreamgym.config import BudgetConfig, EndpointConfig
from dreamgym.errors import BudgetSpentError, StoreError
from dreamgym.files import write_text

FILE = "spending.json"
_stage: ContextVar[str] = ContextVar("stage", default="")
_BETWEEN_WRITES = 1.0
_LATENCIES = 4096


@contextmanager
def stage(name: str) -> Iterator[None]:
    """What is asked within, also by tasks that begin there, is counted under this stage."""
    token = _stage.set(name)
    try:
        yield
    finally:
        _stage.reset(token)


@dataclass(slots=True, kw_only=True)
class Spent:
    """What one role has asked of one endpoint in one stage."""

    requests: int = 0
    """Answered by the server."""
    sent: int = 0
    """With those that were not answered, and retries."""
    retries: int = 0
    failures: int = 0
    """Requests given up."""
    cache_hits: int = 0
    shared: int = 0
    """Answered by an equal request that was in flight already."""
    repeated: int = 0
    """Answered with the very text of the answer before, which was to another question."""
    prompt_tokens: int = 0
    reply_tokens: int = 0
    seconds: float = 0.0
    """From first sending to reply, of answered requests, added up."""
    money: float = 0.0
    perhaps: float = 0.0
    """The most that requests without an answer may have cost beside."""

    def add(self, other: Spent) -> None:
        for each in fields(Spent):
            setattr(self, each.name, getattr(self, each.name) + getattr(other, each.name))

    @property
    def asked(self) -> int:
        """By whoever wanted a completion, in all."""
        return self.requests + self.cache_hits + self.shared + self.failures

    @property
    def hit_rate(self) -> float:
        return (self.cache_hits + self.shared) / max(1, self.asked)


@dataclass(frozen=True, slots=True, kw_only=True)
class Most:
    """The most that something can cost."""

    money: float = 0.0
    tokens: int = 0
    requests: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Prices:
    """Money per token."""

    prompt: float = 0.0
    reply: float = 0.0

    @classmethod
    def of(cls, settings: EndpointConfig) -> Prices:
        return cls(
            prompt=(settings.input_price or 0.0) / 1e6,
            reply=(settings.output_price or 0.0) / 1e6,
        )

    def cost(self, prompt_tokens: int, reply_tokens: int) -> float:
        return prompt_tokens * self.prompt + reply_tokens * self.reply


@dataclass(slots=True)
class _Held:
    money: float = 0.0
    tokens: int = 0
    requests: int = 0


Place = tuple[str, str, str]
"""(stage, role, endpoint)."""


@dataclass(slots=True)
class Spending:
    """Counts, and says no in time. Where `file` is given, a run that goes on also goes on counting."""

    budget: BudgetConfig = field(default_factory=BudgetConfig)
    file: Path | None = None
    rows: dict[Place, Spent] = field(default_factory=dict)
    latencies: deque[float] = field(default_factory=lambda: deque(maxlen=_LATENCIES))
    _held: _Held = field(default_factory=_Held)
    _freed: asyncio.Event = field(default_factory=asyncio.Event)
    _written: float = 0.0

    def __post_init__(self) -> None:
        """
        Raises:
            StoreError: the file is there and cannot be read: without it the budget would begin anew.
        """
        if self.file is None or not self.file.exists():
            return
        try:
            for row in json.loads(self.file.read_text(encoding="utf-8"))["rows"]:
                place = (str(row.pop("stage")), str(row.pop("role")), str(row.pop("endpoint")))
                self.rows[place] = Spent(**row)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise StoreError(
                f"{self.file}: expected what was spent so far, {error!r}; remove it to count from 0"
            ) from None

    def row(self, role: str, endpoint: str) -> Spent:
        """Where to count what is asked now."""
        return self.rows.setdefault((_stage.get(), role, endpoint), Spent())

    @property
    def total(self) -> Spent:
        total = Spent()
        for row in self.rows.values():
            total.add(row)
        return total

    async def reserve(self, most: Most) -> None:
        """Hold back the most that a request can cost; give it back with `release`.

        While other requests are under way that may turn out cheaper, it waits for them.

        Raises:
            BudgetSpentError: not even then would it fit.
        """
        while (short := self._short(most)) is not None:
            if not self._held.requests:
                raise BudgetSpentError(
                    f"{short}; nothing more is asked. What was done is kept: raise the budget to go on"
                )
            self._freed.clear()
            await self._freed.wait()
        held = self._held
        held.money += most.money
        held.tokens += most.tokens
        held.requests += most.requests

    def release(self, most: Most) -> None:
        held = self._held
        held.money -= most.money
        held.tokens -= most.tokens
        held.requests -= most.requests
        self._freed.set()
        if self.file is not None and time.monotonic() - self._written > _BETWEEN_WRITES:
            self.save()

    def _short(self, most: Most) -> str | None:
        budget = self.budget
        if budget == _UNLIMITED:
            return None
        spent, held = self.total, self._held
        for name, limit, used, wanted in (
            ("money", budget.money, spent.money + spent.perhaps, held.money + most.money),
            ("tokens", budget.tokens, spent.prompt_tokens + spent.reply_tokens, held.tokens + most.tokens),
            ("requests", budget.requests, spent.sent, held.requests + most.requests),
        ):
            if limit is not None and used + wanted > limit:
                return (
                    f"budget.{name}={limit:g}: {used:.6g} is spent, "
                    f"and the next request may take {getattr(most, name):.6g}"
                )
        return None

    def to_dict(self) -> dict[str, Any]:
        rows = [
            {"stage": stage, "role": role, "endpoint": endpoint, **asdict(row)}
            for (stage, role, endpoint), row in sorted(self.rows.items())
        ]
        return {"rows": rows, "hit_rate": round(self.total.hit_rate, 4), **self.percentiles()}

    def percentiles(self) -> dict[str, float]:
        """Seconds from sending to reply, of the newest requests."""
        known = sorted(self.latencies)
        if not known:
            return {}
        return {
            f"p{share}_seconds": round(known[min(len(known) - 1, len(known) * share // 100)], 4)
            for share in (50, 95)
        }

    def line(self) -> str:
        """For a progress bar.

        >>> Spending().line()
        '0 asked, 0% from cache, 0 tokens, money 0.0000'
        """
        total = self.total
        tokens = total.prompt_tokens + total.reply_tokens
        return (
            f"{total.asked:,} asked, {total.hit_rate:.0%} from cache, {tokens:,} tokens, "
            f"money {total.money + total.perhaps:.4f}"
        )

    def save(self) -> None:
        """Whole or not at all."""
        if self.file is None or not self.rows:
            return
        self._written = time.monotonic()
        write_text(self.file, json.dumps(self.to_dict(), indent=2) + "\n")


_UNLIMITED = BudgetConfig()
