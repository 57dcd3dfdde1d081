"""Runs packed forward passes for a changing set of rows: the backend of every model that can be packed.

A row that joins restores the keys and values of the longest prefix that its tokens share with its cached
conversation. Short convolutions keep only their inputs at the end of that conversation. If the shared prefix
ends earlier, a few tokens before its end are recomputed: after as many tokens as the convolutions of all
layers look back together, their inputs are exact, since attention reads exact keys and values.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from dreamgym.models.local.kv_cache import CachedPrefix, KVCache, PrefillChunk, Step


class PackedForward(Protocol):
    """A causal language model over packed tokens that reads and writes a `KVCache`."""

    @property
    def reach(self) -> int:
        """Tokens that the convolutions of all layers look back together; 0 for attention only."""
        ...

    def __call__(self, tokens: Tensor, step: Step, cache: KVCache) -> Tensor:
        """Logits of each row's last token, then of padding: `(at least rows, vocabulary)`."""
        ...

    def refresh(self) -> None:
        """Look up parameters again after their storage was replaced."""
        ...


class PackedBackend:
    """Rows of tokens and their logits, numbered in the order of `enter` until `keep` reorders them."""

    def __init__(self, forward: PackedForward, device: torch.device) -> None:
        self.forward = forward
        self.device = device
        self._cache = KVCache(device)
        self._lengths: list[int] = []
        """Cached tokens of each row."""
        self._entering: list[int] = []
        """Start of the prefill chunk of each row that has not yet taken part in a step."""

    @property
    def bytes_per_token(self) -> int:
        return self._cache.bytes_per_token

    def enter(self, rows: Sequence[tuple[Sequence[int], CachedPrefix | None]], columns: int) -> list[int]:
        """Add rows that may grow to `columns` tokens; returns the number of cached tokens of each."""
        first = len(self._lengths)
        self._cache.reserve(first + len(rows), columns)
        kept = []
        for tokens, saved in rows:
            shared = min(common_prefix(saved.tokens, tokens), len(tokens) - 1) if saved is not None else 0
            complete = saved is not None and shared == len(saved.tokens)
            begin = shared if complete or not self.forward.reach else max(0, shared - self.forward.reach)
            kept.append((shared, begin))
        self._cache.enter(first, [(row[1], shared) for row, (shared, _) in zip(rows, kept, strict=True)])
        self._lengths += [shared for shared, _ in kept]
        self._entering += [begin for _, begin in kept]
        return [begin for _, begin in kept]

    def step(self, sequences: Sequence[Sequence[int]]) -> Tensor:
        """Logits after the last token of each row, given all its tokens. State is unchanged if it raises."""
        decoding = len(self._lengths) - len(self._entering)
        packed = [tokens[-1] for tokens in sequences[:decoding]]
        chunks = []
        for row, begin in enumerate(self._entering, decoding):
            new = sequences[row][begin:]
            held = self._lengths[row]
            chunks.append(PrefillChunk(row=row, start=len(packed), size=len(new), position=begin, fresh=held))
            packed.extend(new)
        step = Step(self._lengths[:decoding], chunks, self.device)
        packed += [0] * step.padding
        logits = self.forward(torch.tensor(packed, device=self.device), step, self._cache)
        self._cache.commit()
        self._lengths = [len(tokens) for tokens in sequences]
        self._entering = []
        return logits[: len(sequences)]

    def save(self, row: int, tokens: Sequence[int], into: CachedPrefix | None) -> CachedPrefix:
        """Copy a row's cache for later batches; `into` is reused as far as its tokens are equal."""
        held = list(tokens[: self._lengths[row]])
        into = into or CachedPrefix()
        self._cache.save(row, held, into, common_prefix(into.tokens, held))
        return into

    def keep(self, order: Sequence[int]) -> None:
        """Reorder: row i becomes the former row ``order[i]``; the others are removed."""
        self._lengths = [self._lengths[old] for old in order]
        self._cache.keep(order, self._lengths)
        self._entering = []

    def zero_row(self, row: int) -> None:
        self._cache.zero_row(row)

    def refresh(self) -> None:
        self.forward.refresh()


def common_prefix(left: Sequence[int], right: Sequence[int]) -> int:
    """Length of the common prefix of two token sequences.

    >>> common_prefix([1, 2, 3], [1, 2, 4, 5]), common_prefix([1, 2], [1, 2, 3])
    (2, 2)
    """
    shorter = min(len(left), len(right))
    if left[:shorter] == right[:shorter]:
        return shorter
    return next(n for n in range(shorter) if left[n] != right[n])
