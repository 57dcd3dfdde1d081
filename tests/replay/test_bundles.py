"""Bundles spare looking at rows, and change no answer."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

import numpy as np
import numpy.typing as npt
import pytest

from dreamgym.protocols import Keys
from dreamgym.replay.blocks import BLOCK_ROWS, Queries
from dreamgym.replay.bundles import FIRST_ROWS
from dreamgym.replay.embedders import LexicalEmbedder
from dreamgym.replay.partition import Partition
from dreamgym.replay.serialization import restore_keys, round_keys
from dreamgym.replay.shortlist import _Shortlist
from dreamgym.replay.standings import Standings
from tests.replay.household import PLACES, THINGS
from tests.replay.stored_rows import Rows

ROWS = 2 * BLOCK_ROWS + 500


def household(rng: np.random.Generator, rows: int, things: int = 6) -> Keys:
    """As they are stored: half precision, so that the ends of one action differ in their last digits."""

    def one() -> tuple[str, str]:
        place = f"{rng.choice(PLACES)} {rng.integers(1, 7)}"
        seen = ", ".join(
            f"a {rng.choice(THINGS)} {rng.integers(1, things)}" for _ in range(rng.integers(1, 5))
        )
        thing = f"{rng.choice(THINGS)} {rng.integers(1, things)}"
        action = rng.choice(["look", f"open {place}", f"take {thing} from {place}", f"go to {place}"])
        return f"You arrive at {place}. On the {place}, you see {seen}.", str(action)

    return restore_keys(round_keys(LexicalEmbedder().keys([one() for _ in range(rows)])))


@pytest.fixture(scope="module")
def rows() -> Rows:
    return Rows(household(np.random.default_rng(0), ROWS))


def unheard_of() -> Keys:
    """Actions and states that no row resembles."""
    pairs = [("qwertz", "asdf"), ("You arrive at shelf 1.", "fly to the moon"), ("On a boat.", "look")]
    return LexicalEmbedder().keys(pairs)


@pytest.mark.parametrize(
    ("together", "least", "k"), list(product((1, 20), (None, 0.3, 0.9, 0.99), (1, 8, 100)))
)
def test_answers_are_those_of_a_search_that_reads_every_key(
    rows: Rows, together: int, least: float | None, k: int
) -> None:
    rng = np.random.default_rng(together)
    asked = rng.integers(0, ROWS, together)
    keys = np.concatenate([rows.keys[asked], household(rng, 3), unheard_of()])
    nobody = np.zeros(6, np.int64)
    own = np.concatenate([rows.trajectories[asked], nobody])
    tasks = np.concatenate([np.where(asked % 2, rows.tasks[asked], 0), nobody])
    rows.check(keys, k=k, own=own, tasks=tasks, least=least)


def test_rows_of_one_action_are_one_bundle_though_nobody_said_where_actions_begin(rows: Rows) -> None:
    bundles = rows.bundles
    assert len(bundles.centres) == 128  # what the action makes of a key of 256 + 128
    assert len(bundles) == ROWS
    ends = rows.keys[:, -128:]
    assert bundles.centres.shape[1] < ROWS / 8
    assert len(np.unique(ends.round(2), axis=0)) == pytest.approx(bundles.centres.shape[1], rel=0.02)
    assert bundles.spread < 0.001
    assert (np.diff(bundles.bundle) >= 0).all()
    for start, stop in zip(bundles.edges[:-1], bundles.edges[1:], strict=True):
        assert (np.diff(bundles.ordinals[start:stop]) > 0).all()  # by age


def test_keys_without_an_end_of_their_own_are_in_no_bundle_and_have_short_forms() -> None:
    rng = np.random.default_rng(2)
    keys = rng.normal(size=(FIRST_ROWS, 20)) @ rng.normal(size=(20, 160))
    partition = Rows((keys / np.linalg.norm(keys, axis=1, keepdims=True)).astype(np.float32)).partition
    assert partition._binder.bundles is None
    assert [page is not None for span in partition.spans() for page in span.block.pages] == [True]


def test_rows_with_bundles_need_no_other_short_forms(rows: Rows) -> None:
    assert not any(span.block.pages for span in rows.partition.spans())
    assert rows.partition.nbytes < ROWS * (4 * 384 + 32 + 4 * 64)  # as many bytes as pages would take


def test_a_bundle_promises_no_less_than_its_rows_hold(rows: Rows) -> None:
    keys = np.concatenate([household(np.random.default_rng(3), 20), unheard_of()])
    nobody = np.zeros(len(keys), np.int64)
    queries = Queries(keys=keys, trajectories=nobody, tasks=nobody, min_reward=None)
    shortlist = _Shortlist(rows.bundles, Standings(rows.partition.spans(), queries, 4), 0)
    everything = shortlist._reaching(np.full(len(keys), -9, np.float32))
    assert len(everything) == len(keys) * ROWS
    held = np.einsum("ij,ij->i", rows.exact[everything.ordinal[::97]], keys[everything.query[::97]])
    assert (everything.score[::97] >= held - 4e-6).all()
    assert np.median(everything.score[::97] - held) < 0.1


def test_few_keys_are_read_however_many_rows_there_are(rows: Rows, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[int] = []
    products = Standings.products

    def counted(self: Standings, query: npt.NDArray[np.intp], ordinal: npt.NDArray[np.intp]) -> Keys:
        read.append(len(query))
        return products(self, query, ordinal)

    monkeypatch.setattr(Standings, "products", counted)
    asked = household(np.random.default_rng(4), 40)
    for many in (Rows(rows.keys[: BLOCK_ROWS // 2]), rows):
        read.clear()
        many.check(asked)
        assert sum(read) < 40 * 400
    assert sum(read) < 0.01 * 40 * ROWS


@pytest.mark.parametrize("at_once", [1, 700, 5000])
def test_rows_are_found_from_the_moment_they_came_whether_or_not_they_are_in_a_bundle(at_once: int) -> None:
    rng = np.random.default_rng(5)
    rows = Rows(household(rng, FIRST_ROWS - 100))
    new = household(rng, 2 * FIRST_ROWS if at_once > 1 else 200, things=9)
    rows.keys = np.concatenate([rows.keys, new])
    rows.exact = rows.keys.astype(np.float64)
    total = len(rows.keys)
    rows.trajectories, rows.tasks = np.arange(total) // 7 + 1, np.ones(total, np.int64)
    rows.rewards = np.ones(total)
    for start in range(FIRST_ROWS - 100, total, at_once):
        part = slice(start, min(start + at_once, total))
        rows.append(part)
        if at_once > 1 or start % 20 == 0:
            rows.check(rows.keys[part][-2:], alive=slice(0, part.stop))
    assert rows.bundles.stop >= FIRST_ROWS


def test_evicted_rows_are_not_found_and_leave_their_bundles() -> None:
    rows = Rows(household(np.random.default_rng(6), BLOCK_ROWS + 1000))
    asked = np.concatenate([rows.keys[100:105], rows.keys[9_100:9_105]])
    for floor in (9_000, BLOCK_ROWS + 10):
        rows.partition.evict(floor)
        rows.check(asked, alive=slice(floor, None))
    more = household(np.random.default_rng(7), 2 * FIRST_ROWS)
    rows.keys = np.concatenate([rows.keys, more])
    rows.exact = rows.keys.astype(np.float64)
    rows.trajectories = rows.tasks = np.ones(len(rows.keys), np.int64)
    rows.rewards = np.ones(len(rows.keys))
    for start in range(BLOCK_ROWS + 1000, len(rows.keys), 1000):
        rows.append(slice(start, min(start + 1000, len(rows.keys))))
    assert rows.bundles.ordinals.min() >= BLOCK_ROWS + 10
    rows.check(asked, alive=slice(BLOCK_ROWS + 10, None))
    rows.partition.evict(len(rows.keys))
    nobody = np.zeros(1, np.int64)
    nothing = Queries(keys=asked[:1], trajectories=nobody, tasks=nobody, min_reward=None)
    assert rows.partition.search(nothing, 4) == [[]]


def test_a_state_met_thousands_of_times_comes_back_oldest_first() -> None:
    keys = household(np.random.default_rng(8), 2 * FIRST_ROWS + 100)
    keys[50::2] = keys[10]
    rows = Rows(keys)
    asked = np.concatenate([keys[10:11], keys[:20]])
    own = np.zeros(len(asked), np.int64)
    own[0] = rows.trajectories[10]
    rows.check(asked, k=8, own=own)


def another_world(rng: np.random.Generator, rows: int) -> Iterator[Keys]:
    keys = rng.normal(size=(rows, 20)) @ rng.normal(size=(20, 384))
    yield from np.array_split((keys / np.linalg.norm(keys, axis=1, keepdims=True)).astype(np.float32), 20)


def test_bundles_are_given_up_when_keys_come_that_have_no_ends_and_all_are_found() -> None:
    rng = np.random.default_rng(9)
    first = household(rng, FIRST_ROWS)
    rows = Rows(np.concatenate([first, *another_world(rng, 4 * FIRST_ROWS)]), at_once=900)
    assert rows.partition._binder.bundles is None
    rows.check(np.concatenate([first[:5], rows.keys[-5:], rows.keys[6000:6003]]))


def test_a_task_that_holds_all_that_is_alike_can_be_left_out(rows: Rows) -> None:
    keys = rows.keys.copy()
    keys[:3000] = keys[10]
    crowded = Rows(keys)
    crowded.tasks[:3000] = 99
    crowded.partition = Partition(384)
    crowded.append(slice(None))
    crowded.check(keys[10:11], tasks=np.array([99]))


@pytest.mark.parametrize("actions", [1, 3, 63, 64, 65])
def test_worlds_of_few_actions_are_searched_as_exactly(actions: int) -> None:
    rng = np.random.default_rng(10)
    pairs = [
        (f"You arrive at {rng.choice(PLACES)} {rng.integers(9)}.", f"do thing{rng.integers(actions)}x")
        for _ in range(FIRST_ROWS + 300)
    ]
    rows = Rows(restore_keys(round_keys(LexicalEmbedder().keys(pairs))))
    assert rows.bundles.centres.shape[1] == actions
    asked = rng.integers(0, len(pairs), 6)
    for k in (1, 8, 300):
        rows.check(rows.keys[asked], k=k, own=rows.trajectories[asked])
        rows.check(rows.keys[asked], k=k, tasks=rows.tasks[asked], least=0.5)
