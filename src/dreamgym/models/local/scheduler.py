"""Continuous batching: requests join and leave the batch between decoding steps.

A step is one forward pass: one token for each decoding row, and the uncached part of the prompt for each row
that has just joined. Nothing here knows of threads or event loops; the caller runs `step` repeatedly and
delivers what it returns.
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
from dreamgym.models.local.kv_cache import PrefixCache
from dreamgym.models.local.tokens import (
    SamplingParams,
    TextCodec,
    TokenHistory,
    TrieNode,
    build_trie,
    sample_tokens,
)
from dreamgym.types import Completion, CompletionRequest, FailureKind

_NEW_TOKENS_PER_STEP = 4096
"""Prefill tokens of one step: enough to fill the processor, few enough for its caches."""

_MAX_FAILED_STEPS = 10
"""Failed steps after which a row fails: enough to halve the largest batch down to one."""


@dataclass(slots=True, eq=False)
class PendingRequest:
    """A request whose caller waits for its completion."""

    request: CompletionRequest
    cancelled: bool = False
    """Set by the caller when it stops waiting; read before the next step."""
    waiter: Any = None
    """What the caller needs to deliver the completion, e.g. a future."""


@dataclass(slots=True, eq=False)
class _Row:
    pending: PendingRequest
    tokens: list[int]
    prompt_size: int
    limit: int
    """Maximum number of tokens, prompt included."""
    watched: frozenset[int]
    """Tokens after which the row may be finished."""
    node: TrieNode | None
    terminator: int
    """Token that ends a choice which is a prefix of another choice."""
    logprobs: list[float] = field(default_factory=list)
    allowed: list[tuple[int, ...]] = field(default_factory=list)
    failures: int = 0
    """Failed steps in which the row took part."""

    @property
    def request(self) -> CompletionRequest:
        return self.pending.request

    @property
    def sampled(self) -> list[int]:
        return self.tokens[self.prompt_size :]


@dataclass(slots=True, kw_only=True)
class SchedulerStats:
    """Counters since the scheduler was created."""

    requests: int = 0
    sampled_tokens: int = 0
    prompt_tokens: int = 0
    reused_tokens: int = 0
    """Prompt tokens whose keys and values came from the prefix cache."""
    steps: int = 0
    restarts: int = 0
    """How often changed weights invalidated the caches."""


Finished = tuple[PendingRequest, Completion | DreamGymError]


class Scheduler:
    """Batches requests over one backend. Not thread-safe: one thread calls it."""

    def __init__(
        self,
        backend: Backend,
        codec: TextCodec,
        *,
        positions: int,
        stop_token_ids: Iterable[int],
        max_batch: int,
        cache_bytes: int,
        fingerprint: Callable[[], object],
    ) -> None:
        """
        Args:
            positions: maximum number of tokens of a row.
            stop_token_ids: tokens that end a completion (end of text, end of turn).
            cache_bytes: limit of the prefix cache, and again of the running batch.
            fingerprint: of the weights; when it changes, the caches are cleared.
        """
        self.stats = SchedulerStats()
        self.histories = TokenHistory(codec)
        self.prefix_cache = PrefixCache(cache_bytes)
        self._backend = backend
        self._codec = codec
        self._positions = positions
        self._stop_ids = tuple(dict.fromkeys(stop_token_ids))
        self._max_batch = max_batch
        self._cache_bytes = cache_bytes
        self._fingerprint = fingerprint
        self._seen = fingerprint()
        self._new: deque[PendingRequest] = deque()
        self._waiting: deque[_Row] = deque()
        self._rows: list[_Row] = []
        self._sampling: SamplingParams | None = None
        self._finished: list[Finished] = []

    @property
    def idle(self) -> bool:
        return not (self._new or self._waiting or self._rows)

    def submit(self, pending: PendingRequest) -> None:
        self._new.append(pending)

    def forget(self, conversation: str) -> None:
        self.histories.forget(conversation)
        self.prefix_cache.take(conversation)

    def restart(self, backend: Backend | None = None) -> None:
        """Clear the caches. Running rows keep their tokens and are recomputed."""
        self.stats.restarts += 1
        self.prefix_cache.clear()
        self._waiting.extendleft(reversed(self._rows))
        self._remove(range(len(self._rows)))
        self._backend = backend or self._backend
        self._backend.refresh()
        self._seen = self._fingerprint()

    def fail_all(self, error: DreamGymError) -> list[Finished]:
        """Fail all requests with this error."""
        pending = [*self._new, *(row.pending for row in (*self._waiting, *self._rows))]
        self._new.clear()
        self._waiting.clear()
        self._remove(range(len(self._rows)))
        return [(pending, error) for pending in pending]

    @torch.inference_mode()
    def step(self) -> list[Finished]:
        """Compute one token for every row that fits; returns the requests that finished or failed."""
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
                self.stats.steps += 1
        except Exception as error:
            self._retry_rows_alone(error)
        finished, self._finished = self._finished, []
        return finished

    def _drop_cancelled(self) -> None:
        if any(row.pending.cancelled for row in (*self._waiting, *self._rows)):
            self._waiting = deque(row for row in self._waiting if not row.pending.cancelled)
            self._remove([place for place, row in enumerate(self._rows) if row.pending.cancelled])

    def _prepare(self, pending: PendingRequest) -> None:
        if pending.cancelled:
            return
        try:
            self._waiting.append(self._row(pending))
            self.stats.requests += 1
        except DreamGymError as error:
            self._finished.append((pending, error))
        except Exception as error:  # tokenizers raise many kinds
            self._finished.append((pending, _crash(error)))

    def _row(self, pending: PendingRequest) -> _Row:
        request = pending.request
        if request.prompt_token_ids is not None:
            tokens = list(request.prompt_token_ids)
        else:
            tokens = self.histories.tokens_of(request.prompt, request.conversation)
        choices = [(choice, self._codec.choice(choice)) for choice in request.choices or ()]
        node = build_trie(choices) if choices else None
        needed = len(tokens) + max((len(choice) for _, choice in choices), default=0) + 1
        if needed > self._positions:
            raise EpisodeFailedError(
                FailureKind.BUDGET,
                f"the model reads at most {self._positions} tokens, the prompt has {len(tokens)}"
                f"{' and its longest choice more' if node is not None else ''}: shorten the history",
            )
        watched = frozenset(self._stop_ids)
        if request.stop and node is None:
            watched |= self._codec.watched(request.stop)
        return _Row(
            pending=pending,
            tokens=tokens,
            prompt_size=len(tokens),
            limit=needed if node is not None else min(len(tokens) + request.max_tokens, self._positions),
            watched=watched,
            node=node,
            terminator=self._terminator(request, node) if node is not None else -1,
        )

    def _terminator(self, request: CompletionRequest, node: TrieNode) -> int:
        if request.stop and (tokens := self._codec.choice(request.stop[0])):
            return tokens[0]
        if self._stop_ids:
            return self._stop_ids[0]
        if node.needs_terminator:
            raise ConfigError(
                "this model has no token that ends a text, so a choice that begins another could not end: "
                "give a stop string"
            )
        return -1

    def _admit(self) -> None:
        """Admit waiting rows in order while batch size and memory allow."""
        chosen: list[_Row] = []
        new_tokens = 0
        columns = max((row.limit for row in self._rows), default=0)
        while self._waiting:
            row = self._waiting[0]
            saved = self.prefix_cache.get(row.request.conversation)
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
            entries = [(row.tokens, self.prefix_cache.get(row.request.conversation)) for row in chosen]
            self._rows += chosen
            self._sampling = None
            reused = self._backend.enter(entries, columns)
            self.stats.prompt_tokens += sum(len(row.tokens) for row in chosen)
            self.stats.reused_tokens += sum(reused)

    def _sample(self, logits: Tensor) -> None:
        """Sample the next token of every row and remove finished rows."""
        if self._sampling is None:
            self._sampling = SamplingParams.of([row.request for row in self._rows], logits.device)
        positions = np.array([len(row.tokens) for row in self._rows], dtype=np.uint64)
        chosen = sample_tokens(self._constrained(logits), self._sampling, positions)
        logprobs = logits.log_softmax(-1).gather(1, chosen[:, None])[:, 0]
        self.stats.sampled_tokens += len(self._rows)
        gone = []
        for place, (row, token, logprob) in enumerate(
            zip(self._rows, chosen.tolist(), logprobs.tolist(), strict=True)
        ):
            if not logprob > float("-inf"):  # NaN or -inf
                diverged = "the model gives no finite probabilities: have its weights diverged?"
                self._finished.append((row.pending, EpisodeFailedError(FailureKind.CRASHED, diverged)))
                self._backend.zero_row(place)
                gone.append(place)
                continue
            row.tokens.append(token)
            row.logprobs.append(logprob)
            if row.node is not None:
                row.allowed.append(tuple(row.node.allowed(row.terminator)))
                row.node = row.node.after(token)
                done = row.node.is_leaf
            else:
                done = len(row.tokens) >= row.limit or (token in row.watched and self._is_done(row, token))
            if done:
                self._finish(place)
                gone.append(place)
        if gone:
            self._remove(gone)

    def _constrained(self, logits: Tensor) -> Tensor:
        """-inf for tokens outside a row's choices."""
        places: list[int] = []
        tokens: list[int] = []
        for place, row in enumerate(self._rows):
            if row.node is not None:
                allowed = row.node.allowed(row.terminator)
                places += [place] * len(allowed)
                tokens += allowed
        if not places:
            return logits
        forbidden = torch.zeros_like(logits)
        forbidden[sorted(set(places))] = -torch.inf
        forbidden[places, tokens] = 0.0
        return logits + forbidden

    def _is_done(self, row: _Row, token: int) -> bool:
        if token in self._stop_ids:
            return True
        text = self._text(row)
        return any(stop in text for stop in row.request.stop)

    def _text(self, row: _Row) -> str:
        return self._codec.decode(row.sampled, after=row.tokens[row.prompt_size - 1])

    def _finish(self, place: int) -> None:
        row = self._rows[place]
        request = row.request
        reason: Literal["stop", "length", "choice"]
        if row.node is not None:
            text, reason = str(row.node.choice), "choice"
        else:
            text = self._text(row)
            ends = [text.find(stop) for stop in request.stop if stop in text]
            stopped = bool(ends) or row.tokens[-1] in self._stop_ids
            text, reason = text[: min(ends, default=None)], "stop" if stopped else "length"
        completion = Completion(
            text=text,
            token_ids=tuple(row.sampled),
            logprobs=tuple(row.logprobs),
            prompt_token_ids=tuple(row.tokens[: row.prompt_size]),
            allowed=tuple(row.allowed),
            finish_reason=reason,
        )
        self._finished.append((row.pending, completion))
        if request.conversation is not None:
            self._save_prefix(place, request.conversation)

    def _save_prefix(self, place: int, conversation: str) -> None:
        row = self._rows[place]
        prompt = row.tokens[: row.prompt_size]
        self.histories.record(conversation, row.request.prompt, prompt, row.sampled)
        saved = self._backend.save(place, row.tokens, self.prefix_cache.take(conversation))
        if saved is not None:
            self.prefix_cache.put(conversation, saved)

    def _remove(self, places: Sequence[int]) -> None:
        """Remove rows; the last rows move into their places."""
        order = list(range(len(self._rows)))
        for place in reversed(places):
            order[place] = order[-1]
            order.pop()
        self._rows = [self._rows[old] for old in order]
        self._sampling = None
        self._backend.keep(order)

    def _retry_rows_alone(self, error: Exception) -> None:
        """After a failed step: run each row alone, fail the ones that fail again, requeue the others."""
        rows = list(self._rows)
        self._remove(range(len(rows)))
        for place in range(len(rows)):
            self._backend.zero_row(place)
        failed = 0
        for row in rows:
            row.failures += 1
            try:
                if row.failures > _MAX_FAILED_STEPS:
                    raise error
                self._backend.enter([(row.tokens, None)], row.limit)
                self._backend.step([row.tokens])
                self._waiting.append(row)
            except Exception as own_error:
                failed += 1
                self._finished.append((row.pending, _crash(own_error)))
            self._backend.keep([])
        if not failed:  # each row works alone: the batch was too large
            self._max_batch = max(1, len(rows) // 2)


def _crash(error: Exception) -> EpisodeFailedError:
    return EpisodeFailedError(FailureKind.CRASHED, f"the model failed: {type(error).__name__}: {error}")
