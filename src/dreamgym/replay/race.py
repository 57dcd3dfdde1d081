"""Exact nearest-neighbour search: every row enters a race that nearly all of them leave at once.

Rows run in heats. A heat's scores, or where keys have short forms (`sketch`) the most that they can be, are a
few matrix products for all queries at once; filters set those of forbidden rows to minus infinity *before*
anything is chosen. The most promising rows are scored first, which sets a bar; then only the maxima of small
groups of rows are looked at, since a group whose maximum is below the bar cannot matter. So nearly all scores
are never touched again, nearly all keys never read, and Python never sees a single row. Rows in bundles need
not run: `shortlist` looks at them.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Final

import numpy as np
import numpy.typing as npt

from dreamgym.replay.blocks import Hit, Numbers, Queries, Scores, Span
from dreamgym.replay.bundles import Bundles
from dreamgym.replay.shortlist import run_bundles
from dreamgym.replay.sketch import PAGE_ROWS, Plane
from dreamgym.replay.standings import NEVER, Pairs, Standings

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
_BUCKETS: Final = 1 << 16


def search_spans(
    spans: Sequence[Span], queries: Queries, k: int, bundles: Bundles | None = None
) -> list[list[Hit]]:
    """The k best rows of spans of blocks in a row for each query, by similarity and then by age.

    Args:
        bundles: of these rows or some of them, and perhaps of others that are not alive any more.
    """
    if not spans or k == 0:
        return [[] for _ in range(len(queries))]
    standings = Standings(spans, queries, k)
    race = _Race(standings)
    everybody = left = np.arange(len(queries))
    at_once = max(PAGE_ROWS, _HEAT // len(queries))
    first = spans[0].ordinal + spans[0].start
    stop = first if bundles is None else max(first, bundles.stop)
    for heat in _heats(_between(spans, stop, None), at_once):
        race.run(heat, everybody)
    if bundles is not None and first < stop:
        left = run_bundles(bundles, standings, first)
    for heat in _heats(_between(spans, first, stop), at_once) if len(left) else ():
        race.run(heat, left)
    return standings.finish()


def _between(spans: Sequence[Span], start: int, stop: int | None) -> list[Span]:
    """The rows from one ordinal to another."""
    cut = [
        replace(
            span,
            start=max(span.start, start - span.ordinal),
            stop=span.stop if stop is None else min(span.stop, stop - span.ordinal),
        )
        for span in spans
    ]
    return [span for span in cut if span.start < span.stop]


class Excluded:
    """Finds, in a column of codes, the rows that each query wants to leave out."""

    def __init__(self, codes: npt.NDArray[np.int64]) -> None:
        self._codes = codes
        self._wanted = np.unique(codes[codes != 0])
        self._buckets = np.zeros(_BUCKETS, np.bool_)
        self._buckets[self._wanted & (_BUCKETS - 1)] = True

    def __bool__(self) -> bool:
        return len(self._wanted) > 0

    def pairs(self, column: npt.NDArray[np.int64]) -> tuple[Numbers, Numbers]:
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

    def ordinals(self, row: Numbers) -> Numbers:
        """Of rows of the heat, among all rows of the partition."""
        first = np.array([span.ordinal + span.start for span in self.spans]) - self.edges[:-1]
        span = np.searchsorted(self.edges, row, side="right") - 1
        ordinals: Numbers = row + first[span]
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

    def scores(self, queries: int, rows: int) -> Scores:
        if len(self._memory) < queries * rows:
            self._memory = np.empty(queries * rows, np.float32)
        return self._memory[: queries * rows].reshape(queries, rows)


_workspace = _Workspace()


class _Race:
    """Rows run against all queries, heat by heat."""

    def __init__(self, standings: Standings) -> None:
        self._standings = standings
        self._queries = standings.queries
        self._k = standings.k
        self._excluded = (Excluded(self._queries.trajectories), Excluded(self._queries.tasks))
        self._short: dict[Plane, Scores] = {}

    def run(self, heat: _Heat, asked: Numbers) -> None:
        """`asked` are the numbers of the queries."""
        left = asked
        if heat.shortened and (len(heat) > _FEW_ROWS or len(asked) < _MANY_QUERIES):
            left = self._run_short(heat, asked)
        if len(left):
            self._run_whole(heat, left)

    def _run_short(self, heat: _Heat, asked: Numbers) -> Numbers:
        """By short forms, where there are any; the queries for which too many rows are left come back."""
        standings = self._standings
        grouped, maxima = self._scores(heat, asked, whole=False)
        known = self._seeds(heat, asked, grouped, maxima)
        query, row, _ = _reaching(grouped, maxima, standings.bar_with(asked, known))
        many = np.bincount(query, minlength=len(asked)) > _MOST_LEFT * len(heat)
        few = ~many
        standings.raise_bar(asked[few], known[few])
        keep = few[query]
        query, ordinal = asked[query[keep]], heat.ordinals(row[keep])
        score = standings.products(query, ordinal)
        stay = score >= standings.bar()[query]
        standings.keep(Pairs(query=query[stay], ordinal=ordinal[stay], score=score[stay]))
        return asked[many]

    def _run_whole(self, heat: _Heat, asked: Numbers) -> None:
        grouped, maxima = self._scores(heat, asked, whole=True)
        # Every maximum is a different row, so the k-th best of them bounds the k-th best row from below.
        self._standings.raise_bar(asked, maxima)
        query, row, score = _reaching(grouped, maxima, self._standings.bar()[asked])
        self._standings.keep(Pairs(query=asked[query], ordinal=heat.ordinals(row), score=score))

    def _scores(self, heat: _Heat, asked: Numbers, *, whole: bool) -> tuple[Scores, Scores]:
        """Of all rows, `(queries, layers, groups)`, and the maxima of the groups.

        What short forms tell is the most that a score can be.
        """
        groups = max(_GROUPS, 2 * self._k, -(-len(heat) // _LAYERS))
        layers = -(-len(heat) // groups)
        scores = _workspace.scores(len(asked), layers * groups)
        scores[:, len(heat) :] = NEVER
        for span, place in heat:
            self._multiply(span, asked, scores[:, place], whole=whole)
            self._forbid(span, asked, scores[:, place])
        grouped = scores.reshape(len(asked), layers, groups)
        return grouped, grouped.max(axis=1)

    def _multiply(self, span: Span, asked: Numbers, out: Scores, *, whole: bool) -> None:
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

    def _forbid(self, span: Span, asked: Numbers, out: Scores) -> None:
        block, alive = span.block, slice(span.start, span.stop)
        if self._queries.min_reward is not None:
            np.copyto(out, NEVER, where=block.rewards[alive] < self._queries.min_reward)
        for excluded, column in zip(self._excluded, (block.trajectories, block.tasks), strict=True):
            if excluded:
                row, query = excluded.pairs(column[alive])
                place = np.searchsorted(asked, query)
                mine = asked[np.minimum(place, len(asked) - 1)] == query
                out[place[mine], row[mine]] = NEVER

    def _seeds(self, heat: _Heat, asked: Numbers, grouped: Scores, maxima: Scores) -> Scores:
        """The scores of the most promising rows, one of a group."""
        count = max(_SEEDS, 2 * self._k)
        group = np.argpartition(maxima, -count, axis=1)[:, -count:]
        query = np.broadcast_to(np.arange(len(asked))[:, None], group.shape)
        row = grouped[query, :, group].argmax(axis=2) * maxima.shape[1] + group
        real = np.take_along_axis(maxima, group, axis=1) > NEVER
        known = np.full(group.shape, NEVER)
        known[real] = self._standings.products(asked[query[real]], heat.ordinals(row[real]))
        return known


def _reaching(grouped: Scores, maxima: Scores, bar: Scores) -> tuple[Numbers, Numbers, Scores]:
    """(query, row, score) of all that reach the bar, by query."""
    query, group = np.nonzero(maxima >= bar[:, None])
    members = grouped[query, :, group]
    pick, layer = np.nonzero(members >= bar[query, None])
    return query[pick], layer * maxima.shape[1] + group[pick], members[pick, layer]
