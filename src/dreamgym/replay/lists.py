"""Approximate search for partitions too large to scan: inverted lists (FAISS IVF).

Rows are sorted into lists of like keys, and a search looks into a tenth of the lists. What it finds is scored
again with the stored keys. Lists are made again in the background when the partition has grown by half, so
that they fit what is there; rows not sorted in yet are scanned exactly, so fresh rows are never missed.

A graph (HNSW) would be the usual choice. On the keys of a household it lost whole families of rows that lie
apart from the rest: recall@8 was 0.90, against 1.00 for lists of the same cost (docs/decisions/0002).
"""

from __future__ import annotations

import logging
import math
import threading
import time
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from dreamgym.errors import MissingExtraError
from dreamgym.protocols import Keys
from dreamgym.replay.blocks import BLOCK_ROWS, Hit, Queries, Span, best_of
from dreamgym.replay.partition import Partition
from dreamgym.replay.race import Excluded
from dreamgym.replay.standings import rank

FEW_ROWS: Final = 5000
"""So many survivors of a filter are scanned exactly: that is as quick, and certain."""

_LISTS_PER_ROOT: Final = 2.0
_SHARE_SEARCHED: Final = 0.1
_SAMPLES_PER_LIST: Final = 40
_GROWTH: Final = 1.5
_ROWS_AT_ONCE: Final = 4096
"""Rows sorted in under one lock: some 50 ms during which searches wait."""
_SPARE: Final = 8
"""Rows fetched beyond k, because lists hold keys in half precision."""
_MOST_EXCLUDED: Final = 256
"""Rows a query may exclude: that many more are fetched, which costs; beyond it, a scan is cheaper."""

logger = logging.getLogger("dreamgym.replay")


def load_faiss() -> Any:
    try:
        import faiss
    except ImportError:
        raise MissingExtraError("the approximate index", "faiss") from None
    return faiss


class Lists:
    """Follows one partition and answers for it."""

    def __init__(self, partition: Partition) -> None:
        self._partition = partition
        self._lock = threading.Lock()
        self._faiss = load_faiss()
        self._index: Any = None
        # Ordinals of the rows in the lists: from `_first` up to, but without, `_built`.
        self._first = self._built = partition.first
        self._made_for = 0

    @property
    def missing(self) -> int:
        """Live rows that are not in the lists yet."""
        return self._partition.last - max(self._built, self._partition.first)

    def extend(self) -> bool:
        """Take in more rows, or make the lists again if they no longer fit; False if all is well."""
        rows = len(self._partition)
        if rows == 0:
            return False
        forgotten = self._partition.first - self._first
        if self._index is None or rows > _GROWTH * self._made_for or forgotten > max(FEW_ROWS, rows):
            self._make_again()
            return True
        spans = self._partition.spans(self._built)
        if not spans:
            return False
        span = spans[0]
        stop = min(span.stop, span.start + _ROWS_AT_ONCE)
        with self._lock:
            self._index.add(span.block.keys[span.start : stop])
            self._built = span.ordinal + stop
        return True

    def search(self, queries: Queries, k: int) -> list[list[Hit]]:
        """Like `Partition.search`, nearly always with the same answer."""
        with self._lock:
            spans = self._partition.spans()
            allowed = self._allowed(spans, queries)
            excluded = self._excluded(spans, queries)
            most = max(len(rows) for rows in excluded)
            survivors = int(np.count_nonzero(allowed))
            if survivors <= max(FEW_ROWS, 20 * (k + most)) or most > _MOST_EXCLUDED:
                return self._partition.search(queries, k)
            numbers = self._nearest(queries.keys, k + most + _SPARE, allowed, survivors)
            built = self._built
            ordinals = numbers + self._first
        pairs = [
            (query, ordinal)
            for query, row in enumerate(ordinals.tolist())
            for ordinal in row
            if ordinal not in excluded[query] and ordinal >= spans[0].ordinal + spans[0].start
        ]
        table = np.array(pairs, np.intp).reshape(-1, 2)
        found = rank(spans, queries, table[:, 0], table[:, 1], k)
        both = zip(found, self._partition.search(queries, k, first=built), strict=True)
        return [best_of(old + new, k) for old, new in both]

    def _make_again(self) -> None:
        """Searches go on with the old lists until the new ones are complete."""
        spans = self._partition.spans()
        rows = sum(len(span) for span in spans)
        index = self._trained(spans, rows)
        for span in spans:
            index.add(span.block.keys[span.start : span.stop])
        with self._lock:
            self._index = index
            self._first = spans[0].ordinal + spans[0].start
            self._built = self._first + rows
            self._made_for = rows

    def _trained(self, spans: list[Span], rows: int) -> Any:
        faiss = self._faiss
        dimension = self._partition.dimension
        lists = max(1, round(_LISTS_PER_ROOT * math.sqrt(rows)))
        quantizer = faiss.IndexFlatIP(dimension)
        index = faiss.IndexIVFScalarQuantizer(
            quantizer, dimension, lists, faiss.ScalarQuantizer.QT_fp16, faiss.METRIC_INNER_PRODUCT, False
        )
        index.cp.niter = 5
        index.cp.min_points_per_centroid = 1
        rng = np.random.default_rng(0)
        share = min(1.0, _SAMPLES_PER_LIST * lists / rows)
        sample = [span.block.keys[span.start : span.stop][rng.random(len(span)) < share] for span in spans]
        index.train(np.concatenate(sample))
        return index

    def _allowed(self, spans: list[Span], queries: Queries) -> npt.NDArray[np.bool_]:
        """Which rows of the lists are alive and rewarded enough, counted from the first row in them."""
        allowed = np.zeros(self._built - self._first, np.bool_)
        for span in spans:
            start = span.ordinal + span.start - self._first
            target = allowed[start : start + len(span)]
            rewards = span.block.rewards[span.start : span.start + len(target)]
            target[:] = True if queries.min_reward is None else rewards >= queries.min_reward
        return allowed

    def _excluded(self, spans: list[Span], queries: Queries) -> list[set[int]]:
        """By query: the ordinals of the rows it leaves out (and perhaps some that came after)."""
        left_out: list[set[int]] = [set() for _ in range(len(queries))]
        for codes, column in ((queries.trajectories, "trajectories"), (queries.tasks, "tasks")):
            excluded = Excluded(codes)
            for span in spans if excluded else ():
                rows, owners = excluded.pairs(getattr(span.block, column)[span.start : span.stop])
                ordinals = rows + span.ordinal + span.start
                for owner in np.unique(owners).tolist():
                    left_out[owner].update(ordinals[owners == owner].tolist())
        return left_out

    def _nearest(
        self, keys: Keys, count: int, allowed: npt.NDArray[np.bool_], survivors: int
    ) -> npt.NDArray[np.int64]:
        """Numbers of the nearest allowed rows in the lists, `(queries, count)`; -1 where there are fewer."""
        # The fewer survive, the farther apart they are, and the cheaper a list is to look into.
        share = min(0.5, _SHARE_SEARCHED / math.sqrt(survivors / len(allowed)))
        parameters = self._faiss.SearchParametersIVF(nprobe=max(8, round(self._index.nlist * share)))
        if survivors < len(allowed):
            bits = np.packbits(allowed, bitorder="little")  # FAISS keeps a bare pointer to it
            parameters.sel = self._faiss.IDSelectorBitmap(len(bits), self._faiss.swig_ptr(bits))
        _, numbers = self._index.search(keys, count, params=parameters)
        return np.asarray(numbers, np.int64)


def lists_recall(lists: Lists, partition: Partition, *, sample: int, k: int) -> float:
    """Share of the k nearest that the lists give, asked with stored keys and without their own trajectories.

    A row as similar as the k-th exact one counts as found, whichever of the equals it is.
    """
    spans = partition.spans()
    ordinals = np.random.default_rng(0).choice(np.arange(partition.first, partition.last), sample)
    keys, trajectories = [], []
    for ordinal in ordinals:
        block = spans[(ordinal - spans[0].ordinal) // BLOCK_ROWS].block
        keys.append(block.keys[ordinal % BLOCK_ROWS])
        trajectories.append(block.trajectories[ordinal % BLOCK_ROWS])
    queries = Queries(
        keys=np.array(keys),
        trajectories=np.array(trajectories, np.int64),
        tasks=np.zeros(sample, np.int64),
        min_reward=None,
    )
    found = right = 0
    for got, exact in zip(lists.search(queries, k), partition.search(queries, k), strict=True):
        right += len(exact)
        found += sum(score >= exact[-1][0] - 1e-9 for score, _ in got)
    return found / right if right else 1.0


class ListsBuilder:
    """One background thread that keeps all lists of a view up with their partitions."""

    def __init__(self) -> None:
        self._followers: list[Lists] = []
        self._work = threading.Condition()
        self._closed = False
        self._thread: threading.Thread | None = None

    def add(self, lists: Lists) -> None:
        with self._work:
            self._followers.append(lists)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="replay-lists", daemon=True)
                self._thread.start()

    def wake(self) -> None:
        with self._work:
            self._work.notify_all()

    def settle(self) -> None:
        """Wait until all lists hold all rows."""
        with self._work:
            self._work.notify_all()
            self._work.wait_for(lambda: self._closed or not any(each.missing for each in self._followers))

    def clear(self) -> None:
        with self._work:
            self._followers.clear()

    def close(self) -> None:
        with self._work:
            self._closed = True
            self._work.notify_all()
        if self._thread is not None:
            self._thread.join(timeout=10)  # making lists cannot be interrupted; the thread is a daemon

    def _run(self) -> None:
        try:
            self._keep_up()
        except Exception:
            logger.exception("lists are no longer extended; fresh rows are scanned exactly")
        with self._work:
            self._closed = True
            self._work.notify_all()

    def _keep_up(self) -> None:
        while not self._closed:
            with self._work:
                followers = list(self._followers)
            if any(each.extend() for each in followers):
                time.sleep(0.001)  # let a waiting search have the lock
                continue
            with self._work:
                self._work.notify_all()
                self._work.wait(timeout=1.0)
