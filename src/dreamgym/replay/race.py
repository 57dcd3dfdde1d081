"""Exact nearest-neighbour search: every row enters a race that nearly all of them leave at once.

Rows run in heats. A heat's scores, or where keys have short forms (`sketch`) the most that they can be, are a
few matrix products for all queries at once; filters set those of forbidden rows to minus infinity *before*
anything is chosen. The most promising rows are scored first, which sets a bar; then only the maxima of small
groups of rows are looked at, since a group whose maximum is below the bar cannot matter. So nearly all scores
are never touched again, nearly all keys never read, and Python never sees a single row.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Final

import numpy as np
import numpy.typing as npt

from dreamgym.replay.blocks import BLOCK_ROWS, Hit, Queries, Span, keys_at
from dreamgym.replay.sketch import PAGE_ROWS, Plane

_HEAT: Final = 1 << 22
"""About how many scores are made at once: 16 MB."""
_LAYERS: Final = 64
"""Rows in a group, at most."""
_GROUPS: Final = 128
"""At least, even if they are small."""
_SEEDS: Final = 32
"""Rows of a heat that are scored first, because they promise most: they set the bar."""
_MOST_LEFT: Final = 1 / 16
"""Share of a heat's rows not ruled out by short forms, above which one matrix product is cheaper."""
_FEW_ROWS: Final = 4 * PAGE_ROWS
_MANY_QUERIES: Final = 16
"""So many queries read so few rows whole: what short forms then spare is less than what choosing costs."""
_ROUNDING: Final = 4e-6
"""More than what two ways of summing a product of unit vectors in single precision can differ by."""
_TIES: Final = 64
"""Rows kept beside the k best when their scores cannot be told apart, oldest first."""
_BUCKETS: Final = 1 << 16

_NEVER: Final = np.float32(-np.inf)

_Rows = npt.NDArray[np.intp]
_Scores = npt.NDArray[np.float32]


def search_spans(spans: Sequence[Span], queries: Queries, k: int) -> list[list[Hit]]:
    """The k best rows of spans of blocks in a row for each query, by similarity and then by age."""
    if not spans or k == 0:
        return [[] for _ in range(len(queries))]
    race = _Race(spans, queries, k)
    everybody = np.arange(len(queries))
    for heat in _heats(spans, max(PAGE_ROWS, _HEAT // len(queries))):
        race.run(heat, everybody)
    return race.finish()


def rank(spans: Sequence[Span], queries: Queries, query: _Rows, ordinal: _Rows, k: int) -> list[list[Hit]]:
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


class Excluded:
    """Finds, in a column of codes, the rows that each query wants to leave out."""

    def __init__(self, codes: npt.NDArray[np.int64]) -> None:
        self._codes = codes
        self._wanted = np.unique(codes[codes != 0])
        self._buckets = np.zeros(_BUCKETS, np.bool_)
        self._buckets[self._wanted & (_BUCKETS - 1)] = True

    def __bool__(self) -> bool:
        return len(self._wanted) > 0

    def pairs(self, column: npt.NDArray[np.int64]) -> tuple[_Rows, _Rows]:
        """(row, query) of everything to leave out. A small table dismisses nearly all rows in one pass."""
        if len(self._wanted) == 1:
            near = np.flatnonzero(column == self._wanted)
        else:
            near = np.flatnonzero(self._buckets[column & (_BUCKETS - 1)])
        row, query = np.nonzero(column[near, None] == self._codes)
        return near[row], query


class _Heat:
    """Rows that run together: spans, one after the other."""

    def __init__(self, spans: Sequence[Span]) -> None:
        self.spans = spans
        self.edges = np.cumsum([0, *map(len, spans)])
        self.shortened = any(
            number < len(span.block.pages) and span.block.pages[number] is not None
            for span in spans
            for number in range(span.start // PAGE_ROWS, -(-span.stop // PAGE_ROWS))
        )
        """Whether any of them have short forms."""

    def __len__(self) -> int:
        return int(self.edges[-1])

    def __iter__(self) -> Iterator[tuple[Span, slice]]:
        """Spans, and where they lie in the heat."""
        for span, (start, stop) in zip(self.spans, pairwise(self.edges.tolist()), strict=True):
            yield span, slice(start, stop)

    def ordinals(self, row: _Rows) -> _Rows:
        """Of rows of the heat, among all rows of the partition."""
        first = np.array([span.ordinal + span.start for span in self.spans]) - self.edges[:-1]
        span = np.searchsorted(self.edges, row, side="right") - 1
        ordinals: _Rows = row + first[span]
        return ordinals


def _heats(spans: Sequence[Span], rows: int) -> Iterator[_Heat]:
    """Spans, cut where a heat is full.

    >>> from dreamgym.replay.blocks import Block
    >>> spans = [Span(Block(np.zeros((9, 2))), 2, 9, 0), Span(Block(np.zeros((9, 2))), 0, 3, 9)]
    >>> [[(span.start, span.stop) for span in heat.spans] for heat in _heats(spans, 5)]
    [[(2, 7)], [(7, 9), (0, 3)]]
    """
    heat: list[Span] = []
    room = rows
    for span in spans:
        start = span.start
        while start < span.stop:
            stop = min(span.stop, start + room)
            heat.append(replace(span, start=start, stop=stop))
            room -= stop - start
            start = stop
            if not room:
                yield _Heat(heat)
                heat, room = [], rows
    if heat:
        yield _Heat(heat)


class _Workspace(threading.local):
    """Memory for scores, taken once: fresh pages cost more than what is written into them."""

    def __init__(self) -> None:
        self._memory = np.empty(0, np.float32)

    def scores(self, queries: int, rows: int) -> _Scores:
        if len(self._memory) < queries * rows:
            self._memory = np.empty(queries * rows, np.float32)
        return self._memory[: queries * rows].reshape(queries, rows)


_workspace = _Workspace()


class _Race:
    """The k-th best score so far of every query, and the rows that may still be among its k best."""

    def __init__(self, spans: Sequence[Span], queries: Queries, k: int) -> None:
        self._spans = spans
        self._queries = queries
        self._k = k
        self._best = np.full((len(queries), k), _NEVER)
        self._excluded = (Excluded(queries.trajectories), Excluded(queries.tasks))
        self._short: dict[Plane, _Scores] = {}
        self._found: list[_Found] = []

    def run(self, heat: _Heat, asked: _Rows) -> None:
        """`asked` are the numbers of the queries."""
        left = asked
        if heat.shortened and (len(heat) > _FEW_ROWS or len(asked) < _MANY_QUERIES):
            left = self._run_short(heat, asked)
        if len(left):
            self._run_whole(heat, left)

    def _run_short(self, heat: _Heat, asked: _Rows) -> _Rows:
        """By short forms, where there are any; the queries for which too many rows are left come back."""
        grouped, maxima = self._scores(heat, asked, whole=False)
        before = self._best[asked]
        self._raise_bar(asked, self._seeds(heat, asked, grouped, maxima))
        bar = self._bar()[asked]
        query, row, _ = _reaching(grouped, maxima, bar)
        many = np.bincount(query, minlength=len(asked)) > _MOST_LEFT * len(heat)
        if many.any():
            self._best[asked[many]] = before[many]  # else the same rows would raise the bar twice
            keep = ~many[query]
            query, row = query[keep], row[keep]
        ordinal = heat.ordinals(row)
        score = self._products(asked, query, ordinal)
        stay = score >= bar[query]
        self._found.append(_Found(query=asked[query[stay]], ordinal=ordinal[stay], score=score[stay]))
        return asked[many]

    def _run_whole(self, heat: _Heat, asked: _Rows) -> None:
        grouped, maxima = self._scores(heat, asked, whole=True)
        # Every maximum is a different row, so the k-th best of them bounds the k-th best row from below.
        self._raise_bar(asked, maxima)
        query, row, score = _reaching(grouped, maxima, self._bar()[asked])
        self._found.append(_Found(query=asked[query], ordinal=heat.ordinals(row), score=score))

    def finish(self) -> list[list[Hit]]:
        found = _Found(
            query=np.concatenate([part.query for part in self._found]),
            ordinal=np.concatenate([part.ordinal for part in self._found]),
            score=np.concatenate([part.score for part in self._found]),
        )
        found = self._limit_ties(found.pick(found.score >= self._bar()[found.query]))
        return rank(self._spans, self._queries, found.query, found.ordinal, self._k)

    def _scores(self, heat: _Heat, asked: _Rows, *, whole: bool) -> tuple[_Scores, _Scores]:
        """Of all rows, `(queries, layers, groups)`, and the maxima of the groups.

        What short forms tell is the most that a score can be.
        """
        groups = max(_GROUPS, 2 * self._k, -(-len(heat) // _LAYERS))
        layers = -(-len(heat) // groups)
        scores = _workspace.scores(len(asked), layers * groups)
        scores[:, len(heat) :] = _NEVER
        for span, place in heat:
            self._multiply(span, asked, scores[:, place], whole=whole)
            self._forbid(span, asked, scores[:, place])
        grouped = scores.reshape(len(asked), layers, groups)
        return grouped, grouped.max(axis=1)

    def _multiply(self, span: Span, asked: _Rows, out: _Scores, *, whole: bool) -> None:
        block, start = span.block, span.start
        while start < span.stop:
            number, within = divmod(start, PAGE_ROWS)
            page = block.pages[number] if number < len(block.pages) and not whole else None
            stop = span.stop if whole else min(span.stop, start - within + PAGE_ROWS)
            here = out[:, start - span.start : stop - span.start]
            if page is None:
                # In this order, and turned afterwards: for few queries it takes half the time.
                here[:] = (block.keys[start:stop] @ self._queries.keys[asked].T).T
            else:
                if page.plane not in self._short:
                    self._short[page.plane] = page.plane.shorten(self._queries.keys)
                columns = page.columns[:, within : within + stop - start]
                np.matmul(self._short[page.plane][asked], columns, out=here)
            start = stop

    def _forbid(self, span: Span, asked: _Rows, out: _Scores) -> None:
        block, alive = span.block, slice(span.start, span.stop)
        if self._queries.min_reward is not None:
            np.copyto(out, _NEVER, where=block.rewards[alive] < self._queries.min_reward)
        for excluded, column in zip(self._excluded, (block.trajectories, block.tasks), strict=True):
            if excluded:
                row, query = excluded.pairs(column[alive])
                place = np.searchsorted(asked, query)
                mine = asked[np.minimum(place, len(asked) - 1)] == query
                out[place[mine], row[mine]] = _NEVER

    def _seeds(self, heat: _Heat, asked: _Rows, grouped: _Scores, maxima: _Scores) -> _Scores:
        """The scores of the most promising rows, one of a group."""
        count = max(_SEEDS, 2 * self._k)
        group = np.argpartition(maxima, -count, axis=1)[:, -count:]
        query = np.broadcast_to(np.arange(len(asked))[:, None], group.shape)
        row = grouped[query, :, group].argmax(axis=2) * maxima.shape[1] + group
        real = np.take_along_axis(maxima, group, axis=1) > _NEVER
        known = np.full(group.shape, _NEVER)
        known[real] = self._products(asked, query[real], heat.ordinals(row[real]))
        return known

    def _raise_bar(self, asked: _Rows, scores: _Scores) -> None:
        """By scores of different rows, `(queries, rows)`, that did not raise it before."""
        contest = np.concatenate([self._best[asked], scores], axis=1)
        self._best[asked] = np.partition(contest, scores.shape[1], axis=1)[:, scores.shape[1] :]

    def _products(self, asked: _Rows, query: _Rows, ordinal: _Rows) -> _Scores:
        """Of (query, row) pairs that are given by query."""
        products = np.empty(len(query), np.float32)
        bounds = np.searchsorted(query, np.arange(len(asked) + 1)).tolist()
        for number, (start, stop) in zip(asked, pairwise(bounds), strict=True):
            if start < stop:
                order = np.argsort(ordinal[start:stop])
                keys = keys_at(self._spans, ordinal[start:stop][order])
                products[start:stop][order] = keys @ self._queries.keys[number]
        return products

    def _bar(self) -> _Scores:
        """What a row must reach; forbidden rows never do."""
        bar: _Scores = self._best.min(axis=1) - np.float32(_ROUNDING)
        return np.maximum(bar, np.finfo(np.float32).min)

    def _limit_ties(self, found: _Found) -> _Found:
        """Of rows that cannot be told apart (one state, met a thousand times) keep the oldest."""
        crowded = np.flatnonzero(np.bincount(found.query, minlength=len(self._queries)) > self._k + _TIES)
        if not len(crowded):
            return found
        keep = np.ones(len(found.query), np.bool_)
        clear = self._best.min(axis=1) + np.float32(_ROUNDING)
        for query in crowded:
            tied = np.flatnonzero((found.query == query) & (found.score <= clear[query]))
            by_age = np.argsort(found.ordinal[tied])
            keep[tied[by_age[self._k + _TIES :]]] = False
        return found.pick(keep)


def _reaching(grouped: _Scores, maxima: _Scores, bar: _Scores) -> tuple[_Rows, _Rows, _Scores]:
    """(query, row, score) of all that reach the bar, by query."""
    query, group = np.nonzero(maxima >= bar[:, None])
    members = grouped[query, :, group]
    pick, layer = np.nonzero(members >= bar[query, None])
    return query[pick], layer * maxima.shape[1] + group[pick], members[pick, layer]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Found:
    """Rows in the race, as columns."""

    query: _Rows
    ordinal: _Rows
    score: _Scores

    def pick(self, which: npt.NDArray[np.bool_]) -> _Found:
        return _Found(query=self.query[which], ordinal=self.ordinal[which], score=self.score[which])
