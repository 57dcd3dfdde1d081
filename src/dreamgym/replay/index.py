"""Nearest-neighbour search over the rows of a store, with filters applied before the k.

Every query names its environment, so rows are partitioned by environment and source: a filter on the source
or a limit on synthetic rows selects partitions. The search is exact (FAISS, or NumPy where that is not
installed) up to `exact_limit` rows; larger partitions use FAISS IVF, and `recall` measures what that loses.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from typing import Final, Literal, Protocol, TypeAlias

import numpy as np

from dreamgym.protocols import Keys
from dreamgym.replay.nearest import Ids, has_faiss, load_faiss
from dreamgym.replay.partition import FEW_ROWS, Hit, Partition, Queries, code_of, train_ivf
from dreamgym.replay.store import CHUNK_ROWS, Chunk, TransitionStore
from dreamgym.types import RetrievalFilter, Source

IndexKind: TypeAlias = Literal["auto", "exact", "approximate"]

SOURCES: Final[tuple[Source, ...]] = ("real", "synthetic")
logger = logging.getLogger("dreamgym.replay")


class VectorIndex(Protocol):
    """Finds rows by key. It can be discarded and built again from the store at any time."""

    def refresh(self, store: TransitionStore) -> None:
        """Read what the store has appended or evicted since the last call."""
        ...

    def search(self, keys: Keys, *, k: int, filters: Sequence[RetrievalFilter]) -> list[list[Hit]]:
        """For each key the k most similar rows that its filter allows; equally similar rows oldest first."""
        ...

    def describe(self) -> dict[str, str]:
        """How each environment and source is searched."""
        ...

    def recall(self, *, sample: int, k: int) -> float:
        """Share of the exact k nearest that `search` finds, measured with `sample` stored keys."""
        ...

    def close(self) -> None: ...


def limit_of(filters: RetrievalFilter, source: Source, k: int) -> int:
    """How many of the k may come from `source`.

    >>> limit_of(RetrievalFilter(environment="alfworld", max_synthetic=1), "synthetic", 4)
    1
    """
    if filters.source not in (None, source):
        return 0
    if source == "synthetic" and filters.max_synthetic is not None:
        return min(k, filters.max_synthetic)
    return k


def best_of(hits: list[Hit], k: int) -> list[Hit]:
    """The k best, by similarity and then by age."""
    return sorted(hits, key=lambda hit: (-hit[0], hit[1]))[:k]


class MemoryIndex:
    """All keys of a store in memory, by environment and source."""

    def __init__(self, *, index: IndexKind = "auto", exact_limit: int = 300_000) -> None:
        if index == "approximate":
            load_faiss()  # a missing extra is reported at once
        self._limit = {"auto": exact_limit, "exact": None, "approximate": FEW_ROWS}[index]
        self._partitions: dict[tuple[str, str], Partition] = {}
        self._builds: dict[Partition, threading.Thread] = {}
        self._generation = 0
        self._cursor = 0
        self._lock = threading.Lock()

    def refresh(self, store: TransitionStore) -> None:
        with self._lock:
            status = store.status()
            if status.generation != self._generation:
                self._partitions, self._cursor, self._generation = {}, 0, status.generation
            while self._cursor < status.last_seq:
                chunk = store.scan(self._cursor)
                self._append(chunk)
                newest = int(chunk.seqs[-1]) if len(chunk.seqs) else 0
                # The last rows may be evicted: a short chunk means that nothing is left to read.
                self._cursor = newest if len(chunk.seqs) == CHUNK_ROWS else max(newest, status.last_seq)
            for (_, source), partition in self._partitions.items():
                partition.evict(status.floors["real" if source == "real" else "synthetic"])
            self._start_builds()

    def append(self, chunk: Chunk) -> None:
        """Add the next rows of a store."""
        with self._lock:
            self._append(chunk)
            self._start_builds()

    def search(
        self, keys: Keys, *, k: int, filters: Sequence[RetrievalFilter], exact: bool = False
    ) -> list[list[Hit]]:
        hits: list[list[Hit]] = [[] for _ in filters]
        groups: dict[tuple[str, float | None], list[int]] = {}
        for number, each in enumerate(filters):
            groups.setdefault((each.environment, each.min_reward), []).append(number)
        for (environment, min_reward), numbers in groups.items():
            for source in SOURCES:
                asked = [number for number in numbers if limit_of(filters[number], source, k)]
                partition = self._partitions.get((environment, source))
                if not asked or partition is None:
                    continue
                queries = Queries(
                    keys=np.ascontiguousarray(keys[asked], np.float32),
                    trajectories=_codes([filters[number].exclude_trajectory for number in asked]),
                    tasks=_codes([filters[number].exclude_task for number in asked]),
                    min_reward=min_reward,
                )
                with self._lock:
                    found = partition.search(queries, k, exact=exact)
                for number, rows in zip(asked, found, strict=True):
                    hits[number] += rows[: limit_of(filters[number], source, k)]
        return [best_of(rows, k) for rows in hits]

    def describe(self) -> dict[str, str]:
        kernel = "FAISS" if has_faiss() else "NumPy"
        return {
            f"{environment}/{source}": f"{len(partition)} rows, {len(partition.keys)} distinct keys, "
            + (f"exact ({kernel})" if partition.ivf is None else "approximate (FAISS IVF)")
            for (environment, source), partition in list(self._partitions.items())
        }

    @property
    def nbytes(self) -> int:
        """Memory of keys and columns; an IVF index takes half as much again."""
        return sum(partition.nbytes for partition in list(self._partitions.values()))

    def recall(self, *, sample: int = 64, k: int = 8) -> float:
        """Asked with stored keys, each without itself; a row as similar as the k-th exact one counts."""
        self._join()
        found = total = 0
        for (environment, _), partition in list(self._partitions.items()):
            if partition.ivf is None:
                continue
            keys = partition.keys[np.random.default_rng(0).integers(0, len(partition.keys), sample)]
            filters = [RetrievalFilter(environment=environment)] * sample
            answers = self.search(keys, k=k, filters=filters)
            for got, best in zip(answers, self.search(keys, k=k, filters=filters, exact=True), strict=True):
                total += len(best)
                found += sum(score >= best[-1][0] - 1e-9 for score, _ in got)
        return found / total if total else 1.0

    def close(self) -> None:
        self._join()

    def _append(self, chunk: Chunk) -> None:
        places = list(zip(chunk.environments, chunk.sources, strict=True))
        trajectories, tasks = _codes(chunk.trajectories), _codes(chunk.tasks)
        for place in dict.fromkeys(places):
            rows = np.array([each == place for each in places])
            partition = self._partitions.setdefault(place, Partition(chunk.keys.shape[1]))
            partition.append(
                seqs=chunk.seqs[rows],
                keys=chunk.keys[rows],
                trajectories=trajectories[rows],
                tasks=tasks[rows],
                rewards=chunk.rewards[rows],
            )

    def _start_builds(self) -> None:
        """Build the IVF index of a partition in the background when it is due; scan until then."""
        if self._limit is None:
            return
        for place, partition in self._partitions.items():
            due = len(partition) > self._limit and len(partition.keys) > 1.5 * partition.ivf_trained
            if not due or partition in self._builds:
                continue
            if not has_faiss():
                logger.warning(
                    "%s: %d rows are scanned exactly without dreamgym[faiss]", place, len(partition)
                )
                self._limit = None
                return
            thread = threading.Thread(target=self._build, args=(partition,), name="replay-ivf", daemon=True)
            self._builds[partition] = thread
            thread.start()

    def _build(self, partition: Partition) -> None:
        keys, version = partition.keys, partition.version
        ivf = train_ivf(keys)
        with self._lock:
            if partition.version == version:
                partition.ivf, partition.ivf_keys, partition.ivf_trained = ivf, len(keys), len(keys)
            del self._builds[partition]

    def _join(self) -> None:
        for thread in list(self._builds.values()):
            thread.join()


def _codes(names: Sequence[str | None]) -> Ids:
    return np.array([code_of(name) for name in names], np.int64)
