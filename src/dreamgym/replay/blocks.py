"""How the rows of one environment and source lie in memory: columns, in blocks, in the order of the log."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt

from dreamgym.protocols import Keys
from dreamgym.replay.sketch import PAGE_ROWS, Page

BLOCK_ROWS: Final = 4 * PAGE_ROWS

Hit: TypeAlias = tuple[float, int]
"""(similarity, number of the row in the log)"""
Numbers: TypeAlias = npt.NDArray[np.intp]
Scores: TypeAlias = npt.NDArray[np.float32]


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
    pages: tuple[Page | None, ...] = ()
    """Short forms of its keys, as far as pages are full; None where the keys do not allow any."""


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


def blocks_at(spans: Sequence[Span], ordinals: Numbers) -> Iterator[tuple[Block, slice, Numbers]]:
    """(block, which of the ordinals are its rows, where they lie in it), for rows that are given in order.

    The spans are those of blocks in a row.
    """
    first = spans[0].ordinal
    edges = np.searchsorted(ordinals, [span.ordinal for span in spans[1:]]).tolist()
    for number, (start, stop) in enumerate(pairwise([0, *edges, len(ordinals)])):
        if start < stop:
            part = slice(start, stop)
            yield spans[number].block, part, ordinals[part] - (first + number * BLOCK_ROWS)


def best_of(hits: list[Hit], k: int) -> list[Hit]:
    """The k best, by similarity and then by age."""
    return sorted(hits, key=lambda hit: (-hit[0], hit[1]))[:k]
