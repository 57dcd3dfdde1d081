"""The rows of `replay.py`, and the three ways of searching them that it compares."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from dreamgym.protocols import Keys
from dreamgym.replay.embedders import LexicalEmbedder
from dreamgym.replay.index import MemoryIndex, load_faiss
from dreamgym.replay.store import CHUNK_ROWS, Chunk, restore_keys, round_keys
from dreamgym.types import RetrievalFilter

K = 8
STEPS = 12
"""Rows of a trajectory."""

PLACES = (
    "cabinet",
    "drawer",
    "shelf",
    "fridge",
    "countertop",
    "microwave",
    "sinkbasin",
    "desk",
    "bed",
    "sofa",
)
THINGS = (
    "apple",
    "bread",
    "knife",
    "mug",
    "plate",
    "pan",
    "egg",
    "potato",
    "soapbottle",
    "book",
    "pen",
    "vase",
)


def household_pairs(count: int, seed: int) -> list[tuple[str, str]]:
    """(state, action) as a household gives them: short, alike, and often met before."""
    rng = random.Random(seed)

    def one() -> tuple[str, str]:
        place = f"{rng.choice(PLACES)} {rng.randrange(1, 9)}"
        thing = f"{rng.choice(THINGS)} {rng.randrange(1, 4)}"
        if rng.random() < 0.25:
            return f"The {place} is closed.", f"open {place}"
        seen = ", ".join(f"a {rng.choice(THINGS)} {rng.randrange(1, 4)}" for _ in range(rng.randrange(4)))
        state = f"You arrive at {place}. On the {place}, you see {seen or 'nothing'}."
        return state, rng.choice([f"take {thing} from {place}", f"go to {rng.choice(PLACES)} 1", "look"])

    return [one() for _ in range(count)]


def household_keys(count: int, seed: int) -> Keys:
    return LexicalEmbedder().keys(household_pairs(count, seed))


def clustered_keys(count: int, seed: int) -> Keys:
    """Unit vectors like a sentence encoder's: 256 clusters, local spread of 24 dimensions, a common part."""
    shape, rng = np.random.default_rng(0), np.random.default_rng(seed)
    centres = shape.standard_normal((256, 384)).astype(np.float32)
    spread = shape.standard_normal((256, 24, 384)).astype(np.float32) / np.sqrt(24)
    common = shape.standard_normal(384).astype(np.float32)
    keys = np.empty((count, 384), np.float32)
    cluster = rng.integers(0, 256, count)
    for each in range(256):
        rows = np.flatnonzero(cluster == each)
        local = rng.standard_normal((len(rows), 24)).astype(np.float32) @ spread[each]
        keys[rows] = centres[each] + 0.6 * local + common
    keys += 0.05 * rng.standard_normal((count, 384)).astype(np.float32)
    keys /= np.linalg.norm(keys, axis=1, keepdims=True)
    return keys


@dataclass(frozen=True, slots=True, kw_only=True)
class Library:
    """The same rows for every method."""

    original: Keys
    keys: Keys
    """As they are stored: rounded to half precision."""
    rewards: npt.NDArray[np.float64]
    """Of the trajectory a row belongs to; half of the trajectories have 1."""
    questions: Keys
    own: npt.NDArray[np.int64]
    """The trajectory that each question belongs to, and leaves out."""

    @staticmethod
    def make(kind: str, rows: int) -> Library:
        make = household_keys if kind == "household" else clustered_keys
        original = make(rows, 1)
        rng = np.random.default_rng(2)
        rewards = np.repeat(rng.integers(0, 2, -(-rows // STEPS)), STEPS)[:rows].astype(np.float64)
        own = rng.integers(0, rows // STEPS, 1024)
        return Library(
            original=original,
            keys=restore_keys(round_keys(original)),
            rewards=rewards,
            questions=make(1024, 3),
            own=own,
        )

    def recall(self, found: list[list[int]], *, filtered: bool) -> float:
        """Share of the K nearest by the unrounded keys; a row as near as the K-th counts."""
        right = 0
        trajectories = np.arange(len(self.keys)) // STEPS
        for number, rows in enumerate(found):
            scores = self.original @ self.questions[number]
            if filtered:
                scores[(self.rewards < 1.0) | (trajectories == self.own[number])] = -np.inf
            bar = np.partition(scores, -K)[-K] - 1e-6
            right += sum(bool(scores[row] >= bar) for row in rows)
        return right / (K * len(found))


class Ours:
    """The index in memory, called as the buffer calls it."""

    def __init__(self, library: Library, kind: str) -> None:
        self.index = MemoryIndex(index="exact" if kind == "exact" else "approximate")
        self.library = library
        rows = len(library.keys)
        for start in range(0, rows, CHUNK_ROWS):
            stop = min(start + CHUNK_ROWS, rows)
            self.index.append(
                Chunk(
                    seqs=np.arange(start, stop),
                    keys=library.keys[start:stop],
                    environments=["household"] * (stop - start),
                    sources=["real"] * (stop - start),
                    trajectories=[f"t{row // STEPS}" for row in range(start, stop)],
                    tasks=["task"] * (stop - start),
                    rewards=library.rewards[start:stop],
                )
            )

    def search(self, which: slice, *, filtered: bool) -> list[list[int]]:
        own = self.library.own[which].tolist()
        plain = RetrievalFilter(environment="household")
        filters = [
            RetrievalFilter(environment="household", min_reward=1.0, exclude_trajectory=f"t{trajectory}")
            if filtered
            else plain
            for trajectory in own
        ]
        found = self.index.search(self.library.questions[which], k=K, filters=filters)
        return [[seq for _, seq in hits] for hits in found]


class Blas:
    """One matrix product over all rows, a mask, and a partial sort in NumPy."""

    def __init__(self, library: Library) -> None:
        self.library = library
        self.trajectories = np.arange(len(library.keys)) // STEPS

    def search(self, which: slice, *, filtered: bool) -> list[list[int]]:
        scores = self.library.questions[which] @ self.library.keys.T
        if filtered:
            scores[:, self.library.rewards < 1.0] = -np.inf
            scores[self.trajectories[None, :] == self.library.own[which][:, None]] = -np.inf
        best = np.argpartition(-scores, K, axis=1)[:, :K]
        order = np.argsort(-np.take_along_axis(scores, best, axis=1), axis=1)
        return [row.tolist() for row in np.take_along_axis(best, order, axis=1)]


class Faiss:
    """FAISS flat search with its BLAS path on; for filters the faster of two ways.

    Either a bitmap selector, or a second index that holds only the rows of sufficient reward: as good as
    FAISS can get, though it needs an index per threshold. The rows of the own trajectory are over-fetched and
    dropped.
    """

    def __init__(self, library: Library) -> None:
        faiss: Any = load_faiss()
        faiss.omp_set_num_threads(1)
        self.faiss = faiss
        self.library = library
        self.good = np.flatnonzero(library.rewards >= 1.0)
        self.all = faiss.IndexFlatIP(library.keys.shape[1])
        self.all.add(library.keys)
        self.rewarded = faiss.IndexFlatIP(library.keys.shape[1])
        self.rewarded.add(library.keys[self.good])
        self.bits = np.packbits(library.rewards >= 1.0, bitorder="little")

    def search(self, which: slice, *, filtered: bool) -> list[list[int]]:
        if not filtered:
            return [row.tolist() for row in self.all.search(self.library.questions[which], K)[1]]
        _, found = self.rewarded.search(self.library.questions[which], K + STEPS)
        return self.without_own(self.good[found], which)

    def search_with_selector(self, which: slice, *, filtered: bool) -> list[list[int]]:
        if not filtered:
            return self.search(which, filtered=False)
        selector = self.faiss.IDSelectorBitmap(len(self.bits), self.faiss.swig_ptr(self.bits))
        parameters = self.faiss.SearchParameters(sel=selector)
        _, found = self.all.search(self.library.questions[which], K + STEPS, params=parameters)
        return self.without_own(found, which)

    def without_own(self, found: npt.NDArray[np.int64], which: slice) -> list[list[int]]:
        pairs = zip(found.tolist(), self.library.own[which].tolist(), strict=True)
        return [[row for row in rows if row // STEPS != own][:K] for rows, own in pairs]
