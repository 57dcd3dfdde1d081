"""The heart of a local model: who waits joins the batch, every row gets a token, who is done leaves.

A step is one forward pass: one token for each row under way, and the whole new part of the prompt for each
row that has just come in. Rows come and go between steps. Nothing here knows of threads or event loops; the
caller runs `step` again and again and settles what it returns.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from dreamgym.errors import ConfigError, DreamGymError, EpisodeFailedError
from dreamgym.models.local.backends import Backend
from dreamgym.models.local.constrained_decoding import Branch, plant
from dreamgym.models.local.prefix_cache import PrefixCache
from dreamgym.models.local.sampling import SamplingParams, pick
from dreamgym.models.local.tokenization import TextCodec, Transcripts
from dreamgym.types import Completion, CompletionRequest, FailureKind

_NEW_TOKENS_PER_STEP = 4096
"""Of rows that come in together: enough to fill the machine, few enough to stay near its caches."""

_PATIENCE = 10
"""Failed steps that a row survives: enough to halve the largest batch down to one."""


@dataclass(slots=True, eq=False)
class PendingRequest:
    """Somebody who waits for a completion."""

    request: CompletionRequest
    cancelled: bool = False
    """Set by whoever gave up waiting; noticed before the next step."""
    waiter: Any = None
    """Whatever the caller needs to deliver the answer."""


@dataclass(slots=True, eq=False)
class _Row:
    ticket: PendingRequest
    tokens: list[int]
    prompt_size: int
    limit: int
    """The most tokens it may have, prompt included."""
    watched: frozenset[int]
    """Tokens after which it may be finished."""
    branch: Branch | None
    terminator: int
    """Ends a choice that is also the beginning of another."""
    logprobs: list[float] = field(default_factory=list)
    allowed: list[tuple[int, ...]] = field(default_factory=list)
    failures: int = 0
    """Steps that failed while it took part."""

    @property
    def request(self) -> CompletionRequest:
        return self.ticket.request

    @property
    def sampled(self) -> list[int]:
        return self.tokens[self.prompt_size :]


@dataclass(slots=True, kw_only=True)
class Meter:
    """What the engine has done since it was made."""

    requests: int = 0
    sampled_tokens: int = 0
    prompt_tokens: int = 0
    reused_tokens: int = 0
    """Of the prompt tokens, those whose keys and values were still there."""
    steps: int = 0
    restarts: int = 0
    """How often new weights made everything remembered worthless."""


Settled = tuple[PendingRequest, Completion | DreamGymError]


class Engine:
    def __init__(
        self,
        backend: Backend,
        codec: TextCodec,
        *,
        positions: int,
        closing: Iterable[int],
        max_batch: int,
        cache_bytes: int,
        fingerprint: Callable[[], object],
    ) -> None:
        """
        Args:
            positions: the most tokens a row may have.
            closing: tokens that end a completion (end of text, end of turn).
            cache_bytes: limit of what finished turns leave behind, and again of the batch under way.
            fingerprint: of the weights; whatever is remembered is dropped when it changes.
        """
        self.meter = Meter()
        self.transcripts = Transcripts(codec)
        self.store = PrefixCache(cache_bytes)
        self._backend = backend
        self._codec = codec
        self._positions = positions
        self._closing = tuple(dict.fromkeys(closing))
        self._max_batch = max_batch
        self._cache_bytes = cache_bytes
        self._fingerprint = fingerprint
        self._seen = fingerprint()
        self._new: deque[PendingRequest] = deque()
        self._waiting: deque[_Row] = deque()
        self._rows: list[_Row] = []
        self._wishes: SamplingParams | None = None
        self._settled: list[Settled] = []

    @property
    def idle(self) -> bool:
        return not (self._new or self._waiting or self._rows)

    def take(self, ticket: PendingRequest) -> None:
        self._new.append(ticket)

    def forget(self, conversation: str) -> None:
        self.transcripts.forget(conversation)
        self.store.take(conversation)

    def restart(self, backend: Backend | None = None) -> None:
        """Drops everything remembered; rows under way keep their tokens and are computed anew."""
        self.meter.restarts += 1
        self.store.clear()
        self._waiting.extendleft(reversed(self._rows))
        self._let_go(range(len(self._rows)))
        self._backend = backend or self._backend
        self._backend.refresh()
        self._seen = self._fingerprint()

    def abandon(self, error: DreamGymError) -> list[Settled]:
        """Everybody gets this error."""
        tickets = [*self._new, *(row.ticket for row in (*self._waiting, *self._rows))]
        self._new.clear()
        self._waiting.clear()
        self._let_go(range(len(self._rows)))
        return [(ticket, error) for ticket in tickets]

    @torch.inference_mode()
    def step(self) -> list[Settled]:
        """Computes one token for every row there is room for; returns who is served, or failed."""
        if self._new and self._fingerprint() != self._seen:
            self.restart()
        self._drop_cancelled()
        while self._new:
            self._prepare(self._new.popleft())
        try:
            self._admit()
            if self._rows:
                logits = self._backend.step([row.tokens for row in self._rows])
                self._sample(logits.float())
                self.meter.steps += 1
        except Exception as error:
            self._isolate(error)
        settled, self._settled = self._settled, []
        return settled

    def _drop_cancelled(self) -> None:
        if any(row.ticket.cancelled for row in (*self._waiting, *self._rows)):
            self._waiting = deque(row for row in self._waiting if not row.ticket.cancelled)
            self._let_go([place for place, row in enumerate(self._rows) if row.ticket.cancelled])

    def _prepare(self, ticket: PendingRequest) -> None:
        if ticket.cancelled:
            return
        try:
            self._waiting.append(self._row(ticket))
            self.meter.requests += 1
        except DreamGymError as error:
            self._settled.append((ticket, error))
        except Exception as error:  # a tokenizer's, of whatever kind
            self._settled.append((ticket, _crash(error)))

    def _row(self, ticket: PendingRequest) -> _Row:
        request = ticket.request
        if request.prompt_token_ids is not None:
            tokens = list(request.prompt_token_ids)
        else:
            tokens = self.transcripts.tokens_of(request.prompt, request.conversation)
        branch, longest = self._plant(request)
        needed = len(tokens) + (longest if branch is not None else 1)
        if needed > self._positions:
            raise EpisodeFailedError(
                FailureKind.BUDGET,
                f"the model reads at most {self._positions} tokens, the prompt has {len(tokens)}"
                f"{' and its longest choice more' if branch is not None else ''}: shorten the history",
            )
        watched = frozenset(self._closing)
        if request.stop and branch is None:
            watched |= self._codec.watched(request.stop)
        return _Row(
            ticket=ticket,
            tokens=tokens,
            prompt_size=len(tokens),
            limit=needed if branch is not None else min(len(tokens) + request.max_tokens, self._positions),
            watched=watched,
            branch=branch,
            terminator=self._terminator(request, branch) if branch is not None else -1,
        )

    def _plant(self, request: CompletionRequest) -> tuple[Branch | None, int]:
        """The choices of a request, and the most tokens that one of them takes."""
        if request.choices is None:
            return None, 0
        tokenised = [(choice, self._codec.choice(choice)) for choice in request.choices]
        root = plant(tokenised)
        return root, max(len(tokens) for _, tokens in tokenised) + 1

    def _terminator(self, request: CompletionRequest, branch: Branch) -> int:
        if request.stop and (tokens := self._codec.choice(request.stop[0])):
            return tokens[0]
        if self._closing:
            return self._closing[0]
        if branch.needs_terminator:
            raise ConfigError(
                "this model has no token that ends a text, so a choice that begins another could not end: "
                "give a stop string"
            )
        return -1

    def _admit(self) -> None:
        """Lets in who waits, in order, as far as the batch and its memory go."""
        chosen: list[_Row] = []
        new_tokens = 0
        columns = max((row.limit for row in self._rows), default=0)
        while self._waiting:
            row = self._waiting[0]
            saved = self.store.get(row.request.conversation)
            new_tokens += len(row.tokens) - (len(saved.tokens) if saved is not None else 0)
            size = len(self._rows) + len(chosen) + 1
            columns = max(columns, row.limit)
            crowded = (
                size > self._max_batch
                or new_tokens > _NEW_TOKENS_PER_STEP
                or size * columns * self._backend.bytes_per_token > self._cache_bytes
            )
            if crowded and (chosen or self._rows):
                break
            chosen.append(self._waiting.popleft())
        if chosen:
            entries = [(row.tokens, self.store.get(row.request.conversation)) for row in chosen]
            self._rows += chosen
            self._wishes = None
            reused = self._backend.enter(entries, columns)
            self.meter.prompt_tokens += sum(len(row.tokens) for row in chosen)
            self.meter.reused_tokens += sum(reused)

    def _sample(self, logits: Tensor) -> None:
        """Gives every row its next token and lets finished ones go."""
        if self._wishes is None:
            requests = [row.request for row in self._rows]
            self._wishes = SamplingParams.of(
                [request.seed for request in requests],
                [request.temperature for request in requests],
                [request.top_p for request in requests],
                logits.device,
            )
        positions = np.array([len(row.tokens) for row in self._rows], dtype=np.uint64)
        chosen = pick(self._constrained(logits), self._wishes, positions)
        logprobs = logits.log_softmax(-1).gather(1, chosen[:, None])[:, 0]
        self.meter.sampled_tokens += len(self._rows)
        gone = []
        for place, (row, token, logprob) in enumerate(
            zip(self._rows, chosen.tolist(), logprobs.tolist(), strict=True)
        ):
            if not logprob > float("-inf"):  # not a number, or no chance at all
                diverged = "the model gives no finite probabilities: have its weights diverged?"
                self._settled.append((row.ticket, EpisodeFailedError(FailureKind.CRASHED, diverged)))
                self._backend.scrub(place)
                gone.append(place)
                continue
            row.tokens.append(token)
            row.logprobs.append(logprob)
            if row.branch is not None:
                row.allowed.append(tuple(row.branch.allowed(row.terminator)))
                row.branch = row.branch.after(token)
                done = row.branch.is_leaf
            else:
                done = len(row.tokens) >= row.limit or (token in row.watched and self._is_done(row, token))
            if done:
                self._finish(place)
                gone.append(place)
        if gone:
            self._let_go(gone)

    def _constrained(self, logits: Tensor) -> Tensor:
        """-inf for tokens that would leave a row's choices."""
        places: list[int] = []
        tokens: list[int] = []
        for place, row in enumerate(self._rows):
            if row.branch is not None:
                allowed = row.branch.allowed(row.terminator)
                places += [place] * len(allowed)
                tokens += allowed
        if not places:
            return logits
        forbidden = torch.zeros_like(logits)
        forbidden[sorted(set(places))] = -torch.inf
        forbidden[places, tokens] = 0.0
        return logits + forbidden

    def _is_done(self, row: _Row, token: int) -> bool:
        if token in self._closing:
            return True
        text = self._text(row)
        return any(stop in text for stop in row.request.stop)

    def _text(self, row: _Row) -> str:
        return self._codec.decode(row.sampled, after=row.tokens[row.prompt_size - 1])

    def _finish(self, place: int) -> None:
        row = self._rows[place]
        request = row.request
        reason: Literal["stop", "length", "choice"]
        if row.branch is not None:
            text, reason = str(row.branch.choice), "choice"
        else:
            text = self._text(row)
            ends = [text.find(stop) for stop in request.stop if stop in text]
            stopped = bool(ends) or row.tokens[-1] in self._closing
            text, reason = text[: min(ends, default=None)], "stop" if stopped else "length"
        completion = Completion(
            text=text,
            token_ids=tuple(row.sampled),
            logprobs=tuple(row.logprobs),
            prompt_token_ids=tuple(row.tokens[: row.prompt_size]),
            allowed=tuple(row.allowed),
            finish_reason=reason,
        )
        self._settled.append((row.ticket, completion))
        if request.conversation is not None:
            self._remember(place, request.conversation)

    def _remember(self, place: int, conversation: str) -> None:
        row = self._rows[place]
        prompt = row.tokens[: row.prompt_size]
        self.transcripts.record(conversation, row.request.prompt, prompt, row.sampled)
        saved = self._backend.save(place, row.tokens, self.store.take(conversation))
        if saved is not None:
            self.store.put(conversation, saved)

    def _let_go(self, places: Sequence[int]) -> None:
        """Rows move up into the places of those that leave."""
        order = list(range(len(self._rows)))
        for place in reversed(places):
            order[place] = order[-1]
            order.pop()
        self._rows = [self._rows[old] for old in order]
        self._wishes = None
        self._backend.keep(order)

    def _isolate(self, error: Exception) -> None:
        """A step failed: runs each row alone, fails those that fail again, lets the others start over."""
        rows = list(self._rows)
        self._let_go(range(len(rows)))
        for place in range(len(rows)):
            self._backend.scrub(place)
        failed = 0
        for row in rows:
            row.failures += 1
            try:
                if row.failures > _PATIENCE:
                    raise error
                self._backend.enter([(row.tokens, None)], row.limit)
                self._backend.step([row.tokens])
                self._waiting.append(row)
            except Exception as own_error:
                failed += 1
                self._settled.append((row.ticket, _crash(own_error)))
            self._backend.keep([])
        if not failed:  # together they were too many
            self._max_batch = max(1, len(rows) // 2)


def _crash(error: Exception) -> EpisodeFailedError:
    return EpisodeFailedError(FailureKind.CRASHED, f"the model failed: {type(error).__name__}: {error}")
