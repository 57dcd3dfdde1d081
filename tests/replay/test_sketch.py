"""Short forms spare reading keys, and change no answer."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from threadpoolctl import ThreadpoolController

from dreamgym.protocols import Keys
from dreamgym.replay.partition import BLOCK_ROWS, Hit, Partition, Queries
from dreamgym.replay.sketch import COLUMNS, Sketch
from dreamgym.replay.threads import one_thread

DIMENSION = 160
ROWS = 2 * BLOCK_ROWS + 500


def unit(keys: Keys) -> Keys:
    scaled: Keys = (keys / np.linalg.norm(keys, axis=1, keepdims=True)).astype(np.float32)
    return scaled


def near_a_plane(rng: np.random.Generator, rows: int) -> Keys:
    """As texts of one world are: few directions, a little of everything, and the same again and again."""
    inside = rng.normal(size=(rows, 24)) @ rng.normal(size=(24, DIMENSION))
    keys = unit((inside + 0.5 * rng.normal(size=inside.shape)).astype(np.float32))
    keys[rows // 2 :: 3] = keys[: len(keys[rows // 2 :: 3])]
    return keys


class Rows:
    def __init__(self, keys: Keys) -> None:
        rng = np.random.default_rng(1)
        self.keys, self.exact, numbers = keys, keys.astype(np.float64), np.arange(len(keys))
        self.trajectories, self.rewards = numbers // 7 + 1, rng.random(len(keys))
        self.partition = Partition(keys.shape[1])
        self.partition.append(
            seqs=numbers + 1,
            keys=keys,
            trajectories=self.trajectories,
            tasks=numbers // 70 + 1,
            rewards=self.rewards,
        )

    def by_definition(self, key: Keys, own: int, least: float | None, k: int, first: int) -> list[Hit]:
        scores = np.minimum(np.einsum("ij,j->i", self.exact, key.astype(np.float64)), 1.0)
        allowed = (self.trajectories != own) & (np.arange(len(scores)) >= first)
        if least is not None:
            allowed &= self.rewards >= least
        rows = np.flatnonzero(allowed)
        best = rows[np.lexsort((rows, -scores[rows]))[:k]]
        return [(scores[row], row + 1) for row in best.tolist()]


@pytest.fixture(scope="module")
def rows() -> Rows:
    return Rows(near_a_plane(np.random.default_rng(0), ROWS))


def sketches(rows: Rows) -> list[Sketch | None]:
    return [span.block.sketch for span in rows.partition.spans()]


def test_full_blocks_have_short_forms_and_the_last_one_not_yet(rows: Rows) -> None:
    assert [sketch is not None for sketch in sketches(rows)] == [True, True, False]


@pytest.mark.parametrize(("together", "least", "k"), product((1, 5, 20), (None, 0.3, 0.95), (1, 8)))
def test_answers_are_those_of_a_search_that_reads_every_key(
    rows: Rows, together: int, least: float | None, k: int
) -> None:
    asked = np.random.default_rng(together).integers(0, ROWS, together)
    far = unit(np.random.default_rng(2).normal(size=(1, DIMENSION)).astype(np.float32))
    keys = np.concatenate([rows.keys[asked], far])
    own = np.append(rows.trajectories[asked], 0)
    queries = Queries(keys=keys, trajectories=own, tasks=np.zeros(len(keys), np.int64), min_reward=least)
    for key, mine, found in zip(keys, own, rows.partition.search(queries, k), strict=True):
        expected = rows.by_definition(key, int(mine), least, k, 0)
        assert [seq for _, seq in found] == [seq for _, seq in expected]
        assert [score for score, _ in found] == pytest.approx([score for score, _ in expected], abs=1e-9)


def test_evicted_rows_are_not_found_by_their_short_forms() -> None:
    rows = Rows(near_a_plane(np.random.default_rng(3), BLOCK_ROWS + 1000))
    rows.partition.evict(9_000)
    key = rows.keys[100:101]
    nothing = np.zeros(1, np.int64)
    queries = Queries(keys=key, trajectories=nothing, tasks=nothing, min_reward=None)
    (found,) = rows.partition.search(queries, 4)
    assert [seq for _, seq in found] == [s for _, s in rows.by_definition(key[0], 0, None, 4, 9_000)]


def test_a_short_form_promises_no_less_than_the_keys_hold(rows: Rows) -> None:
    sketch = sketches(rows)[0]
    assert sketch is not None
    queries = near_a_plane(np.random.default_rng(4), 20)
    promised = np.empty((BLOCK_ROWS, len(queries)), np.float32)
    sketch.bounds(slice(0, BLOCK_ROWS), queries, promised)
    held = rows.keys[:BLOCK_ROWS].astype(np.float64) @ queries.T
    assert (promised >= held - 4e-6).all()
    assert sketch.nbytes == 4 * BLOCK_ROWS * COLUMNS


def test_keys_that_lie_near_no_plane_are_read_as_they_are() -> None:
    rng = np.random.default_rng(5)
    rows = Rows(unit(rng.normal(size=(BLOCK_ROWS, 400)).astype(np.float32)))
    assert sketches(rows) == [None]


def test_searches_keep_numpys_own_threads_at_rest_and_leave_them_as_they_were() -> None:
    def threads() -> list[int]:
        found = ThreadpoolController().select(user_api="blas").info()
        return [each["num_threads"] for each in found if "numpy" in each["filepath"]]

    before = threads()
    assert before, "NumPy's BLAS is not known to threadpoolctl"
    with one_thread():
        with one_thread():
            assert threads() == [1]
        assert threads() == [1]
    assert threads() == before
