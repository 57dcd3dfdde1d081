"""The rows of one environment and source: appended, evicted, and searched exactly or with an IVF index.

Each distinct key is stored once, with the list of rows that have it: recorded states repeat (43% of the rows
of the shipped ALFWorld data share their key with an older one), and equal keys are ties that no search needs
to tell apart. Candidates come from FAISS or NumPy in single precision and are scored again in double
precision. A search fetches more candidates until the k best allowed rows are certainly among them, so filters
act before the k and the answer does not depend on the rest of the batch.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt

from dreamgym.protocols import Keys
from dreamgym.replay.nearest import Ids, Scores, load_faiss, top_k

Hit: TypeAlias = tuple[float, int]
"""(cosine similarity, sequence number of the row)"""

FEW_ROWS: Final = 5000
"""Up to this many allowed keys are scanned exactly: that is as fast as an approximate search."""

_ROUNDING: Final = 4e-6
"""More than two summations of the same unit vectors in single precision can differ by."""
_HALF_ROUNDING: Final = 2e-3
"""The same for the half-precision keys of an IVF index."""
_SPARE: Final = 8
"""Candidates fetched beyond k, so that most searches are certain at once."""
_MOST_HIDDEN: Final = 256
"""At most this many more are fetched for rows that a query excludes; a search that needs more repeats."""
_MOST_CANDIDATES: Final = 4096
"""A search that needs more fetches all keys."""
_IVF_BATCH: Final = 4096
"""New keys are scanned until there are this many, then added to the IVF index."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Queries:
    """Queries with one minimum reward. Codes of ids to leave out are `code_of` values, 0 for none."""

    keys: Keys
    trajectories: Ids
    tasks: Ids
    min_reward: float | None = None

    def __len__(self) -> int:
        return len(self.keys)

    def pick(self, which: Ids) -> Queries:
        return Queries(
            keys=self.keys[which],
            trajectories=self.trajectories[which],
            tasks=self.tasks[which],
            min_reward=self.min_reward,
        )


def code_of(name: str | None) -> int:
    """A number for an id within this process, 0 for None. Two ids share one with a chance of 1 in 2⁶¹."""
    return 0 if name is None else hash(name) or 1


class _Column:
    """A growing array; `values` are its filled rows."""

    def __init__(self, *shape: int, dtype: Any) -> None:
        self._memory = np.empty((0, *shape), dtype)
        self.values = self._memory

    def extend(self, rows: npt.NDArray[Any]) -> None:
        size = len(self.values) + len(rows)
        if size > len(self._memory):
            room = max(size, 3 * len(self._memory) // 2, 1024)
            grown = np.empty((room, *rows.shape[1:]), self._memory.dtype)
            grown[: len(self.values)] = self.values
            self._memory = grown
        self._memory[size - len(rows) : size] = rows
        self.values = self._memory[:size]


class Partition:
    """The rows of one environment and source, in the order of the store. The caller serialises the calls."""

    def __init__(self, dimension: int) -> None:
        self.version = 0
        """Grows when keys get other numbers."""
        self._reset(dimension)

    def _reset(self, dimension: int) -> None:
        self.version += 1
        self._keys = _Column(dimension, dtype=np.float32)
        # Of each row: its number in the store, the number of its key, and what filters ask for.
        self._seqs, self._slots = _Column(dtype=np.int64), _Column(dtype=np.int64)
        self._trajectories, self._tasks = _Column(dtype=np.int64), _Column(dtype=np.int64)
        self._rewards = _Column(dtype=np.float64)
        self._evicted = 0
        self._slot_of: dict[int, int] = {}
        self._rows_of: Counter[int] = Counter()
        """Rows per trajectory and task code: how many of them an exclusion can hide."""
        self._postings: dict[float | None, tuple[Ids, Ids, Ids]] = {}
        self.ivf: Any = None
        self.ivf_keys = 0
        """How many of the distinct keys, from the first on, are in the IVF index."""
        self.ivf_trained = 0
        """How many there were when it was trained."""

    def __len__(self) -> int:
        return len(self._seqs.values) - self._evicted

    @property
    def keys(self) -> Keys:
        """The distinct keys. A reader of this array is not affected by later changes."""
        return self._keys.values

    @property
    def nbytes(self) -> int:
        return int(self.keys.nbytes) + 40 * len(self._seqs.values)

    def append(
        self,
        *,
        seqs: Ids,
        keys: Keys,
        trajectories: Ids,
        tasks: Ids,
        rewards: npt.NDArray[np.float64],
    ) -> None:
        self._slots.extend(self._assign_slots(keys))
        self._seqs.extend(seqs)
        self._trajectories.extend(trajectories)
        self._tasks.extend(tasks)
        self._rewards.extend(rewards)
        self._rows_of.update(trajectories.tolist())
        self._rows_of.update(tasks.tolist())
        self._postings = {}
        if self.ivf is not None and len(self.keys) - self.ivf_keys >= _IVF_BATCH:
            self.ivf.add(self.keys[self.ivf_keys :])
            self.ivf_keys = len(self.keys)

    def evict(self, floor: int) -> None:
        """Drop the rows numbered up to `floor`, which are always the oldest."""
        evicted = int(np.searchsorted(self._seqs.values, floor, side="right"))
        if evicted > self._evicted:
            self._evicted, self._postings = evicted, {}
            if evicted > len(self) // 4:
                self._compact()

    def search(self, queries: Queries, k: int, *, exact: bool = False) -> list[list[Hit]]:
        """The k best rows for each query, by similarity and then by age."""
        found: list[list[Hit]] = [[] for _ in range(len(queries))]
        _, _, counts = self._posting_lists(queries.min_reward)
        allowed = np.flatnonzero(counts)
        if not len(allowed):
            return found
        few = len(allowed) < len(counts) // 8 or len(allowed) <= FEW_ROWS < len(counts)
        subset = allowed if few else None
        approximate = self.ivf is not None and not few and not exact
        codes = zip(queries.trajectories.tolist(), queries.tasks.tolist(), strict=True)
        hidden = np.array([self._rows_of[trajectory] + self._rows_of[task] for trajectory, task in codes])
        share = 1.0 if few else len(allowed) / len(counts)
        size = math.ceil((k + min(int(hidden.max()), _MOST_HIDDEN) + _SPARE) / share)
        left = np.arange(len(queries))
        while len(left):
            batch = queries.pick(left)
            candidates = self._candidates(batch.keys, size, subset, approximate=approximate)
            certain, hits = self._rank(batch, k, hidden[left], *candidates, approximate=approximate)
            if size >= (len(counts) if subset is None else len(subset)) and not approximate:
                certain[:] = True
            for number in np.flatnonzero(certain).tolist():
                found[int(left[number])] = hits[number]
            left = left[~certain]
            approximate = approximate and size < _MOST_CANDIDATES
            size = 4 * size if size < _MOST_CANDIDATES else len(counts)
        return found

    def _candidates(
        self, keys: Keys, size: int, subset: Ids | None, *, approximate: bool
    ) -> tuple[Scores, Ids]:
        """Scores and numbers of the nearest distinct keys, best first; -1 where there are no more."""
        if subset is not None:
            scores, ids = top_k(keys, self.keys[subset], size)
            return scores, subset[ids]
        if not approximate:
            return top_k(keys, self.keys, size)
        scores, ids = self.ivf.search(keys, size)
        if self.ivf_keys < len(self.keys):
            new_scores, new_ids = top_k(keys, self.keys[self.ivf_keys :], size)
            scores = np.concatenate([scores, new_scores], axis=1)
            ids = np.concatenate([ids, new_ids + self.ivf_keys], axis=1)
            order = np.argsort(-scores, axis=1)[:, :size]
            scores, ids = np.take_along_axis(scores, order, axis=1), np.take_along_axis(ids, order, axis=1)
        return scores, ids

    def _rank(
        self, queries: Queries, k: int, hidden: Ids, scores: Scores, slots: Ids, *, approximate: bool
    ) -> tuple[npt.NDArray[np.bool_], list[list[Hit]]]:
        """Whether each query's k best rows are certainly among the candidates, and the best of them."""
        order, starts, counts = self._posting_lists(queries.min_reward)
        width = slots.shape[1]
        flat = slots.ravel()
        # Of a key's rows, oldest first, the first k + hidden suffice: no more than `hidden` are excluded.
        lengths = np.where(flat >= 0, np.minimum(counts[flat], np.repeat(k + hidden, width)), 0)
        pair = np.repeat(np.arange(len(flat)), lengths)
        within = np.arange(len(pair)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
        row, query = order[starts[flat[pair]] + within], pair // width
        shown = self._trajectories.values[row] != queries.trajectories[query]
        shown &= self._tasks.values[row] != queries.tasks[query]
        pair, row, query = pair[shown], row[shown], query[shown]

        reached = np.cumsum(np.bincount(pair, minlength=len(flat)).reshape(slots.shape), axis=1) >= k
        enough = reached[:, -1]
        kth = scores[np.arange(len(queries)), np.argmax(reached, axis=1)].astype(np.float64)
        bar = np.where(enough, kth - 2 * (_HALF_ROUNDING if approximate else _ROUNDING), -np.inf)
        certain = enough if approximate else enough & (scores[:, -1] < bar)

        near = scores.ravel()[pair] >= bar[query]
        pair, row, query = pair[near], row[near], query[near]
        distinct, place = np.unique(pair, return_inverse=True)
        # One by one in double precision: 64 queries in a batch get the numbers of 64 single ones.
        products = self.keys[flat[distinct]].astype(np.float64) * queries.keys[distinct // width]
        exact = np.minimum(products.sum(axis=1), 1.0)[place]
        seqs = self._seqs.values[row]
        best = np.lexsort((seqs, -exact, query))
        ranked = list(zip(exact[best].tolist(), seqs[best].tolist(), strict=True))
        bounds = np.searchsorted(query[best], np.arange(len(queries) + 1)).tolist()
        hits = [ranked[start : min(start + k, stop)] for start, stop in pairwise(bounds)]
        return certain, hits

    def _posting_lists(self, min_reward: float | None) -> tuple[Ids, Ids, Ids]:
        """(rows by key and then by age, where each key's rows start, how many it has) of allowed rows."""
        if min_reward not in self._postings:
            rows = np.arange(self._evicted, len(self._seqs.values))
            if min_reward is not None:
                rows = rows[self._rewards.values[rows] >= min_reward]
            slots = self._slots.values[rows]
            counts = np.bincount(slots, minlength=len(self.keys))
            self._postings[min_reward] = (
                rows[np.argsort(slots, kind="stable")],
                np.cumsum(counts) - counts,
                counts,
            )
        return self._postings[min_reward]

    def _assign_slots(self, keys: Keys) -> Ids:
        """The number of each key among the distinct ones; new keys are added."""
        slots = np.empty(len(keys), np.int64)
        fresh: list[int] = []
        for row, code in enumerate(hash(key.tobytes()) for key in keys):
            slot = self._slot_of.setdefault(code, len(self.keys) + len(fresh))
            if slot == len(self.keys) + len(fresh):
                fresh.append(row)
            slots[row] = slot
        self._keys.extend(keys[fresh])
        collided = np.flatnonzero((self.keys[slots] != keys).any(axis=1))
        slots[collided] = len(self.keys) + np.arange(len(collided))
        self._keys.extend(keys[collided])
        return slots

    def _compact(self) -> None:
        """Give up the memory of evicted rows, and the keys that no row has any more."""
        alive = slice(self._evicted, None)
        seqs, slots = self._seqs.values[alive], self._slots.values[alive]
        columns = self._trajectories.values[alive], self._tasks.values[alive], self._rewards.values[alive]
        used, places = np.unique(slots, return_inverse=True)
        kept = self.keys[used]
        self._reset(kept.shape[1])
        self.append(
            seqs=seqs, keys=kept[places], trajectories=columns[0], tasks=columns[1], rewards=columns[2]
        )


def train_ivf(keys: Keys) -> Any:
    """An inverted-file index of the keys in half precision.

    HNSW, the usual choice, found 0.90 of the exact answer on household keys where IVF of the same cost found
    1.00: it loses groups of rows that lie apart from the rest (decision 0002).
    """
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
    return index
