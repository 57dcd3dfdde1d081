"""Nearest neighbours of keys, with filters applied before the k.

Rows are partitioned by environment and source, and a partition stores each distinct key once: recorded states
repeat (43% of the rows of the shipped ALFWorld data share their key with an older one). The search is exact
(FAISS, or NumPy where that is not installed) up to `exact_limit` rows; larger partitions use FAISS IVF, and
`recall` measures what that loses.

Candidates have scores in single precision and are scored again in double precision. A search fetches more
candidates until the k best allowed rows are certainly among them, so the result does not depend on the rest
of the batch. Searches share their cores with models that compute, so they run on one thread (decision 0002).
"""

from __future__ import annotations

import functools
import hashlib
import logging
import math
import sys
import threading
from collections import Counter, deque
from collections.abc import Sequence
from itertools import islice
from typing import Any, Final, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from dreamgym.errors import MissingExtraError
from dreamgym.protocols import Keys
from dreamgym.replay.store import CHUNK_ROWS, Chunk, TransitionStore
from dreamgym.types import RetrievalFilter, Source

Hit: TypeAlias = tuple[float, int]
"""(cosine similarity, number of the row in the store)"""
Row: TypeAlias = tuple[int, float, str, str]
"""(number in the store, reward of its trajectory, trajectory, task)"""
Scores: TypeAlias = npt.NDArray[np.float32]
Ids: TypeAlias = npt.NDArray[np.int64]
IndexKind: TypeAlias = Literal["auto", "exact", "approximate"]

SOURCES: Final[tuple[Source, ...]] = ("real", "synthetic")
FEW_KEYS: Final = 5000
"""Up to this many allowed keys are scanned exactly: that is as fast as an approximate search."""
_FAISS_QUERIES: Final = 4  # fewer are faster one by one with NumPy
_ROUNDING: Final = 4e-6  # more than two summations of unit vectors in single precision can differ by
_HALF_ROUNDING: Final = 2e-3  # the same for the half-precision keys of an IVF index
_SPARE: Final = 8  # candidates fetched beyond k, so that most searches are certain at once
_MAX_HIDDEN: Final = 256  # as many more for rows that a query excludes; a search that needs more repeats
_MAX_CANDIDATES: Final = 4096  # a search that needs more fetches all keys
logger = logging.getLogger("dreamgym.replay")


@functools.cache
def load_faiss() -> Any:
    """FAISS, or `MissingExtraError`."""
    try:
        import faiss
    except ImportError:
        raise MissingExtraError("the approximate index", "faiss") from None
    # One matrix product instead of one scan per query; the default is 128,000 queries.
    faiss.cvar.distance_compute_blas_threshold = _FAISS_QUERIES
    return faiss


@functools.cache
def has_faiss() -> bool:
    try:
        load_faiss()
    except MissingExtraError:
        return False
    return True


def top_k(queries: Keys, keys: Keys, k: int) -> tuple[Scores, Ids]:
    """The k largest inner products of each query in single precision, best first, and their row numbers."""
    k = min(k, len(keys))
    if len(queries) >= _FAISS_QUERIES and has_faiss():
        faiss = load_faiss()
        faiss.omp_set_num_threads(1)  # holds for the calling thread
        scores, ids = faiss.knn(queries, keys, k, metric=faiss.METRIC_INNER_PRODUCT)
        return scores, ids
    scores, ids = np.empty((len(queries), k), np.float32), np.empty((len(queries), k), np.int64)
    for number, query in enumerate(queries):
        products = np.einsum("ij,j->i", keys, query)  # unlike `@`, without the threads of BLAS
        best = np.argpartition(products, len(keys) - k)[len(keys) - k :]
        ids[number] = best[np.argsort(-products[best])]
        scores[number] = products[ids[number]]
    return scores, ids


class _Column:
    """A growing array; `values` are its filled rows."""

    def __init__(self, *shape: int) -> None:
        self._memory = np.empty((0, *shape), np.float32)
        self.values = self._memory

    def extend(self, rows: npt.NDArray[Any]) -> None:
        size = len(self.values) + len(rows)
        if size > len(self._memory):
            grown = np.empty((max(size, 3 * len(self._memory) // 2, 1024), *rows.shape[1:]), np.float32)
            grown[: len(self.values)] = self.values
            self._memory = grown
        self._memory[size - len(rows) : size] = rows
        self.values = self._memory[:size]


class Partition:
    """The rows of one environment and source, in the order of the store. The caller serialises the calls."""

    def __init__(self, dimension: int) -> None:
        self._reset(dimension)

    def _reset(self, dimension: int) -> None:
        self._keys, self._best_rewards = _Column(dimension), _Column()  # NaN for a key without rows
        self._rows: list[list[Row]] = []
        """Of each distinct key, oldest first."""
        self._numbers: dict[bytes, int] = {}
        """The number of a key among the distinct ones, by its digest."""
        self._order: deque[int] = deque()
        """Of each row, oldest first, the number of its key."""
        self._names: Counter[str | None] = Counter()
        """Rows of each trajectory and task: how many an exclusion can hide."""
        self.ivf: Any = None
        self._trained = 0
        """How many distinct keys there were when the IVF index was trained."""

    def __len__(self) -> int:
        return len(self._order)

    @property
    def keys(self) -> Keys:
        """The distinct keys."""
        return self._keys.values

    def append(self, keys: Keys, rows: Sequence[Row]) -> None:
        new: list[int] = []
        numbers: list[int] = []
        for place, row in enumerate(rows):
            fresh = len(self._rows)
            digest = hashlib.blake2b(keys[place].tobytes(), digest_size=16).digest()
            number = self._numbers.setdefault(digest, fresh)
            if number == fresh:
                new.append(place)
                self._rows.append([])
            self._rows[number].append(row)
            self._names.update(row[2:])
            numbers.append(number)
        self._order.extend(numbers)
        self._keys.extend(keys[new])
        self._best_rewards.extend(np.full(len(new), np.nan))
        np.fmax.at(self._best_rewards.values, numbers, np.array([reward for _, reward, *_ in rows]))
        if self.ivf is not None and new:
            self.ivf.add(keys[new])

    def evict(self, floor: int) -> None:
        """Drop the rows numbered up to `floor`, which are always the oldest."""
        before = len(self)
        while self._order and self._rows[self._order[0]][0][0] <= floor:
            number = self._order.popleft()
            for name in self._rows[number].pop(0)[2:]:
                self._names[name] -= 1
                if not self._names[name]:
                    del self._names[name]
            if not self._rows[number]:
                self._best_rewards.values[number] = np.nan
        if len(self) < before and np.isnan(self._best_rewards.values).sum() > len(self.keys) // 4:
            self._compact()

    def _compact(self) -> None:
        """Free the memory of keys without rows."""
        rows_of = [iter(rows) for rows in self._rows]
        rows = [next(rows_of[number]) for number in self._order]
        keys = self.keys[list(self._order)]
        self._reset(keys.shape[1])
        self.append(keys, rows)

    def build_ivf(self) -> None:
        """Train the IVF index, unless the keys have grown by less than half since the last time."""
        keys = self.keys
        if len(keys) <= 1.5 * self._trained:
            return
        faiss = load_faiss()
        faiss.omp_set_num_threads(1)
        lists = max(1, round(2 * math.sqrt(len(keys))))
        quantizer = faiss.IndexFlatIP(keys.shape[1])
        kind, metric = faiss.ScalarQuantizer.QT_fp16, faiss.METRIC_INNER_PRODUCT
        index = faiss.IndexIVFScalarQuantizer(quantizer, keys.shape[1], lists, kind, metric, False)
        index.cp.niter = 5
        index.cp.min_points_per_centroid = 1
        index.nprobe = max(8, lists // 10)
        sample = np.random.default_rng(0).permutation(len(keys))[: 40 * lists]
        index.train(keys[np.sort(sample)])
        index.add(keys)
        self.ivf, self._trained = index, len(keys)

    def search(
        self, keys: Keys, k: int, filters: Sequence[RetrievalFilter], *, exact: bool = False
    ) -> list[list[Hit]]:
        """The k best rows for each key, by similarity, then by age. The filters have one minimum reward."""
        found: list[list[Hit]] = [[] for _ in filters]
        least, best = filters[0].min_reward, self._best_rewards.values
        allowed = np.flatnonzero(best >= (-np.inf if least is None else least))
        if not len(allowed):
            return found
        few = len(allowed) < len(best) // 8 or len(allowed) <= FEW_KEYS < len(best)
        pool = self.keys[allowed] if few else self.keys
        approximate = self.ivf is not None and not few and not exact
        rows_of = self._names
        hidden = max(rows_of[each.exclude_trajectory] + rows_of[each.exclude_task] for each in filters)
        size = math.ceil((k + min(hidden, _MAX_HIDDEN) + _SPARE) * (1 if few else len(best) / len(allowed)))
        waiting = list(range(len(filters)))
        while waiting:
            queries = keys[waiting]
            nearest = self.ivf.search(queries, size) if approximate else top_k(queries, pool, size)
            uncertain: list[int] = []
            for query, scores, numbers in zip(waiting, *nearest, strict=True):
                candidates = allowed[numbers] if few else numbers
                found[query], certain = self._rank(
                    keys[query], k, filters[query], scores, candidates, approximate=approximate
                )
                if not certain and (approximate or size < len(pool)):
                    uncertain.append(query)
            waiting, approximate = uncertain, approximate and size < _MAX_CANDIDATES
            size = 4 * size if size < _MAX_CANDIDATES else len(pool)
        return found

    def _rank(
        self, key: Keys, k: int, only: RetrievalFilter, scores: Scores, candidates: Ids, *, approximate: bool
    ) -> tuple[list[Hit], bool]:
        """The k best rows of the candidates, and whether they are certainly the best of all."""
        least = -math.inf if only.min_reward is None else only.min_reward
        kept: list[tuple[int, list[Row]]] = []
        count, bar, passed_bar = 0, -math.inf, False
        for score, number in zip(scores.tolist(), candidates.tolist(), strict=True):
            passed_bar = score < bar
            if passed_bar or number < 0:  # IVF has no more
                break
            allowed = (
                row
                for row in self._rows[number]
                if row[1] >= least and row[2] != only.exclude_trajectory and row[3] != only.exclude_task
            )
            if rows := list(islice(allowed, k)):
                kept.append((number, rows))
                count += len(rows)
            if count >= k and bar == -math.inf:
                bar = score - 2 * (_HALF_ROUNDING if approximate else _ROUNDING)
        # Each pair by itself in double precision: a query in a batch gets the numbers of a single one.
        products = self.keys[[number for number, _ in kept]].astype(np.float64) * key
        exact = np.minimum(products.sum(axis=1), 1.0).tolist()
        hits = [(score, row[0]) for score, (_, rows) in zip(exact, kept, strict=True) for row in rows]
        return best_of(hits, k), passed_bar or (approximate and count >= k)


def limit_of(filters: RetrievalFilter, source: Source, k: int) -> int:
    """How many of the k may come from `source`."""
    if filters.source not in (None, source):
        return 0
    if source == "synthetic" and filters.max_synthetic is not None:
        return min(k, filters.max_synthetic)
    return k


def best_of(hits: list[Hit], k: int) -> list[Hit]:
    """The k best, by similarity and then by age."""
    return sorted(hits, key=lambda hit: (-hit[0], hit[1]))[:k]


class MemoryIndex:
    """All keys of a store in memory. It can be discarded and built again from the store at any time."""

    def __init__(self, *, index: IndexKind = "auto", exact_limit: int = 300_000) -> None:
        if index == "approximate":
            load_faiss()  # a missing extra is reported at once
        self._limit = {"auto": exact_limit, "exact": math.inf, "approximate": FEW_KEYS}[index]
        self._partitions: dict[tuple[str, str], Partition] = {}
        self._generation = 0
        self._cursor = 0
        self._lock = threading.Lock()

    def refresh(self, store: TransitionStore) -> None:
        """Read what the store has appended or evicted since the last call."""
        with self._lock:
            status = store.status()
            if status.generation != self._generation:
                self._partitions, self._cursor, self._generation = {}, 0, status.generation
            while self._cursor < status.last_seq:
                chunk = store.scan(self._cursor)
                self.append(chunk)
                newest = int(chunk.seqs[-1]) if len(chunk.seqs) else 0
                # The last rows may be evicted: a short chunk means that nothing is left to read.
                self._cursor = newest if len(chunk.seqs) == CHUNK_ROWS else max(newest, status.last_seq)
            for (_, source), partition in self._partitions.items():
                partition.evict(status.real_floor if source == "real" else status.synthetic_floor)
            self.build()

    def append(self, chunk: Chunk) -> None:
        """Add the next rows of a store."""
        places = list(zip(chunk.environments, chunk.sources, strict=True))
        names = (map(sys.intern, column) for column in (chunk.trajectories, chunk.tasks))  # each string once
        rows: list[Row] = list(zip(chunk.seqs.tolist(), chunk.rewards.tolist(), *names, strict=True))
        for place in dict.fromkeys(places):
            chosen = [number for number, each in enumerate(places) if each == place]
            partition = self._partitions.setdefault(place, Partition(chunk.keys.shape[1]))
            partition.append(chunk.keys[chosen], [rows[number] for number in chosen])

    def build(self) -> None:
        """Build the IVF index of every partition that needs one."""
        for place, partition in self._partitions.items():
            if len(partition) <= self._limit:
                continue
            if has_faiss():
                partition.build_ivf()
            else:
                logger.warning("%s: many rows are scanned exactly without dreamgym[faiss]", place)
                self._limit = math.inf

    def search(
        self, keys: Keys, *, k: int, filters: Sequence[RetrievalFilter], exact: bool = False
    ) -> list[list[Hit]]:
        """For each key the k most similar rows that its filter allows; equally similar rows oldest first."""
        hits: list[list[Hit]] = [[] for _ in filters]
        groups: dict[tuple[str, float | None], list[int]] = {}
        for number, each in enumerate(filters):
            groups.setdefault((each.environment, each.min_reward), []).append(number)
        for (environment, _), numbers in groups.items():
            for source in SOURCES:
                group = [number for number in numbers if limit_of(filters[number], source, k)]
                partition = self._partitions.get((environment, source))
                if not group or partition is None:
                    continue
                queries = np.ascontiguousarray(keys[group], np.float32)
                with self._lock:
                    found = partition.search(queries, k, [filters[number] for number in group], exact=exact)
                for number, rows in zip(group, found, strict=True):
                    hits[number] += rows[: limit_of(filters[number], source, k)]
        return [best_of(rows, k) for rows in hits]

    def describe(self) -> dict[str, str]:
        """How each environment and source is searched."""
        kernel = "FAISS" if has_faiss() else "NumPy"
        return {
            f"{environment}/{source}": f"{len(partition)} rows, {len(partition.keys)} distinct keys, "
            + (f"exact ({kernel})" if partition.ivf is None else "approximate (FAISS IVF)")
            for (environment, source), partition in list(self._partitions.items())
        }

    def recall(self, *, sample: int = 64, k: int = 8) -> float:
        """Share of the exact k nearest of stored keys that `search` finds; ties with the k-th count."""
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
