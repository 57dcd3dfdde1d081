"""The rows of one environment and source: appended, evicted, searched."""

from __future__ import annotations

import threading

import numpy as np
import numpy.typing as npt

from dreamgym.protocols import Keys
from dreamgym.replay.blocks import BLOCK_ROWS, Block, Hit, Queries, Span
from dreamgym.replay.bundles import Binder
from dreamgym.replay.race import search_spans
from dreamgym.replay.sketch import PAGE_ROWS, Plane, shortened


class Partition:
    """The rows of one environment and source; may be changed while others search."""

    def __init__(self, dimension: int) -> None:
        self.dimension = dimension
        self._lock = threading.Lock()
        self._blocks: list[Block] = []
        # Ordinals, counted from the first row ever: those before `_first` are evicted, `_last` is the next.
        self._first = 0
        self._last = 0
        self._plane: Plane | None = None
        """Of the newest short forms."""
        self._binder = Binder()

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
            pages = [page for block in self._blocks for page in block.pages if page is not None]
        bundles = self._binder.bundles
        short = sum(page.nbytes for page in pages) + (0 if bundles is None else bundles.nbytes)
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
        self._bind()
        if self._binder.bundles is None:
            self._shorten()

    def _bind(self) -> None:
        due = self._binder.due(self._first, self._last)
        if due is not None:
            spans = self.spans(due[0])
            keys = [span.block.keys[span.start : span.stop] for span in spans]
            rewards = np.concatenate([span.block.rewards[span.start : span.stop] for span in spans])
            self._binder.bind(keys, rewards, np.arange(*due), self._first)

    def _shorten(self) -> None:
        for number, block in enumerate(self._blocks, start=self._first // BLOCK_ROWS):
            filled = self._last - number * BLOCK_ROWS
            for start in range(
                len(block.pages) * PAGE_ROWS, min(filled, BLOCK_ROWS) - PAGE_ROWS + 1, PAGE_ROWS
            ):
                page = shortened(block.keys[start : start + PAGE_ROWS], self._plane)
                self._plane = self._plane if page is None else page.plane
                block.pages = (*block.pages, page)

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

    def search(self, queries: Queries, k: int, *, first: int = 0) -> list[list[Hit]]:
        """The k best live rows for each query, by similarity and then by age.

        Args:
            first: search those from this one ever stored on.
        """
        bundles = self._binder.bundles  # before the rows: those that come now are in no bundle
        return search_spans(self.spans(first), queries, k, bundles)
