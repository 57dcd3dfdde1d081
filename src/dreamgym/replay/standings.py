"""Who leads: the k-th best score so far of every query, and the rows that may still be among its k best."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

import numpy as np
import numpy.typing as npt

from dreamgym.replay.blocks import Hit, Numbers, Queries, Scores, Span, blocks_at

NEVER: Final = np.float32(-np.inf)
"""The score of forbidden rows."""
_ROUNDING: Final = 4e-6
"""More than what two ways of summing a product of unit vectors in single precision can differ by."""
_TIES: Final = 64
"""Rows beside the k best, above which those that cannot be told apart are looked at closely."""
_AT_ONCE: Final = 512
"""Keys that are copied together for products: about what a core's own cache holds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pairs:
    """Queries and rows, as columns, with what a row scores or may score at most."""

    query: Numbers
    ordinal: Numbers
    score: Scores

    def __len__(self) -> int:
        return len(self.query)

    def pick(self, which: npt.NDArray[np.bool_] | Numbers) -> Pairs:
        return Pairs(query=self.query[which], ordinal=self.ordinal[which], score=self.score[which])

    def segments(self) -> Iterator[tuple[int, slice]]:
        """Where the pairs of each query lie, if they are by query."""
        return segments(self.query)


def joined(parts: Sequence[Pairs]) -> Pairs:
    return Pairs(
        query=np.concatenate([part.query for part in parts]),
        ordinal=np.concatenate([part.ordinal for part in parts]),
        score=np.concatenate([part.score for part in parts]),
    )


def segments(query: Numbers) -> Iterator[tuple[int, slice]]:
    """
    >>> list(segments(np.array([2, 2, 5])))
    [(2, slice(0, 2, None)), (5, slice(2, 3, None))]
    """
    starts = np.flatnonzero(np.diff(query, prepend=-1)).tolist()
    for start, stop in pairwise([*starts, len(query)]):
        yield int(query[start]), slice(start, stop)


class Standings:
    """Of all queries, while more and more rows are looked at."""

    def __init__(self, spans: Sequence[Span], queries: Queries, k: int) -> None:
        self.spans = spans
        self.queries = queries
        self.k = k
        self.best = np.full((len(queries), k), NEVER)
        """The k best scores of each query."""
        self._found: list[Pairs] = []

    def bar(self) -> Scores:
        """What a row must reach; forbidden rows never do."""
        return _bar_of(self.best)

    def bar_with(self, asked: Numbers, scores: Scores) -> Scores:
        """The bar if scores of different rows, `(queries, rows)`, were known that did not raise it before."""
        return _bar_of(self._best_with(asked, scores))

    def raise_bar(self, asked: Numbers, scores: Scores) -> None:
        """By scores of different rows, `(queries, rows)`, that did not raise it before."""
        self.best[asked] = self._best_with(asked, scores)

    def _best_with(self, asked: Numbers, scores: Scores) -> Scores:
        contest = np.concatenate([self.best[asked], scores], axis=1)
        contest.partition(scores.shape[1], axis=1)
        return contest[:, scores.shape[1] :]

    def keep(self, pairs: Pairs) -> None:
        """Rows that reach the bar as it is now."""
        self._found.append(pairs)

    def products(self, query: Numbers, ordinal: Numbers) -> Scores:
        """Of pairs of a query and a row."""
        products = np.empty(len(query), np.float32)
        memory = np.empty((min(_AT_ONCE, len(query)), self.queries.keys.shape[1]), np.float32)
        for start in range(0, len(query), _AT_ONCE):
            part = slice(start, start + _AT_ONCE)
            order = np.argsort(ordinal[part])  # block by block, and within them as they lie in memory
            keys = memory[: len(order)]
            for block, rows, places in blocks_at(self.spans, ordinal[part][order]):
                np.take(block.keys, places, axis=0, out=keys[rows], mode="clip")  # unclipped, it copies twice
            asked = self.queries.keys.take(query[part][order], axis=0)
            products[part][order] = np.matmul(keys[:, None, :], asked[:, :, None])[:, 0, 0]
        return products

    def finish(self) -> list[list[Hit]]:
        found = joined(self._found)
        found = self._limit_ties(found.pick(found.score >= self.bar()[found.query]))
        return rank(self.spans, self.queries, found.query, found.ordinal, self.k)

    def _limit_ties(self, found: Pairs) -> Pairs:
        """Of many rows that single precision cannot tell apart (one state, met a thousand times) keep k."""
        crowded = np.flatnonzero(np.bincount(found.query, minlength=len(self.queries)) > self.k + _TIES)
        if not len(crowded):
            return found
        keep = np.ones(len(found), np.bool_)
        clear = self.best.min(axis=1) + np.float32(_ROUNDING)
        for query in crowded.tolist():
            tied = np.flatnonzero((found.query == query) & (found.score <= clear[query]))
            tied = tied[np.argsort(found.ordinal[tied])]
            best = np.argsort(-self._exact(query, found.ordinal[tied]), kind="stable")
            keep[tied[best[self.k :]]] = False
        return found.pick(keep)

    def _exact(self, query: int, ordinal: Numbers) -> npt.NDArray[np.float64]:
        """Scores as `rank` has them, of rows that are given in order."""
        scores = np.empty(len(ordinal))
        for block, part, places in blocks_at(self.spans, ordinal):
            for start in range(0, len(places), _AT_ONCE):
                few = slice(start, start + _AT_ONCE)
                keys = block.keys[places[few]].astype(np.float64)
                scores[part][few] = np.minimum((keys * self.queries.keys[query]).sum(axis=1), 1.0)
        return scores


def _bar_of(best: Scores) -> Scores:
    bar: Scores = best.min(axis=1) - np.float32(_ROUNDING)
    return np.maximum(bar, np.finfo(np.float32).min)


def rank(
    spans: Sequence[Span], queries: Queries, query: Numbers, ordinal: Numbers, k: int
) -> list[list[Hit]]:
    """The k best of the given (query, row) pairs, by similarity and then by age.

    Pairs are scored one by one in double precision, so that 64 queries in one batch and 64 single ones give
    the same numbers in the same order.
    """
    keys = np.empty((len(query), queries.keys.shape[1]), np.float64)
    seqs = np.empty(len(query), np.int64)
    by_age = np.argsort(ordinal)
    query = query[by_age]
    for block, part, places in blocks_at(spans, ordinal[by_age]):
        keys[part] = block.keys[places]
        seqs[part] = block.seqs[places]
    scores = np.minimum((keys * queries.keys[query]).sum(axis=1), 1.0)
    order = np.lexsort((seqs, -scores, query))
    ranked = list(zip(scores[order].tolist(), seqs[order].tolist(), strict=True))
    bounds = np.searchsorted(query[order], np.arange(len(queries) + 1)).tolist()
    return [ranked[start : min(stop, start + k)] for start, stop in pairwise(bounds)]
