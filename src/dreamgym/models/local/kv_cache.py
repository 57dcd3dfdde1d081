"""The KV cache of a batch: keys, values and short-convolution inputs of every row.

Tokens of all rows travel packed, `(tokens, …)`, so that no layer computes padding. Keys and values are stored
in one padded block per layer, one entry per row. The tokens of a step are either one per row (decoding; all
rows in one batched product) or a prefill chunk of one row that has just joined.

Decoding rows always come first. The index of a row is independent of its conversation.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor
from torch.nn import functional


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillChunk:
    """Tokens of one row that are prefilled together."""

    row: int
    start: int
    """Index of its first token among the packed tokens."""
    size: int
    position: int
    """Position of its first token in the row."""
    fresh: int
    """Position of the first token that is not cached; earlier ones only warm up short convolutions."""

    @property
    def end(self) -> int:
        return self.position + self.size


MIN_ROWS = 4
"""Minimum rows of every matrix product. With fewer, BLAS picks other kernels, which round differently: logits
would depend on what else is in the batch."""

_COLUMN_BLOCK = 16
"""Decoding reads keys in multiples of this, for the same reason."""


class Step:
    """Which tokens a forward pass computes, with the masks and indices that its layers share.

    Logits of a row do not depend on the other rows of its step, to the bit, where BLAS rounds each row of a
    product alike (see `MIN_ROWS`; `backends.is_batch_invariant` checks it).
    """

    def __init__(self, lengths: Sequence[int], chunks: Sequence[PrefillChunk], device: torch.device) -> None:
        """`lengths`: cached tokens of each decoding row; these rows come first, then the chunks."""
        self.device = device
        self.decoding = len(lengths)
        self.chunks = tuple(chunks)
        self.padding = max(0, MIN_ROWS - self.decoding - sum(chunk.size for chunk in self.chunks))
        """Tokens after all others that belong to no row."""
        self.longest = math.ceil((max(lengths, default=0) + 1) / _COLUMN_BLOCK) * _COLUMN_BLOCK
        self.lengths = torch.tensor(lengths, dtype=torch.long, device=device)
        self._bias: dict[int | None, Tensor] = {}
        self._chunk_bias: dict[tuple[PrefillChunk, int | None], Tensor] = {}

    @property
    def end(self) -> int:
        """One more than the highest position."""
        return max([self.longest, *(chunk.end for chunk in self.chunks)])

    @cached_property
    def positions(self) -> Tensor:
        """`(tokens,)`"""
        if not self.chunks and not self.padding:
            return self.lengths
        spans = [torch.arange(chunk.position, chunk.end, device=self.device) for chunk in self.chunks]
        return torch.cat([self.lengths, *spans, self.lengths.new_zeros(self.padding)])

    @cached_property
    def rows(self) -> Tensor:
        """`(decoding,)`"""
        return torch.arange(self.decoding, device=self.device)

    @cached_property
    def last(self) -> Tensor | None:
        """Index of each row's last token, padded to `MIN_ROWS`; None if all tokens are last ones."""
        if not self.chunks:
            return None
        ends = [chunk.start + chunk.size - 1 for chunk in self.chunks]
        rows = [*range(self.decoding), *ends]
        return torch.tensor(rows + [0] * (MIN_ROWS - len(rows)), device=self.device)

    def decoding_bias(self, window: int | None) -> Tensor:
        """`(decoding, 1, longest)`: -inf where a row has no key."""
        if window not in self._bias:
            columns = torch.arange(self.longest, device=self.device)
            hidden = columns > self.lengths[:, None]
            if window is not None:
                hidden |= columns <= self.lengths[:, None] - window
            self._bias[window] = _mask(hidden)[:, None]
        return self._bias[window]

    def chunk_bias(self, chunk: PrefillChunk, window: int | None) -> Tensor:
        """`(size, end)`: -inf at the keys that a token of the chunk may not see."""
        key = (chunk, window)
        if key not in self._chunk_bias:
            keys = torch.arange(chunk.end, device=self.device)
            tokens = keys[chunk.position :, None]
            hidden = keys > tokens if window is None else (keys > tokens) | (keys <= tokens - window)
            self._chunk_bias[key] = _mask(hidden)
        return self._chunk_bias[key]

    def lagged(self, lags: int) -> tuple[list[Tensor], list[Tensor]]:
        """Where each token's predecessors and each row's last tokens are in ``[lag n … lag 1, tokens]``.

        Every block of that concatenation before the tokens has one entry per row.
        """
        count = self.decoding + len(self.chunks)
        sizes = torch.tensor([1] * self.decoding + [chunk.size for chunk in self.chunks])
        starts = sizes.cumsum(0) - sizes
        rows = torch.arange(count)

        def find(rows: Tensor, starts: Tensor, offsets: Tensor) -> Tensor:
            """Index of a token in a row's chunk; negative offsets point into the cached inputs."""
            there = torch.where(offsets < 0, (lags + offsets) * count + rows, lags * count + starts + offsets)
            return there.to(self.device)

        own_rows, own_starts = (x.repeat_interleave(sizes) for x in (rows, starts))
        offsets = torch.arange(len(own_rows)) - own_starts
        before = [find(own_rows, own_starts, offsets - lag) for lag in range(1, lags + 1)]
        before = [torch.cat([index, index.new_zeros(self.padding)]) for index in before]
        ends = [find(rows, starts, sizes - lag) for lag in range(1, lags + 1)]
        return before, ends


@dataclass(slots=True)
class CachedPrefix:
    """Cached tokens of a conversation with their keys and values per layer, `(heads, size, capacity)`."""

    tokens: list[int] = field(default_factory=list)
    keys: dict[int, Tensor] = field(default_factory=dict)
    values: dict[int, Tensor] = field(default_factory=dict)
    lags: dict[int, list[Tensor]] = field(default_factory=dict)
    """Per convolution layer its last inputs, newest first, each `(size,)`."""

    @property
    def size(self) -> int:
        """In bytes."""
        return sum(part.nbytes for part in (*self.keys.values(), *self.values.values()))


class PrefixCache:
    """Cached prefixes by conversation, within a memory limit; the least recently used are evicted.

    An eviction costs a recomputation and nothing else: tokens are kept in `tokens.TokenHistory`.
    """

    def __init__(self, limit: int) -> None:
        """`limit`: bytes of keys and values in all."""
        self._limit = limit
        self._saved: OrderedDict[str | None, tuple[CachedPrefix, int]] = OrderedDict()
        self.size = 0
        """In bytes."""

    def __len__(self) -> int:
        return len(self._saved)

    def take(self, conversation: str | None) -> CachedPrefix | None:
        """Remove and return an entry."""
        saved, size = self._saved.pop(conversation, (None, 0))
        self.size -= size
        return saved

    def get(self, conversation: str | None) -> CachedPrefix | None:
        if conversation not in self._saved:
            return None
        self._saved.move_to_end(conversation)
        return self._saved[conversation][0]

    def put(self, conversation: str, saved: CachedPrefix) -> None:
        self.take(conversation)
        size = saved.size
        self._saved[conversation] = (saved, size)
        self.size += size
        while self.size > self._limit:
            _, (_, size) = self._saved.popitem(last=False)
            self.size -= size

    def clear(self) -> None:
        self._saved.clear()
        self.size = 0


class KVCache:
    """Keys, values and convolution inputs of the rows in a batch. Layers are allocated at first use.

    Decoding is bound by reading keys and values, so their memory layout decides its speed. Both blocks have
    the shape `(rows, heads, size, tokens)`; keys are contiguous, values have the last two dimensions swapped,
    which is fastest for the two products of attention.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.keys: dict[int, Tensor] = {}
        self.values: dict[int, Tensor] = {}
        self.lags: dict[int, list[Tensor]] = {}
        self._next_lags: dict[int, list[Tensor]] = {}
        self._gathers: tuple[Step, tuple[list[Tensor], list[Tensor]]] | None = None
        self._rows = self._columns = 0

    @property
    def bytes_per_token(self) -> int:
        return sum(block[0, ..., 0].nbytes for block in (*self.keys.values(), *self.values.values()))

    def reserve(self, rows: int, columns: int) -> None:
        if rows <= self._rows and columns <= self._columns:
            return
        # Grows by half, so that copies are rare.
        if rows > self._rows:
            self._rows = max(rows, self._rows * 3 // 2)
        if columns > self._columns:
            self._columns = math.ceil(max(columns, self._columns * 3 // 2) / 64) * 64
        for part in (self.keys, self.values):
            for layer, old in part.items():
                part[layer] = new = _block(old, (self._rows, *old.shape[1:3], self._columns))
                new[: old.shape[0], ..., : old.shape[3]] = old

    def attend(
        self, layer: int, step: Step, q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None = None
    ) -> Tensor:
        """Causal attention of packed tokens to their own row: `(tokens, heads, size)` in and out.

        Several query heads may share one key head, as many as divide evenly.
        """
        if layer not in self.keys:
            self.keys[layer] = _block(k, (self._rows, *k.shape[1:], self._columns))
            self.values[layer] = _block(v.mT, (self._rows, *v.shape[1:], self._columns))
        keys, values = self.keys[layer], self.values[layer]
        parts: list[Tensor] = []
        n = step.decoding
        if n:
            keys[step.rows, ..., step.lengths] = k[:n]
            values[step.rows, ..., step.lengths] = v[:n]
            held = keys[:n, ..., : step.longest], values[:n, ..., : step.longest]
            parts.append(_decode(q[:n], *held, step.decoding_bias(window), scale))
        for chunk in step.chunks:
            span = slice(chunk.start, chunk.start + chunk.size)
            new = slice(chunk.start + chunk.fresh - chunk.position, chunk.start + chunk.size)
            keys[chunk.row, ..., chunk.fresh : chunk.end] = k[new].permute(1, 2, 0)
            values[chunk.row, ..., chunk.fresh : chunk.end] = v[new].permute(1, 2, 0)
            if chunk.end == chunk.size and window is None:
                parts.append(_prefill(q[span], k[span], v[span], scale))
            else:
                held = keys[chunk.row, ..., : chunk.end], values[chunk.row, ..., : chunk.end]
                parts.append(_extend(q[span], *held, step.chunk_bias(chunk, window), scale))
        if step.padding:
            parts.append(parts[0].new_zeros(step.padding, *parts[0].shape[1:]))
        return torch.cat(parts) if len(parts) > 1 else parts[0]

    def shift(self, layer: int, step: Step, x: Tensor, lags: int) -> list[Tensor]:
        """Packed inputs of a causal convolution, followed by their `lags` predecessors."""
        held = self.lags.get(layer)
        if held is None:
            rows = step.decoding + len(step.chunks)
            held = [x.new_zeros(rows, x.shape[1]) for _ in range(lags)]
        if not step.chunks:
            self._next_lags[layer] = [x[: step.decoding], *held[:-1]]
            return [x, *(functional.pad(lag, (0, 0, 0, step.padding)) for lag in held)]
        if self._gathers is None or self._gathers[0] is not step:
            self._gathers = (step, step.lagged(lags))
        before, ends = self._gathers[1]
        source = torch.cat([*reversed(held), x])
        self._next_lags[layer] = [source[index] for index in ends]
        return [x, *(source[index] for index in before)]

    def commit(self) -> None:
        """Advance convolution inputs after a step. Without this the step can be repeated."""
        self.lags.update(self._next_lags)
        self._next_lags = {}
        self._gathers = None

    def enter(self, first: int, rows: Sequence[tuple[CachedPrefix | None, int]]) -> None:
        """Fill rows from `first` on, each with the given number of saved tokens."""
        for row, (saved, length) in enumerate(rows, first):
            if saved is not None and length:
                for part, kept in ((self.keys, saved.keys), (self.values, saved.values)):
                    for layer, tensor in kept.items():
                        part[layer][row, ..., :length] = tensor[..., :length]
        for layer, held in self.lags.items():
            nothing = held[0].new_zeros(held[0].shape[1])
            # Only the inputs of the last saved token are kept.
            new = [
                saved.lags[layer] if saved and length == len(saved.tokens) else [nothing] * len(held)
                for saved, length in rows
            ]
            self.lags[layer] = [
                torch.cat([lag, torch.stack(own)])
                for lag, own in zip(held, zip(*new, strict=True), strict=True)
            ]

    def save(self, row: int, tokens: list[int], into: CachedPrefix, same: int) -> None:
        """Copy a row to `into`, whose first `same` tokens are already equal."""
        length = len(tokens)
        for part, kept in ((self.keys, into.keys), (self.values, into.values)):
            for layer, block in part.items():
                held = kept.get(layer)
                if held is None or held.shape[2] < length:
                    grown = _block(block, (*block.shape[1:3], length + length // 4), empty=True)
                    if held is not None:
                        grown[..., :same] = held[..., :same]
                    kept[layer] = held = grown
                held[..., same:length] = block[row, ..., same:length]
        into.tokens = tokens
        into.lags = {layer: [lag[row].clone() for lag in held] for layer, held in self.lags.items()}

    def keep(self, order: Sequence[int], lengths: Sequence[int]) -> None:
        """Reorder: row i becomes the former row ``order[i]``; rows only move into freed places."""
        for new, old in enumerate(order):
            if new != old:
                for block in (*self.keys.values(), *self.values.values()):
                    block[new, ..., : lengths[new]] = block[old, ..., : lengths[new]]
        index = torch.tensor(order, device=self.device, dtype=torch.long)
        self.lags = {layer: [lag[index] for lag in held] for layer, held in self.lags.items()}

    def zero_row(self, row: int) -> None:
        """Clear a row: values that are not finite would leak through masks."""
        for block in (*self.keys.values(), *self.values.values()):
            block[row] = 0


def _mask(hidden: Tensor) -> Tensor:
    return torch.zeros(hidden.shape, device=hidden.device).masked_fill_(hidden, -math.inf)


def _block(like: Tensor, shape: tuple[int, ...], *, empty: bool = False) -> Tensor:
    """Memory with the layout of `like`; zeros, since masked entries are still multiplied by 0."""
    make = like.new_empty if empty else like.new_zeros
    return make(shape) if like.stride(-1) == 1 else make((*shape[:-2], shape[-1], shape[-2])).mT


def _decode(q: Tensor, keys: Tensor, values: Tensor, bias: Tensor, scale: float) -> Tensor:
    """One token per row. On a CPU two batched products beat the fused kernel for long queries."""
    rows, heads, size, longest = keys.shape
    scores = torch.bmm((q * scale).reshape(rows * heads, -1, size), keys.flatten(0, 1))
    scores.view(rows, -1, longest).add_(bias)
    mixed = torch.bmm(scores.softmax(-1), values.mT.flatten(0, 1))
    return mixed.view(rows, q.shape[1], -1)


def _prefill(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """The first tokens of one row."""
    shared = q.shape[1] // k.shape[1]
    if shared > 1:
        k, v = k.repeat_interleave(shared, 1), v.repeat_interleave(shared, 1)
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale)
    return mixed[0].transpose(0, 1)


def _extend(q: Tensor, keys: Tensor, values: Tensor, bias: Tensor, scale: float) -> Tensor:
    """Tokens of one row after cached ones."""
    tokens, heads, size = q.shape
    grouped = (q * scale).transpose(0, 1).reshape(keys.shape[0], -1, size)
    scores = torch.bmm(grouped, keys)
    scores.view(heads, tokens, -1).add_(bias)
    mixed = torch.bmm(scores.softmax(-1), values.mT)
    return mixed.view(heads, tokens, -1).transpose(0, 1)
