"""From bundles to rows to keys: what few rows may be among the k best of each query.

A bundle promises that none of its rows is more similar than so much, and a row's short form promises less.
What is promised most is looked at first, which sets the bar for all that follows: nearly no bundle reaches
it, few rows of those that do, and only their keys are read.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Final

import numpy as np
import numpy.typing as npt

from dreamgym.replay.blocks import Numbers, Scores, blocks_at
from dreamgym.replay.bundles import Bundles
from dreamgym.replay.standings import NEVER, Pairs, Standings, joined, segments

_BUNDLES: Final = 64
"""Of a query, that are looked at to begin with."""
_ROWS: Final = (256, 4096)
"""And how many rows of them: more if nearly all of these are left out by a filter."""
_SEEDS: Final = 32
"""Rows whose keys are read first, because they promise most: they set the bar."""
_MANY: Final = 256
"""Rows that reach it, above which it is worth to raise it once more."""
_TOO_MANY: Final = 1 / 16
"""Share of all rows, above which reading them all is cheaper."""
_FEW_ALLOWED: Final = 1024
"""Rows left by a smallest reward, up to which all of them are read."""
_PLACES: Final = 1 << 18
"""Rows that are looked at together."""


def run_bundles(bundles: Bundles, standings: Standings, first: int) -> Numbers:
    """All rows in bundles against all queries; those for which too many rows are left come back.

    Args:
        first: ordinal of the oldest row that is alive.
    """
    return _Shortlist(bundles, standings, first).run()


class _Shortlist:
    def __init__(self, bundles: Bundles, standings: Standings, first: int) -> None:
        queries, columns = standings.queries, len(bundles.centres)
        heads, tails = queries.keys[:, :-columns], queries.keys[:, -columns:]
        self._bundles = bundles
        self._standings = standings
        self._first = first
        self._short = bundles.plane.shorten(heads)
        self._ends = tails @ bundles.centres
        """What a bundle's end makes of a row at most, `(queries, bundles)`."""
        self._ends += np.float32(bundles.spread) * np.linalg.norm(tails, axis=1)[:, None]
        self._beginnings = np.float32(bundles.reach) * np.linalg.norm(heads, axis=1)
        """What its beginning adds at most."""
        self._allowed = None
        if queries.min_reward is not None:
            self._allowed = bundles.rewards >= queries.min_reward
            before = np.concatenate([[0], np.cumsum(self._allowed)])
            self._ends[:, before[bundles.edges[:-1]] == before[bundles.edges[1:]]] = NEVER

    def run(self) -> Numbers:
        if self._allowed is not None and np.count_nonzero(self._allowed) <= _FEW_ALLOWED:
            self._run_all(np.flatnonzero(self._allowed))
            return np.empty(0, np.intp)
        standings, bar = self._standings, self._standings.bar()
        asked = np.arange(len(bar))
        for rows in _ROWS:
            known, few = self._seeds(asked, rows)
            bar[asked] = np.maximum(bar[asked], standings.bar_with(asked, known))
            asked = asked[few]
            if not len(asked):
                break
        pairs = self._reaching(bar)
        crowded = np.bincount(pairs.query, minlength=len(bar)) > _MANY
        if crowded.any():
            bar = np.maximum(bar, self._bar_with(pairs.pick(crowded[pairs.query])))
            pairs = pairs.pick(pairs.score >= bar[pairs.query])
        most = max(_MANY, _TOO_MANY * len(self._bundles))
        left = np.bincount(pairs.query, minlength=len(bar)) > most
        self._enter(pairs.pick(~left[pairs.query]), bar)
        return np.flatnonzero(left)

    def _run_all(self, places: Numbers) -> None:
        """Without asking bundles what they promise, since filters left few rows."""
        query = np.repeat(np.arange(len(self._ends)), len(places))
        places = np.tile(places, len(self._ends))
        ordinal = self._bundles.ordinals[places]
        keep = self._left_in(query, ordinal, places)
        everything = Pairs(query=query, ordinal=ordinal, score=np.full(len(query), np.inf, np.float32))
        self._enter(everything.pick(keep), self._standings.bar())

    def _enter(self, pairs: Pairs, bar: Scores) -> None:
        standings, k = self._standings, self._standings.k
        score = standings.products(pairs.query, pairs.ordinal)
        best = np.full_like(standings.best, NEVER)
        for number, part in pairs.segments():
            leaders = score[part]
            if len(leaders) > k:
                leaders = np.partition(leaders, -k)[-k:]
            best[number, : len(leaders)] = leaders
        standings.raise_bar(np.arange(len(best)), best)
        stay = score >= bar[pairs.query]
        standings.keep(Pairs(query=pairs.query[stay], ordinal=pairs.ordinal[stay], score=score[stay]))

    def _bar_with(self, pairs: Pairs) -> Scores:
        """The bar if the most promising of these were known."""
        count = max(_SEEDS, 2 * self._standings.k)
        which, place = [], []
        for _, part in pairs.segments():
            few = np.arange(part.start, part.stop)
            if len(few) > count:
                few = part.start + np.argpartition(pairs.score[part], -count)[-count:]
            which.append(few)
            place.append(np.arange(len(few)))
        scores = np.full((len(self._ends), count), NEVER)
        if which:
            seeds = pairs.pick(np.concatenate(which))
            known = self._standings.products(seeds.query, seeds.ordinal)
            scores[seeds.query, np.concatenate(place)] = known
        return self._standings.bar_with(np.arange(len(scores)), scores)

    def _seeds(self, asked: Numbers, rows: int) -> tuple[Scores, npt.NDArray[np.bool_]]:
        """(scores of promising rows, `(queries, seeds)`; for which queries there were not even k)."""
        ordinal, promised = self._promising(asked, rows)
        count = min(max(_SEEDS, 2 * self._standings.k), promised.shape[1])
        which = np.argpartition(promised, -count, axis=1)[:, -count:]
        ordinal = np.take_along_axis(ordinal, which, axis=1)
        real = np.take_along_axis(promised, which, axis=1) > NEVER
        query = np.broadcast_to(asked[:, None], real.shape)
        known = np.full(real.shape, NEVER)
        known[real] = self._standings.products(query[real], ordinal[real])
        return known, real.sum(axis=1) < self._standings.k

    def _promising(self, asked: Numbers, rows: int) -> tuple[Numbers, Scores]:
        """(ordinals, promises) of so many rows of the best bundles, or of as many as all have."""
        which = self._best(asked)
        counts = np.diff(self._bundles.edges)[which]
        so_far = counts.cumsum(axis=1)
        rows = min(rows, int(so_far[:, -1].min()))  # of all queries as many, so that one product does for all
        counts = np.diff(np.minimum(so_far, rows), axis=1, prepend=0)
        places = self._bundles.places(which.ravel(), counts.ravel())
        short = self._bundles.short.take(places, axis=0).reshape(len(asked), rows, -1)
        ends = np.take_along_axis(self._ends[asked], which, axis=1)
        promised = np.matmul(short, self._short[asked][:, :, None])[:, :, 0]
        promised += np.repeat(ends.ravel(), counts.ravel()).reshape(promised.shape)
        ordinal, query = self._bundles.ordinals[places], np.repeat(asked, rows)
        promised.ravel()[~self._left_in(query, ordinal, places)] = NEVER
        return ordinal.reshape(promised.shape), promised

    def _best(self, asked: Numbers) -> Numbers:
        """Promising bundles, `(queries, bundles)`, the best first."""
        # The best of every stripe, not the best of all: to sort them would take a quarter of the search.
        most = self._ends[asked]
        whole = most.shape[1] - most.shape[1] % _BUNDLES
        found = np.broadcast_to(np.arange(whole, most.shape[1]), (len(asked), most.shape[1] - whole))
        if whole:
            stripes = most[:, :whole].reshape(len(asked), -1, _BUNDLES).argmax(axis=1)
            found = np.concatenate([stripes * _BUNDLES + np.arange(_BUNDLES), found], axis=1)
        order = np.argsort(-np.take_along_axis(most, found, axis=1), axis=1)
        return np.take_along_axis(found, order, axis=1)

    def _reaching(self, bar: Scores) -> Pairs:
        """All rows that may reach the bar, by query."""
        query, bundle = np.nonzero(self._ends >= (bar - self._beginnings)[:, None])
        counts = self._bundles.edges[bundle + 1] - self._bundles.edges[bundle]
        cuts = np.flatnonzero(np.diff((counts.cumsum() - 1) // _PLACES)) + 1
        parts = [
            self._rows(query[start:stop], bundle[start:stop], counts[start:stop], bar)
            for start, stop in pairwise([0, *cuts.tolist(), len(query)])
        ]
        return parts[0] if len(parts) == 1 else joined(parts)

    def _rows(self, query: Numbers, bundle: Numbers, counts: Numbers, bar: Scores) -> Pairs:
        places, promised = self._bundles.places(bundle, counts), np.repeat(self._ends[query, bundle], counts)
        owner = np.repeat(query, counts)
        for number, part in segments(owner):
            promised[part] += self._bundles.short.take(places[part], axis=0) @ self._short[number]
        keep = np.flatnonzero(promised >= bar[owner])
        places, owner = places[keep], owner[keep]
        pairs = Pairs(query=owner, ordinal=self._bundles.ordinals[places], score=promised[keep])
        return pairs.pick(self._left_in(owner, pairs.ordinal, places))

    def _left_in(self, query: Numbers, ordinal: Numbers, places: Numbers) -> npt.NDArray[np.bool_]:
        """Which pairs are of rows that are alive, and that their query does not leave out."""
        queries, keep = self._standings.queries, ordinal >= self._first
        if queries.trajectories.any() or queries.tasks.any():
            order = np.argsort(ordinal)
            order = order[len(keep) - np.count_nonzero(keep) :]
            for block, part, rows in blocks_at(self._standings.spans, ordinal[order]):
                which = order[part]
                keep[which] = block.trajectories[rows] != queries.trajectories[query[which]]
                keep[which] &= block.tasks[rows] != queries.tasks[query[which]]
        if self._allowed is not None:
            keep &= self._allowed[places]
        return keep
