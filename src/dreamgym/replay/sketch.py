"""Short forms of keys that tell how similar a row can be at most, so that most rows need not be read whole.

Keys of real text lie near a plane of few dimensions. A row's short form is where it lies in that plane and,
as one number, how far off the plane it is. By Cauchy and Schwarz the product of two short forms is never less
than the product of the keys: whatever stays below the k-th best so far by its short form is out for certain.
Answers are therefore exact, and the same at any time, which inverted lists cannot promise.
"""

from __future__ import annotations

from typing import Final, Self

import numpy as np
import numpy.typing as npt

from dreamgym.protocols import Keys

COLUMNS: Final = 64
"""Of a short form: a sixth of the default embedder's keys. With 32, more rows are left to read."""
_MOST_LEFT: Final = 0.5
"""Share of the keys' squared length off the plane, above which short forms would rule out too little."""


class Sketch:
    """The short forms of the rows of one full block."""

    def __init__(self, plane: npt.NDArray[np.float32], rows: npt.NDArray[np.float32]) -> None:
        self._plane = plane
        # A column for each row: products with a few queries then take two thirds of the time.
        self._columns = np.ascontiguousarray(rows.T)

    @classmethod
    def of(cls, keys: Keys) -> Self | None:
        """None if the keys lie near no plane: short forms would only be one more thing to read.

        >>> random = np.random.default_rng(0)
        >>> Sketch.of(random.normal(size=(2000, 400)).astype(np.float32)) is None
        True
        """
        if keys.shape[1] < 2 * COLUMNS:
            return None
        _, directions = np.linalg.eigh(keys.T @ keys)  # from the least to the most important
        plane = np.ascontiguousarray(directions[:, :-COLUMNS:-1], np.float32)
        rows = _shorten(keys, plane)
        left, whole = np.square(rows[:, -1]).sum(), np.square(keys).sum()
        return cls(plane, rows) if left <= _MOST_LEFT * whole else None

    @property
    def nbytes(self) -> int:
        return self._columns.nbytes

    def bounds(
        self, which: slice | npt.NDArray[np.intp], queries: Keys, out: npt.NDArray[np.float32]
    ) -> None:
        """How similar these rows can be to each query at most, into `out`, `(rows, queries)`."""
        out[:] = (_shorten(queries, self._plane) @ self._columns[:, which]).T


def _shorten(keys: Keys, plane: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """
    >>> plane = np.eye(3, 2, dtype=np.float32)
    >>> _shorten(np.array([[0.6, 0.0, 0.8]], np.float32), plane).round(3).tolist()
    [[0.6000000238418579, 0.0, 0.800000011920929]]
    """
    inside = keys @ plane
    # Not from the lengths: where little is left, their difference is mostly rounding.
    off = np.linalg.norm(keys - inside @ plane.T, axis=1)
    return np.column_stack([inside, off])
