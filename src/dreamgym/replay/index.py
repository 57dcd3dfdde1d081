"""Nearest views: disposable pictures of the log that answer "which k past rows resemble this one?".

Every query names its environment, so rows lie in partitions by environment and source. A filter on the source
then means scanning less, a cap on synthetic rows means asking two partitions, and only the other filters need
masks. A partition is scanned exactly until that costs too much; then inverted lists take over.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from typing import Final, Literal, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from dreamgym.errors import MissingExtraError
from dreamgym.protocols import Keys
from dreamgym.replay.blocks import Hit, Queries, best_of, code_of
from dreamgym.replay.lists import FEW_ROWS, Lists, ListsBuilder, lists_recall, load_faiss
from dreamgym.replay.partition import Partition
from dreamgym.replay.store import CHUNK_ROWS, Chunk, TransitionStore
from dreamgym.replay.threads import one_thread
from dreamgym.types import RetrievalFilter, Source

IndexKind: TypeAlias = Literal["auto", "exact", "approximate"]

SOURCES: Final[tuple[Source, ...]] = ("real", "synthetic")
QUERIES_AT_ONCE: Final = 64

logger = logging.getLogger("dreamgym.replay")


class NearestView(Protocol):
    """Finds rows by key. It may be thrown away and made again from the log at any time."""

    def follow(self, log: TransitionStore) -> None:
        """Catch up with the log: afterwards everything it held at the call is found, or evicted."""
        ...

    def search(self, keys: Keys, *, k: int, filters: Sequence[RetrievalFilter]) -> list[list[Hit]]:
        """For each key the k most similar rows that its filter lets through; of equals, the older first."""
        ...

    def describe(self) -> dict[str, str]:
        """How each environment is searched."""
        ...

    def recall(self, *, sample: int, k: int) -> float:
        """Share of the exact answer that this view finds, measured on `sample` of its own rows."""
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


class MemoryView:
    """All keys of the log in memory, by environment and source."""

    def __init__(self, *, index: IndexKind = "auto", exact_limit: int = 300_000) -> None:
        if index == "approximate":
            load_faiss()  # missing? then now, not when the first lists are due
        self._limit = {"auto": exact_limit, "exact": None, "approximate": FEW_ROWS}[index]
        self._partitions: dict[tuple[str, str], Partition] = {}
        self._lists: dict[tuple[str, str], Lists] = {}
        self._builder = ListsBuilder()
        self._generation = 0
        self._cursor = 0
        self._following = threading.Lock()

    def follow(self, log: TransitionStore) -> None:
        with self._following:
            status = log.status()
            if status.generation != self._generation:
                self._forget()
                self._generation = status.generation
            if status.last_seq > self._cursor:
                self._read(log, status.last_seq)
            for (_, source), partition in self._partitions.items():
                partition.evict(status.floors["real" if source == "real" else "synthetic"])

    def apply(self, chunk: Chunk) -> None:
        """Take in the next rows of the log."""
        places = list(zip(chunk.environments, chunk.sources, strict=True))
        trajectories = _codes(chunk.trajectories)
        tasks = _codes(chunk.tasks)
        for place in dict.fromkeys(places):
            rows = np.array([each == place for each in places])
            partition = self._partitions.get(place)
            if partition is None:
                partition = self._partitions[place] = Partition(chunk.keys.shape[1])
            partition.append(
                seqs=chunk.seqs[rows],
                keys=chunk.keys[rows],
                trajectories=trajectories[rows],
                tasks=tasks[rows],
                rewards=chunk.rewards[rows],
            )
        self._grow_lists()

    def search(self, keys: Keys, *, k: int, filters: Sequence[RetrievalFilter]) -> list[list[Hit]]:
        hits: list[list[Hit]] = [[] for _ in filters]
        alike: dict[tuple[str, float | None], list[int]] = {}
        for number, each in enumerate(filters):
            alike.setdefault((each.environment, each.min_reward), []).append(number)
        for (environment, _), numbers in alike.items():
            for source in SOURCES:
                wanted = [number for number in numbers if limit_of(filters[number], source, k)]
                for start in range(0, len(wanted), QUERIES_AT_ONCE):
                    batch = wanted[start : start + QUERIES_AT_ONCE]
                    found = self._search_one(
                        (environment, source), keys[batch], [filters[n] for n in batch], k
                    )
                    for number, rows in zip(batch, found, strict=True):
                        hits[number] += rows[: limit_of(filters[number], source, k)]
        return [best_of(rows, k) for rows in hits]

    def describe(self) -> dict[str, str]:
        return {
            f"{environment}/{source}": f"approximate, {len(partition)} rows, {lists.missing} of them scanned"
            if (lists := self._lists.get((environment, source)))
            else f"exact, {len(partition)} rows"
            for (environment, source), partition in list(self._partitions.items())
        }

    @property
    def nbytes(self) -> int:
        """Memory of keys and columns; lists take half as much again."""
        return sum(partition.nbytes for partition in list(self._partitions.values()))

    def recall(self, *, sample: int = 64, k: int = 8) -> float:
        self._builder.settle()
        shares = [
            lists_recall(lists, self._partitions[place], sample=sample, k=k)
            for place, lists in list(self._lists.items())
        ]
        return float(np.mean(shares)) if shares else 1.0

    def close(self) -> None:
        self._builder.close()

    def _forget(self) -> None:
        self._builder.clear()
        self._partitions, self._lists, self._cursor = {}, {}, 0

    def _read(self, log: TransitionStore, last_seq: int) -> None:
        while self._cursor < last_seq:
            chunk = log.scan(self._cursor)
            with one_thread():
                self.apply(chunk)
            newest = int(chunk.seqs[-1]) if len(chunk.seqs) else 0
            # The last rows may be evicted already: a short chunk means that nothing is left to read.
            self._cursor = newest if len(chunk.seqs) == CHUNK_ROWS else max(newest, last_seq)

    def _grow_lists(self) -> None:
        for place, partition in self._partitions.items():
            if self._limit is None or len(partition) <= self._limit or place in self._lists:
                continue
            try:
                self._lists[place] = Lists(partition)
            except MissingExtraError as error:
                logger.warning(
                    "%s has %d rows and is still scanned exactly: %s", place, len(partition), error
                )
                self._limit = None
                return
            self._builder.add(self._lists[place])
        self._builder.wake()

    def _search_one(
        self, place: tuple[str, Source], keys: Keys, filters: Sequence[RetrievalFilter], k: int
    ) -> list[list[Hit]]:
        queries = Queries(
            keys=keys,
            trajectories=_codes([each.exclude_trajectory for each in filters]),
            tasks=_codes([each.exclude_task for each in filters]),
            min_reward=filters[0].min_reward,
        )
        searched = self._lists.get(place) or self._partitions.get(place)
        if not searched:
            return [[] for _ in filters]
        with one_thread():
            return searched.search(queries, k)


def _codes(names: Sequence[str | None]) -> npt.NDArray[np.int64]:
    return np.array([code_of(name) if name is not None else 0 for name in names], np.int64)
