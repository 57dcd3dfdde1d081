"""Bundles of rows whose keys end alike: one product tells how similar any row of a bundle can be at most.

A key of the default embedder ends with what its action makes of it, and 100,000 rows of a household know
6,000 actions. So a search looks at the bundles first: a row can be no more similar than the end of its bundle
makes it, plus all that a beginning can add. Few bundles then reach the k-th best so far, and only their rows
are looked at, by short forms (`sketch`) of the beginnings, which lie bundle by bundle in memory. Nobody needs
to say where the end of a key begins: it is where few different ones are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from dreamgym.protocols import Keys
from dreamgym.replay.blocks import Numbers, Scores
from dreamgym.replay.sketch import Plane

COLUMNS: Final = 32
"""Of a beginning's short form. With 24 or 64 a search takes as long: fewer keys to read, more to look at."""
FIRST_ROWS: Final = 4096
"""Rows from which on bundles are made."""
_MORE_ROWS: Final = 2048
"""Rows that are sorted in at once, or a 64th of all; until then they are read whole."""
_ENDS: Final = (1 / 2, 1 / 3, 1 / 4)
"""Of a key, that are looked at."""
_FEW: Final = 1 / 4
"""Different ends for each row, at most: with more, bundles are hardly fewer than rows."""
_MORE: Final = 1.5
"""Times as many as in the shortest end, at most: with more, it holds a part of the beginning."""
_STEPS: Final = 64.0
"""Ends that are equal when rounded to this part of 1 are in one bundle."""
_SAMPLE: Final = 8192


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Bundles:
    """Rows of a partition by bundle; never changed, so that searches may go on while rows arrive."""

    stop: int
    """Ordinal of the first row that came too late to be here."""
    plane: Plane
    """Of the beginnings."""
    centres: Scores
    """The end of a row of each bundle, `(columns, bundles)`."""
    spread: float
    """How far the other ends of a bundle are from it at most."""
    reach: float
    """Length of the longest beginning."""
    edges: Numbers
    """Where the rows of each bundle begin, and the last one ends."""
    bundle: npt.NDArray[np.int32]
    """Of each row. This and what follows is in the order of bundles, and by age within them."""
    ordinals: Numbers
    short: Scores
    """Short forms of the beginnings."""
    rewards: npt.NDArray[np.float64]

    def __len__(self) -> int:
        return len(self.ordinals)

    @property
    def nbytes(self) -> int:
        columns = (self.centres, self.bundle, self.ordinals, self.short, self.rewards)
        return sum(column.nbytes for column in columns)

    def places(self, which: Numbers, counts: Numbers) -> Numbers:
        """Where the `counts` oldest rows of bundles lie, one bundle after the other."""
        places = np.repeat(self.edges[which] - counts.cumsum() + counts, counts)
        places += np.arange(len(places))
        return places


class Binder:
    """Sorts the rows of one partition into bundles as they come."""

    def __init__(self) -> None:
        self.bundles: Bundles | None = None
        self._numbers: dict[int, int] = {}
        self._due = FIRST_ROWS
        """Ordinal at which all rows are looked at again: there are twice as many, or others."""

    def due(self, first: int, last: int) -> tuple[int, int] | None:
        """Which rows to pass to `bind` now, if those from `first` to `last` are alive."""
        if last >= self._due and last - first >= FIRST_ROWS:
            return first, last
        if self.bundles is not None and last - self.bundles.stop >= max(_MORE_ROWS, len(self.bundles) // 64):
            return max(first, self.bundles.stop), last
        return None

    def bind(
        self, parts: Sequence[Keys], rewards: npt.NDArray[np.float64], ordinals: Numbers, first: int
    ) -> None:
        """
        Args:
            parts: the keys of rows that are due, block by block.
            first: ordinal of the oldest row that is alive.
        """
        old, rows, columns, plane = self.bundles, len(ordinals), 0, None
        if old is not None and ordinals[0] > first:
            columns, plane = len(old.centres), old.plane
        else:
            self._due = int(ordinals[-1]) + 1 + max(FIRST_ROWS, rows)
            self._numbers, old = {}, None
            columns = end_of(parts)
            sample = np.concatenate([part[:: -(-rows // _SAMPLE)] for part in parts])
            plane = Plane.of(sample[:, :-columns], COLUMNS) if columns else None
        # Assigned at last: searches go on meanwhile.
        self.bundles = (
            None if plane is None else self._bound(parts, rewards, ordinals, first, columns, plane, old)
        )

    def _bound(
        self,
        parts: Sequence[Keys],
        rewards: npt.NDArray[np.float64],
        ordinals: Numbers,
        first: int,
        columns: int,
        plane: Plane,
        old: Bundles | None,
    ) -> Bundles:
        bundles, shorts = [], []
        ends = np.empty((0, columns), np.float32) if old is None else old.centres.T
        spread, reach = (0.0, 0.0) if old is None else (old.spread, old.reach)
        for part in parts:
            heads, tails = part[:, :-columns], part[:, -columns:]
            bundle, openers = self._sort_in(tails)
            ends = np.concatenate([ends, tails[openers]])
            spread = max(spread, float(np.linalg.norm(tails - ends[bundle], axis=1).max()))
            reach = max(reach, float(np.linalg.norm(heads, axis=1).max()))
            bundles.append(bundle)
            shorts.append(plane.shorten(heads))
        if old is not None:
            alive = old.ordinals >= first
            bundles, shorts = [old.bundle[alive], *bundles], [old.short[alive], *shorts]
            ordinals = np.concatenate([old.ordinals[alive], ordinals])
            rewards = np.concatenate([old.rewards[alive], rewards])
        of_row = np.concatenate(bundles)
        order = np.argsort(of_row, kind="stable")
        of_row = of_row[order]
        return Bundles(
            stop=int(ordinals[-1]) + 1,
            plane=plane,
            centres=np.ascontiguousarray(ends.T),
            spread=spread,
            reach=reach,
            edges=np.searchsorted(of_row, np.arange(len(ends) + 1)),
            bundle=of_row,
            ordinals=ordinals[order],
            short=np.concatenate(shorts)[order],
            rewards=rewards[order],
        )

    def _sort_in(self, tails: Keys) -> tuple[npt.NDArray[np.int32], Numbers]:
        """(bundle of each, those that opened one)."""
        values, openers, inverse = np.unique(marks(tails), return_index=True, return_inverse=True)
        new = [number for number, value in enumerate(values.tolist()) if value not in self._numbers]
        for number in new:
            self._numbers[int(values[number])] = len(self._numbers)
        bundles = np.array([self._numbers[value] for value in values.tolist()], np.int32)
        return bundles[inverse], openers[new]


def end_of(parts: Sequence[Keys]) -> int:
    """How many columns at the end of these keys hold few different vectors; 0 if there are none.

    >>> states = np.random.default_rng(0).normal(size=(1000, 8))
    >>> actions = np.eye(4)[np.arange(1000) % 4]
    >>> end_of([np.hstack([states, actions])]), end_of([states])
    (4, 0)
    """
    found = {}
    for columns in (int(parts[0].shape[1] * share) for share in _ENDS):
        found[columns] = np.unique(np.concatenate([marks(part[:, -columns:]) for part in parts])).size
    # The longest that has no more of them than shorter ones: it tells most about a row.
    most = min(_FEW * sum(map(len, parts)), _MORE * min(found.values()))
    return next((columns for columns, different in found.items() if different <= most), 0)


def marks(tails: Keys) -> npt.NDArray[np.int64]:
    """A number for each: the same for those that are alike. Others may share it, which costs time only."""
    # Whole numbers that single precision adds without rounding, whatever the order: as quick as a product is.
    mixers = np.random.default_rng(0).integers(0, 1 << 10, (tails.shape[1], 3)).astype(np.float32)
    low, middle, high = (np.rint(tails * np.float32(_STEPS)) @ mixers).astype(np.int64).T
    mixed: npt.NDArray[np.int64] = low ^ (middle << 20) ^ (high << 40)
    return mixed
