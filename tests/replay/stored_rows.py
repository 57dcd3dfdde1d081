"""Rows of a partition, and what a search that reads every key finds among them."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest

from dreamgym.protocols import Keys
from dreamgym.replay.blocks import Hit, Queries
from dreamgym.replay.bundles import Bundles
from dreamgym.replay.partition import Partition


class Rows:
    """Rows of a partition, and what a search that reads every key finds among them."""

    def __init__(self, keys: Keys, *, at_once: int | None = None) -> None:
        rng = np.random.default_rng(1)
        numbers = np.arange(len(keys))
        self.keys, self.exact = keys, keys.astype(np.float64)
        self.trajectories, self.tasks = numbers // 7 + 1, numbers // 70 % 12 + 1
        self.rewards = rng.random(len(keys))
        self.partition = Partition(keys.shape[1])
        for start in range(0, len(keys), at_once or len(keys)):
            self.append(slice(start, start + (at_once or len(keys))))

    def append(self, part: slice) -> None:
        self.partition.append(
            seqs=np.arange(len(self.keys))[part] + 1,
            keys=self.keys[part],
            trajectories=self.trajectories[part],
            tasks=self.tasks[part],
            rewards=self.rewards[part],
        )

    @property
    def bundles(self) -> Bundles:
        found = self.partition._binder.bundles
        assert found is not None
        return found

    def check(
        self,
        keys: Keys,
        *,
        k: int = 4,
        own: npt.NDArray[np.int64] | None = None,
        tasks: npt.NDArray[np.int64] | None = None,
        least: float | None = None,
        alive: slice = slice(None),
    ) -> None:
        nobody = np.zeros(len(keys), np.int64)
        own, tasks = nobody if own is None else own, nobody if tasks is None else tasks
        queries = Queries(keys=keys, trajectories=own, tasks=tasks, min_reward=least)
        found = self.partition.search(queries, k)
        for key, mine, task, hits in zip(keys, own, tasks, found, strict=True):
            expected = self._by_definition(key, mine, task, least, k, alive)
            assert [seq for _, seq in hits] == [seq for _, seq in expected]
            assert [score for score, _ in hits] == pytest.approx([score for score, _ in expected], abs=1e-9)

    def _by_definition(
        self, key: Keys, own: int, task: int, least: float | None, k: int, alive: slice
    ) -> list[Hit]:
        scores = np.minimum((self.exact * key).sum(axis=1), 1.0)
        allowed = np.zeros(len(scores), np.bool_)
        allowed[alive] = True
        allowed &= (self.trajectories != own) & (self.tasks != task)
        if least is not None:
            allowed &= self.rewards >= least
        rows = np.flatnonzero(allowed)
        best = rows[np.lexsort((rows, -scores[rows]))[:k]]
        return [(scores[row], row + 1) for row in best.tolist()]
