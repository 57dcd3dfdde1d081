"""Short forms of keys that tell how similar a row can be at most, so that most rows need not be read whole.

Keys of real text lie near a plane of few dimensions. A row's short form is where it lies in that plane and,
as one number, how far off the plane it is. By Cauchy and Schwarz the product of two short forms is never less
than the product of the keys: whatever stays below the k-th best so far by its short form is out for certain.
Answers are therefore exact, and the same at any time, which inverted lists cannot promise.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Self

import numpy as np
import numpy.typing as npt

from dreamgym.protocols import Keys

COLUMNS: Final = 64
"""Of a short form: a sixth of the default embedder's keys. With fewer, more rows are left to read."""
PAGE_ROWS: Final = 4096
"""Rows that are shortened at once; until then they are read whole."""
_MOST_LEFT: Final = 0.5
"""Share of the keys' squared length off the plane, above which short forms would rule out too little."""
_WORN: Final = 1.25
"""How much more than of its first page a plane may leave of another, before that gets a plane of its own."""


class Plane:
    """The few directions in which most of some keys lies."""

    def __init__(self, directions: npt.NDArray[np.float32]) -> None:
        self._directions = directions
        self.left = 1.0
        """Share of the squared length of the keys it was made from that lies off it."""

    @classmethod
    def of(cls, keys: Keys, columns: int = COLUMNS) -> Self | None:
        """None if the keys lie near no plane: short forms would only be one more thing to read.

        Args:
            columns: of a short form.

        >>> random = np.random.default_rng(0)
        >>> Plane.of(random.normal(size=(2000, 400)).astype(np.float32)) is None
        True
        """
        if keys.shape[1] < 2 * columns:
            return None
        _, directions = np.linalg.eigh(keys.T @ keys)  # from the least to the most important
        plane = cls(np.ascontiguousarray(directions[:, :-columns:-1], np.float32))
        plane.left = left_of(plane.shorten(keys))
        return plane if plane.left <= _MOST_LEFT else None

    def shorten(self, keys: Keys) -> npt.NDArray[np.float32]:
        """
        >>> plane = Plane(np.eye(3, 2, dtype=np.float32))
        >>> plane.shorten(np.array([[0.6, 0.0, 0.8]], np.float32)).round(3).tolist()
        [[0.6000000238418579, 0.0, 0.800000011920929]]
        """
        inside = keys @ self._directions
        # Not from the lengths: where little is left, their difference is mostly rounding.
        off = np.linalg.norm(keys - inside @ self._directions.T, axis=1)
        return np.column_stack([inside, off])


def left_of(short: npt.NDArray[np.float32]) -> float:
    """Share of squared length off the plane.

    >>> left_of(np.array([[0.6, 0.8]], np.float32))
    0.64
    """
    squares = np.square(short).sum(axis=0, dtype=np.float64)
    return round(float(squares[-1] / max(squares.sum(), 1e-30)), 6)


@dataclass(frozen=True, slots=True)
class Page:
    """The short forms of `PAGE_ROWS` rows."""

    plane: Plane
    columns: npt.NDArray[np.float32]
    """One for each row: products with a few queries take two thirds of the time that rows would."""

    @property
    def nbytes(self) -> int:
        return self.columns.nbytes


def shortened(keys: Keys, plane: Plane | None) -> Page | None:
    """
    Args:
        plane: of rows before, which serves for most: queries are then shortened once for all.
    """
    if plane is not None:
        short = plane.shorten(keys)
        if left_of(short) <= min(_WORN * plane.left, _MOST_LEFT):
            return Page(plane, np.ascontiguousarray(short.T))
    plane = Plane.of(keys)
    return None if plane is None else Page(plane, np.ascontiguousarray(plane.shorten(keys).T))
