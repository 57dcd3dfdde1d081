"""Exact nearest-neighbour search over the keys of one environment and source.

Rows lie in blocks, in the order of the log. A block's scores are one matrix product for all queries at once;
filters set the scores of forbidden rows to minus infinity *before* anything is chosen. Then only the maxima
of small groups of rows are looked at: a group whose maximum is below the k-th best so far cannot matter, so
nearly all scores are never touched again, and Python never sees a single row. Of full blocks even the keys
are mostly left alone: their short forms (`sketch`) rule out nearly all rows.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt

from dreamgym.protocols import Keys
from dreamgym.replay.sketch import Sketch

BLOCK_ROWS: Final = 16384
_GROUPS: Final = 128
"""Groups a block's rows are dealt into; each has `BLOCK_ROWS / _GROUPS` rows."""

_ROUNDING: Final = 4e-6
"""More than what two ways of summing a product of unit vectors in single precision can differ by."""
_TIES: Final = 64
"""Rows kept beside the k best when their scores cannot be told apart, oldest first."""
_BUCKETS: Final = 1 << 16
_SEEDS: Final = 16
"""Rows of a block that are scored first, because their short forms promise most: they set the bar."""
_MOST_LEFT: Final = 1 / 16
"""Share of (row, query) pairs not ruled out by short forms, above which one matrix product is cheaper."""

_NEVER: Final = np.float32(-np.inf)

Hit: TypeAlias = tuple[float, int]
"""(similarity, number of the row in the log)"""
_Which: TypeAlias = slice | npt.NDArray[np.intp]


@dataclass(frozen=True, slots=True, kw_only=True)
class Queries:
    """Queries that share a smallest reward. A code is the `code_of` of an id to leave out, or 0 for none."""

    keys: Keys
    trajectories: npt.NDArray[np.int64]
    tasks: npt.NDArray[np.int64]
    min_reward: float | None

    def __len__(self) -> int:
        return len(self.keys)


def code_of(name: str) -> int:
    """A number for an id within this process; 0 means no id. Two ids share one with a chance of 1 in 2⁶¹."""
    return hash(name) or 1


@dataclass(slots=True)
class Block:
    """Columns of up to `BLOCK_ROWS` rows; the memory is only taken as rows arrive."""

    keys: Keys
    seqs: npt.NDArray[np.int64] = field(default_factory=lambda: np.zeros(BLOCK_ROWS, np.int64))
    trajectories: npt.NDArray[np.int64] = field(default_factory=lambda: np.zeros(BLOCK_ROWS, np.int64))
    tasks: npt.NDArray[np.int64] = field(default_factory=lambda: np.zeros(BLOCK_ROWS, np.int64))
    rewards: npt.NDArray[np.float64] = field(default_factory=lambda: np.zeros(BLOCK_ROWS, np.float64))
    sketch: Sketch | None = None
    """Once it is full, if its keys allow."""


@dataclass(frozen=True, slots=True)
class Span:
    """The rows of a block that are alive."""

    block: Block
    start: int
    stop: int
    ordinal: int
    """How many rows of the partition were ever stored before this block."""

    def __len__(self) -> int:
        return self.stop - self.start


class Partition:
    """The rows of one environment and source; may be changed while others search."""

    def __init__(self, dimension: int) -> None:
        self.dimension = dimension
        self._lock = threading.Lock()
        self._blocks: list[Block] = []
        # Ordinals, counted from the first row ever: those before `_first` are evicted, `_last` is the next.
        self._first = 0
        self._last = 0

    def __len__(self) -> int:
        return self._last - self._first

    @property
    def first(self) -> int:
        """How many rows were ever evicted."""
        return self._first

    @property
    def last(self) -> int:
        """How many rows were ever stored."""
        return self._last

    @property
    def nbytes(self) -> int:
        rows = self._last - self._first // BLOCK_ROWS * BLOCK_ROWS
        with self._lock:
            short = sum(block.sketch.nbytes for block in self._blocks if block.sketch is not None)
        return rows * (4 * self.dimension + 32) + short

    def append(
        self,
        seqs: npt.NDArray[np.int64],
        keys: Keys,
        trajectories: npt.NDArray[np.int64],
        tasks: npt.NDArray[np.int64],
        rewards: npt.NDArray[np.float64],
    ) -> None:
        done = 0
        while done < len(seqs):
            at = self._last % BLOCK_ROWS
            if at == 0:
                self._blocks.append(Block(np.zeros((BLOCK_ROWS, self.dimension), np.float32)))
            block = self._blocks[-1]
            count = min(BLOCK_ROWS - at, len(seqs) - done)
            target, taken = slice(at, at + count), slice(done, done + count)
            block.keys[target] = keys[taken]
            block.seqs[target] = seqs[taken]
            block.trajectories[target] = trajectories[taken]
            block.tasks[target] = tasks[taken]
            block.rewards[target] = rewards[taken]
            self._last += count  # last of all: whoever looks now sees whole rows
            done += count
            if at + count == BLOCK_ROWS:
                block.sketch = Sketch.of(block.keys)

    def evict(self, floor: int) -> None:
        """Drop the rows numbered up to `floor`: always the oldest, so whole blocks fall off the front."""
        with self._lock:
            while self._blocks:
                base = self._first // BLOCK_ROWS * BLOCK_ROWS
                stop = min(BLOCK_ROWS, self._last - base)
                gone = int(np.searchsorted(self._blocks[0].seqs[:stop], floor, side="right"))
                if gone < BLOCK_ROWS:
                    self._first = max(self._first, base + gone)
                    return
                del self._blocks[0]
                self._first = base + BLOCK_ROWS

    def spans(self, first: int = 0) -> list[Span]:
        """The live rows (those from the `first` ever on) as they are now, unaffected by later changes."""
        with self._lock:
            last = self._last
            base = self._first // BLOCK_ROWS * BLOCK_ROWS
            blocks = list(self._blocks)
            first = max(first, self._first)
        spans = []
        for number, block in enumerate(blocks):
            ordinal = base + number * BLOCK_ROWS
            spans.append(Span(block, max(first - ordinal, 0), min(last - ordinal, BLOCK_ROWS), ordinal))
        return [span for span in spans if span.stop > span.start]

    def search(self, queries: Queries, k: int) -> list[list[Hit]]:
        """The k best live rows for each query, by similarity and then by age."""
        return search_spans(self.spans(), queries, k)


def search_spans(spans: Sequence[Span], queries: Queries, k: int) -> list[list[Hit]]:
    if not spans or k == 0:
        return [[] for _ in range(len(queries))]
    race = _Race(queries, k)
    for span in spans:
        race.enter(span)
    return race.finish(spans)


def best_of(hits: list[Hit], k: int) -> list[Hit]:
    """The k best, by similarity and then by age."""
    return sorted(hits, key=lambda hit: (-hit[0], hit[1]))[:k]


def rank(
    spans: Sequence[Span],
    queries: Queries,
    query: npt.NDArray[np.intp],
    ordinal: npt.NDArray[np.intp],
    k: int,
) -> list[list[Hit]]:
    """The k best of the given (query, row) pairs, by similarity and then by age.

    Pairs are scored one by one in double precision, so that 64 queries in one batch and 64 single ones give
    the same numbers in the same order.
    """
    keys = np.empty((len(query), queries.keys.shape[1]), np.float64)
    seqs = np.empty(len(query), np.int64)
    number = (ordinal - spans[0].ordinal) // BLOCK_ROWS
    for each in np.unique(number):
        here = number == each
        keys[here] = spans[each].block.keys[ordinal[here] % BLOCK_ROWS]
        seqs[here] = spans[each].block.seqs[ordinal[here] % BLOCK_ROWS]
    scores = np.minimum((keys * queries.keys[query]).sum(axis=1), 1.0)
    order = np.lexsort((seqs, -scores, query))
    ranked = list(zip(scores[order].tolist(), seqs[order].tolist(), strict=True))
    bounds = np.searchsorted(query[order], np.arange(len(queries) + 1)).tolist()
    return [ranked[start : min(stop, start + k)] for start, stop in pairwise(bounds)]


def _ordinals(
    span: Span, rows: npt.NDArray[np.intp] | None, row: npt.NDArray[np.intp]
) -> npt.NDArray[np.intp]:
    return span.ordinal + (rows[row] if rows is not None else row + span.start)


class Excluded:
    """Finds, in a column of codes, the rows that each query wants to leave out."""

    def __init__(self, codes: npt.NDArray[np.int64]) -> None:
        self._codes = codes
        self._wanted = np.unique(codes[codes != 0])
        self._buckets = np.zeros(_BUCKETS, np.bool_)
        self._buckets[self._wanted % _BUCKETS] = True

    def __bool__(self) -> bool:
        return len(self._wanted) > 0

    def pairs(self, column: npt.NDArray[np.int64]) -> tuple[npt.NDArray[np.intp], npt.NDArray[np.intp]]:
        """(row, query) of everything to leave out. A small table dismisses nearly all rows in one pass."""
        if len(self._wanted) == 1:
            near = np.flatnonzero(column == self._wanted)
        else:
            near = np.flatnonzero(self._buckets[column % _BUCKETS])
        row, query = np.nonzero(column[near, None] == self._codes)
        return near[row], query


class _Race:
    """The k-th best score so far of every query, and the rows that may still be among its k best."""

    def __init__(self, queries: Queries, k: int) -> None:
        self._queries = queries
        self._k = k
        self._columns = np.ascontiguousarray(queries.keys.T)
        self._groups = max(_GROUPS, 2 * k)
        self._work = np.empty((BLOCK_ROWS + self._groups, len(queries)), np.float32)
        self._best = np.full((k, len(queries)), _NEVER)
        self._excluded = (Excluded(queries.trajectories), Excluded(queries.tasks))
        self._found: list[_Found] = []

    def enter(self, span: Span) -> None:
        if span.block.sketch is not None and self._enter_short(span, span.block.sketch):
            return

        def multiply(which: _Which, out: npt.NDArray[np.float32]) -> None:
            np.matmul(span.block.keys[which], self._columns, out=out)

        scores, rows = self._score(span, multiply)
        if not len(scores):
            return
        maxima = self._grouped(scores).max(axis=0)
        # Every maximum is a different row, so the k-th best of them bounds the k-th best row from below.
        self._raise_bar(maxima)
        row, query, score = self._reaching(scores, maxima, self._bar())
        self._found.append(_Found(query=query, ordinal=_ordinals(span, rows, row), score=score))

    def _enter_short(self, span: Span, sketch: Sketch) -> bool:
        """Enter only the rows whose short forms promise enough; False if those are too many."""

        def bound(which: _Which, out: npt.NDArray[np.float32]) -> None:
            sketch.bounds(which, self._queries.keys, out)

        bounds, rows = self._score(span, bound)
        if not len(bounds):
            return True
        maxima = self._grouped(bounds).max(axis=0)
        most = max(_SEEDS, 2 * self._k)
        group = np.argpartition(maxima, -most, axis=0)[-most:]
        layer = self._grouped(bounds)[:, group, np.arange(len(self._queries))].argmax(axis=0)
        seeds = layer * self._groups + group
        real = np.take_along_axis(maxima, group, axis=0) > _NEVER
        query = np.broadcast_to(np.arange(len(self._queries)), seeds.shape)
        known = np.full(seeds.shape, _NEVER)
        known[real] = self._products(span, rows, seeds[real], query[real])
        before = self._best
        self._raise_bar(known)
        bar = self._bar()
        row, query, _ = self._reaching(bounds, maxima, bar - np.float32(_ROUNDING))
        if len(row) > _MOST_LEFT * bounds.size:
            self._best = before
            return False
        score = self._products(span, rows, row, query)
        found = _Found(query=query, ordinal=_ordinals(span, rows, row), score=score)
        self._found.append(found.pick(score >= bar[query]))
        return True

    def _grouped(self, scores: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        return scores.reshape(-1, self._groups, len(self._queries))

    def _raise_bar(self, scores: npt.NDArray[np.float32]) -> None:
        """By scores of different rows, `(rows, queries)`, that did not raise it before."""
        contest = np.concatenate([self._best, scores])
        self._best = np.partition(contest, len(scores), axis=0)[len(scores) :]

    def _reaching(
        self, scores: npt.NDArray[np.float32], maxima: npt.NDArray[np.float32], bar: npt.NDArray[np.float32]
    ) -> tuple[npt.NDArray[np.intp], npt.NDArray[np.intp], npt.NDArray[np.float32]]:
        """(row, query, score) of all that reach the bar, for any one query in order."""
        group, query = np.nonzero(maxima >= bar)
        members = self._grouped(scores)[:, group, query]
        layer, pick = np.nonzero(members >= bar[query])
        return layer * self._groups + group[pick], query[pick], members[layer, pick]

    def _products(
        self,
        span: Span,
        rows: npt.NDArray[np.intp] | None,
        row: npt.NDArray[np.intp],
        query: npt.NDArray[np.intp],
    ) -> npt.NDArray[np.float32]:
        """Of the given (row, query) pairs."""
        at = rows[row] if rows is not None else row + span.start
        order = np.argsort(query, kind="stable")
        bounds = np.searchsorted(query[order], np.arange(len(self._queries) + 1)).tolist()
        products = np.empty(len(row), np.float32)
        for number, (start, stop) in enumerate(pairwise(bounds)):
            mine = order[start:stop]  # by query: few keys at a time, which stay in the processor's cache
            products[mine] = span.block.keys[at[mine]] @ self._queries.keys[number]
        return products

    def finish(self, spans: Sequence[Span]) -> list[list[Hit]]:
        if not self._found:
            return [[] for _ in range(len(self._queries))]
        found = _Found(
            query=np.concatenate([part.query for part in self._found]),
            ordinal=np.concatenate([part.ordinal for part in self._found]),
            score=np.concatenate([part.score for part in self._found]),
        )
        found = self._limit_ties(found.pick(found.score >= self._bar()[found.query]))
        return rank(spans, self._queries, found.query, found.ordinal, self._k)

    def _score(
        self, span: Span, multiply: Callable[[_Which, npt.NDArray[np.float32]], None]
    ) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.intp] | None]:
        """(scores as `multiply` makes them; their rows of the block, or None for all alive)."""
        block, alive = span.block, slice(span.start, span.stop)
        rows: npt.NDArray[np.intp] | None = None
        forbidden: npt.NDArray[np.bool_] | None = None
        if self._queries.min_reward is not None:
            allowed = block.rewards[alive] >= self._queries.min_reward
            # Copying the survivors together pays when many queries share the copy, or when they are few.
            if np.count_nonzero(allowed) < len(allowed) * (0.7 if len(self._queries) >= 16 else 0.1):
                rows = np.flatnonzero(allowed) + span.start
            else:
                forbidden = ~allowed
        count = len(span) if rows is None else len(rows)
        scores = self._work[: -(-count // self._groups) * self._groups]
        multiply(alive if rows is None else rows, scores[:count])
        scores[count:] = _NEVER
        if forbidden is not None:
            scores[:count][forbidden] = _NEVER
        for excluded, column in zip(self._excluded, (block.trajectories, block.tasks), strict=True):
            if excluded:
                scores[excluded.pairs(column[alive] if rows is None else column[rows])] = _NEVER
        return scores, rows

    def _bar(self) -> npt.NDArray[np.float32]:
        """What a row must reach; forbidden rows never do."""
        bar: npt.NDArray[np.float32] = self._best.min(axis=0) - np.float32(_ROUNDING)
        return np.maximum(bar, np.finfo(np.float32).min)

    def _limit_ties(self, found: _Found) -> _Found:
        """Of rows that cannot be told apart (one state, met a thousand times) keep the oldest."""
        crowded = np.flatnonzero(np.bincount(found.query, minlength=len(self._queries)) > self._k + _TIES)
        if not len(crowded):
            return found
        keep = np.ones(len(found.query), np.bool_)
        clear = self._best.min(axis=0) + np.float32(_ROUNDING)
        for query in crowded:
            tied = np.flatnonzero((found.query == query) & (found.score <= clear[query]))
            keep[tied[self._k + _TIES :]] = False
        return found.pick(keep)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Found:
    """Rows in the race, as columns; for any one query in the order of the log."""

    query: npt.NDArray[np.intp]
    ordinal: npt.NDArray[np.intp]
    score: npt.NDArray[np.float32]

    def pick(self, which: npt.NDArray[np.bool_]) -> _Found:
        return _Found(query=self.query[which], ordinal=self.ordinal[which], score=self.score[which])
