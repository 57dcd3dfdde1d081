"""Short forms spare reading keys, and change no answer."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from dreamgym.protocols import Keys
from dreamgym.replay.blocks import BLOCK_ROWS
from dreamgym.replay.partition import Partition
from dreamgym.replay.sketch import COLUMNS, PAGE_ROWS, Page
from tests.replay.stored_rows import Rows

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
    rows.check(keys)


def test_a_state_met_thousands_of_times_comes_back_oldest_first() -> None:
    keys = near_a_plane(np.random.default_rng(9), 2 * PAGE_ROWS + 100)
    keys[50::2] = keys[10]
    rows = Rows(keys)
    asked = np.concatenate([keys[10:11], keys[:20]])
    own = np.zeros(len(asked), np.int64)
    own[0] = rows.trajectories[10]
    rows.check(asked, k=8, own=own)


@pytest.mark.parametrize(("together", "least", "k"), list(product((1, 5, 20), (None, 0.3, 0.95), (1, 8))))
def test_answers_are_those_of_a_search_that_reads_every_key(
    rows: Rows, together: int, least: float | None, k: int
) -> None:
    asked = np.random.default_rng(together).integers(0, ROWS, together)
    far = unit(np.random.default_rng(2).normal(size=(1, DIMENSION)).astype(np.float32))
    keys = np.concatenate([rows.keys[asked], far])
    own = np.append(rows.trajectories[asked], 0)
    rows.check(keys, k=k, own=own, least=least)


def test_evicted_rows_are_not_found_by_their_short_forms() -> None:
    rows = Rows(near_a_plane(np.random.default_rng(3), BLOCK_ROWS + 1000))
    rows.partition.evict(9_000)
    rows.check(rows.keys[100:101], alive=slice(9_000, None))


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
