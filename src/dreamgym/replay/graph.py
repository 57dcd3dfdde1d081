"""Approximate search for partitions too large to scan: a navigable graph (FAISS HNSW) over distinct keys.

Equal keys are common (one state met a thousand times) and poison such a graph: a row's neighbours are then
all copies of itself, and recall fell from 1.00 to 0.93 when measured. So a key enters the graph once, and
what it finds is expanded to the rows that have it. The graph is built in the background; rows it does not
hold yet are scanned exactly, so a search never waits for it and never misses fresh rows.
"""

from __future__ import annotations

import logging
import threading
import time
from itertools import islice
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from dreamgym.errors import MissingExtraError
from dreamgym.protocols import Keys
from dreamgym.replay.partition import (
    BLOCK_ROWS,
    Excluded,
    Hit,
    Partition,
    Queries,
    Span,
    best_of,
    rank,
    search_spans,
)

FEW_ROWS: Final = 5000
"""So many survivors of a filter are scanned exactly: a graph finds few among many badly."""

_NEIGHBOURS: Final = 16
_EFFORT_BUILDING: Final = 100
_EFFORT_SEARCHING: Final = 256
_ROWS_AT_ONCE: Final = 128
"""Rows added under one lock: some 50 ms during which searches wait."""
_MOST_EXCLUDED: Final = 256
"""Rows a query may exclude: that many more keys are asked for, which costs; beyond it, a scan is cheaper."""


logger = logging.getLogger("dreamgym.replay")


def load_faiss() -> Any:
    try:
        import faiss
    except ImportError:
        raise MissingExtraError("the approximate index", "faiss") from None
    return faiss


class Graph:
    """Follows one partition and answers for it."""

    def __init__(self, partition: Partition) -> None:
        self._partition = partition
        self._lock = threading.Lock()
        self._faiss = load_faiss()
        self._start_over()

    @property
    def missing(self) -> int:
        """Rows that are not in the graph yet."""
        return self._partition.last - self._built

    def extend(self) -> bool:
        """Take in a few more rows; False if there are none."""
        with self._lock:
            if self._partition.first - self._first > max(FEW_ROWS, len(self._partition)):
                self._start_over()  # most of it was evicted, and a graph cannot forget
            spans = self._partition.spans(self._built)
            if not spans:
                return False
            span = spans[0]
            stop = min(span.stop, span.start + _ROWS_AT_ONCE)
            self._take(span.block.keys[span.start : stop], span.ordinal + span.start)
            return True

    def search(self, queries: Queries, k: int) -> list[list[Hit]]:
        """Like `Partition.search`, nearly always with the same answer."""
        with self._lock:
            spans = self._partition.spans()
            allowed = self._allowed(spans, queries)
            if np.count_nonzero(allowed) <= FEW_ROWS or self.missing > len(allowed):
                return search_spans(spans, queries, k)
            excluded = self._excluded(spans, queries)
            most = max(len(rows) for rows in excluded)
            if most > _MOST_EXCLUDED:
                return search_spans(spans, queries, k)
            numbers = self._nearest_numbers(queries, k + most, allowed)
            query, ordinal = self._expand(numbers, k, allowed, excluded)
            fresh = self._partition.spans(self._built)
        found = rank(spans, queries, query, ordinal, k)
        both = zip(found, search_spans(fresh, queries, k), strict=True)
        return [best_of(old + new, k) for old, new in both]

    def _start_over(self) -> None:
        faiss = self._faiss
        dimension = self._partition.dimension
        # Half precision loses next to nothing: keys are stored with it, and what is found is scored again.
        self._index = faiss.IndexHNSWSQ(
            dimension, faiss.ScalarQuantizer.QT_fp16, _NEIGHBOURS, faiss.METRIC_INNER_PRODUCT
        )
        self._index.hnsw.efConstruction = _EFFORT_BUILDING
        self._index.train(np.zeros((1, dimension), np.float32))
        self._first = self._built = self._partition.first
        self._numbers: dict[int, int] = {}
        """Hash of a key → its number in the graph."""
        self._members: list[list[int]] = []
        """By number: the ordinals of the rows with that key, oldest first."""
        self._number_of_row = np.empty(BLOCK_ROWS, np.int32)

    def _take(self, keys: Keys, ordinal: int) -> None:
        new = []
        used = ordinal - self._first
        if used + len(keys) > len(self._number_of_row):
            self._number_of_row = np.concatenate([self._number_of_row, np.empty_like(self._number_of_row)])
        for row, key in enumerate(keys):
            number = self._numbers.setdefault(hash(key.tobytes()), len(self._members))
            if number == len(self._members):
                self._members.append([])
                new.append(row)
            self._members[number].append(ordinal + row)
            self._number_of_row[used + row] = number
        if new:
            self._index.add(keys[new])
        self._built = ordinal + len(keys)

    def _allowed(self, spans: list[Span], queries: Queries) -> npt.NDArray[np.bool_]:
        """Which rows of the graph are alive and rewarded enough, counted from the graph's first row."""
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

    def _nearest_numbers(
        self, queries: Queries, count: int, allowed: npt.NDArray[np.bool_]
    ) -> npt.NDArray[np.int64]:
        """The nearest keys that an allowed row has, `(queries, count)`; -1 where there are fewer."""
        parameters = self._faiss.SearchParametersHNSW(efSearch=max(_EFFORT_SEARCHING, 2 * count))
        if not allowed.all():
            wanted = np.zeros(len(self._members), np.bool_)
            wanted[self._number_of_row[: len(allowed)][allowed]] = True
            bits = np.packbits(wanted, bitorder="little")
            # FAISS keeps a bare pointer: `bits` must outlive the search.
            parameters.sel = self._faiss.IDSelectorBitmap(len(bits), self._faiss.swig_ptr(bits))
        _, numbers = self._index.search(queries.keys, count, params=parameters)
        return np.asarray(numbers, np.int64)

    def _expand(
        self,
        numbers: npt.NDArray[np.int64],
        k: int,
        allowed: npt.NDArray[np.bool_],
        excluded: list[set[int]],
    ) -> tuple[npt.NDArray[np.intp], npt.NDArray[np.intp]]:
        """(query, ordinal) of the rows that have the keys found: the oldest k of each will do."""
        pairs = [
            (query, ordinal)
            for query, row in enumerate(numbers.tolist())
            for number in row
            if number >= 0
            for ordinal in islice(
                (
                    member
                    for member in self._members[number]
                    if member >= self._first
                    and allowed[member - self._first]
                    and member not in excluded[query]
                ),
                k,
            )
        ]
        table = np.array(pairs, np.intp).reshape(-1, 2)
        return table[:, 0], table[:, 1]


def graph_recall(graph: Graph, partition: Partition, *, sample: int, k: int) -> float:
    """Share of the k nearest that the graph finds, asked with stored keys and without their own trajectories.

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
    for got, exact in zip(graph.search(queries, k), search_spans(spans, queries, k), strict=True):
        right += len(exact)
        found += sum(score >= exact[-1][0] - 1e-9 for score, _ in got)
    return found / right if right else 1.0


class GraphBuilder:
    """One background thread that keeps all graphs of a view up with their partitions."""

    def __init__(self) -> None:
        self._graphs: list[Graph] = []
        self._work = threading.Condition()
        self._closed = False
        self._thread: threading.Thread | None = None

    def add(self, graph: Graph) -> None:
        with self._work:
            self._graphs.append(graph)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="replay-graphs", daemon=True)
                self._thread.start()

    def wake(self) -> None:
        with self._work:
            self._work.notify_all()

    def settle(self) -> None:
        """Wait until every graph holds every row."""
        with self._work:
            self._work.notify_all()
            self._work.wait_for(lambda: self._closed or not any(graph.missing for graph in self._graphs))

    def clear(self) -> None:
        with self._work:
            self._graphs.clear()

    def close(self) -> None:
        with self._work:
            self._closed = True
            self._work.notify_all()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        try:
            self._keep_up()
        except Exception:
            logger.exception("graphs are no longer extended; fresh rows are scanned exactly")
        with self._work:
            self._closed = True
            self._work.notify_all()

    def _keep_up(self) -> None:
        while not self._closed:
            with self._work:
                graphs = list(self._graphs)
            if any(graph.extend() for graph in graphs):
                time.sleep(0.001)  # let a waiting search have the lock
                continue
            with self._work:
                self._work.notify_all()
                self._work.wait(timeout=1.0)
