"""Short forms spare reading keys, and change no answer."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from dreamgym.protocols import Keys
from dreamgym.replay.blocks import BLOCK_ROWS, Hit, Queries
from dreamgym.replay.partition import Partition
from dreamgym.replay.sketch import COLUMNS, PAGE_ROWS, Page

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


def pages(rows: Rows) -> list[Page | None]:
    return [page for span in rows.partition.spans() for page in span.block.pages]


def test_full_pages_have_short_forms_in_one_plane_and_the_last_rows_not_yet(rows: Rows) -> None:
    found = pages(rows)
    assert len(found) == ROWS // PAGE_ROWS
    assert len({page.plane for page in found if page is not None}) == 1
    assert None not in found


def test_rows_that_come_one_by_one_are_shortened_as_those_that_come_together(rows: Rows) -> None:
    slowly = Partition(DIMENSION)
    for start in range(0, ROWS, 1000):
        part = slice(start, start + 1000)
        numbers = np.arange(ROWS)[part]
        slowly.append(numbers + 1, rows.keys[part], rows.trajectories[part], numbers, rows.rewards[part])
    both = zip(pages(rows), (page for span in slowly.spans() for page in span.block.pages), strict=True)
    for one, other in both:
        assert one is not None
        assert other is not None
        assert np.array_equal(one.columns, other.columns)


def test_keys_of_another_world_get_a_plane_of_their_own_and_all_are_found() -> None:
    one, other = (near_a_plane(np.random.default_rng(seed), PAGE_ROWS) for seed in (6, 7))
    noise = unit(np.random.default_rng(8).normal(size=(PAGE_ROWS, DIMENSION)).astype(np.float32))
    rows = Rows(np.concatenate([one, noise, other, one[:100]]))
    first, none, second = pages(rows)
    assert first is not None
    assert second is not None
    assert none is None
    assert first.plane is not second.plane
    keys = np.concatenate([one[:3], noise[:3], other[:3]])
    nobody = np.zeros(len(keys), np.int64)
    found = rows.partition.search(Queries(keys=keys, trajectories=nobody, tasks=nobody, min_reward=None), 4)
    for key, hits in zip(keys, found, strict=True):
        assert [seq for _, seq in hits] == [seq for _, seq in rows.by_definition(key, 0, None, 4, 0)]


def test_a_state_met_thousands_of_times_comes_back_oldest_first() -> None:
    keys = near_a_plane(np.random.default_rng(9), 2 * PAGE_ROWS + 100)
    keys[50::2] = keys[10]
    rows = Rows(keys)
    asked = np.concatenate([keys[10:11], keys[:20]])
    own = np.zeros(len(asked), np.int64)
    own[0] = rows.trajectories[10]
    queries = Queries(keys=asked, trajectories=own, tasks=np.zeros_like(own), min_reward=None)
    for key, mine, hits in zip(asked, own, rows.partition.search(queries, 8), strict=True):
        assert [seq for _, seq in hits] == [s for _, s in rows.by_definition(key, int(mine), None, 8, 0)]


@pytest.mark.parametrize(("together", "least", "k"), list(product((1, 5, 20), (None, 0.3, 0.95), (1, 8))))
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
    page = pages(rows)[1]
    assert page is not None
    queries = near_a_plane(np.random.default_rng(4), 20)
    promised = page.plane.shorten(queries) @ page.columns
    held = queries.astype(np.float64) @ rows.exact[PAGE_ROWS : 2 * PAGE_ROWS].T
    assert (promised >= held - 4e-6).all()
    assert page.nbytes == 4 * PAGE_ROWS * COLUMNS


def test_keys_that_lie_near_no_plane_are_read_as_they_are() -> None:
    rng = np.random.default_rng(5)
    rows = Rows(unit(rng.normal(size=(PAGE_ROWS, 400)).astype(np.float32)))
    assert pages(rows) == [None]
