"""Filters and order of every index, compared with a search that looks at each row."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dreamgym.protocols import Keys
from dreamgym.replay.buffer import ReplayBuffer
from dreamgym.replay.index import FEW_KEYS, MemoryIndex, Partition, Row
from dreamgym.replay.sqlite import SqliteStore
from dreamgym.replay.store import Addition, Record, records, restore_keys, round_keys
from dreamgym.types import RetrievalFilter, Source
from tests.replay.household import episode

DIMENSION = 384


def unit_rows(rng: np.random.Generator, rows: int, dimension: int = DIMENSION) -> Keys:
    keys = rng.standard_normal((rows, dimension)).astype(np.float32)
    keys /= np.linalg.norm(keys, axis=1, keepdims=True)
    return keys


@dataclass
class Library:
    """A filled buffer and the same rows as a plain list, in the order of the log."""

    buffer: ReplayBuffer
    rows: list[Record]
    keys: Keys

    def expected(self, key: Keys, k: int, filters: RetrievalFilter) -> list[tuple[str, float]]:
        """The answer by definition: filter, sort, and take rows while the cap on synthetic ones allows."""
        products = restore_keys(round_keys(self.keys)).astype(np.float64) @ key.astype(np.float64)
        scores: list[float] = np.minimum(products, 1.0).round(9).tolist()
        chosen: list[tuple[str, float]] = []
        synthetic = 0
        for index in sorted(range(len(self.rows)), key=lambda each: (-scores[each], each)):
            row = self.rows[index]
            capped = filters.max_synthetic is not None and row.provenance.source == "synthetic"
            if (
                row.environment != filters.environment
                or (filters.source is not None and row.provenance.source != filters.source)
                or row.trajectory_id == filters.exclude_trajectory
                or row.task_id == filters.exclude_task
                or (filters.min_reward is not None and row.trajectory_reward < filters.min_reward)
                or (capped and synthetic == filters.max_synthetic)
            ):
                continue
            synthetic += row.provenance.source == "synthetic"
            chosen.append((row.id, scores[index]))
        return chosen[:k]


@pytest.fixture(scope="module", params=["sqlite", "postgres", "postgres-pgvector"])
def library(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Library]:
    rng = np.random.default_rng(5)
    rows: list[Record] = []
    for number in range(60):
        environment = "household" if number % 3 else "office"
        source: Source = "synthetic" if number % 2 else "real"
        rows += records(episode(number, environment=environment, source=source, reward=number % 4 / 2))
    keys = unit_rows(rng, len(rows))
    copies = rng.integers(0, len(rows), len(rows) // 2)
    keys[rng.permutation(len(rows))[: len(copies)]] = keys[copies]  # many rows share a key
    if request.param == "sqlite":
        store = str(tmp_path_factory.mktemp("views") / "replay.sqlite")
    else:
        make: Callable[[], str] = request.getfixturevalue("new_schema")
        store = make()
    index = "approximate" if request.param == "postgres-pgvector" else "exact"
    with ReplayBuffer.open(store, index="exact" if index == "exact" else "approximate") as buffer:
        asyncio.run(buffer.add(rows, keys=keys))
        yield Library(buffer, rows, keys)


def maybe(strategy: st.SearchStrategy[str]) -> st.SearchStrategy[str | None]:
    return st.none() | strategy


any_filter = st.builds(
    RetrievalFilter,
    environment=st.sampled_from(["household", "office", "nowhere"]),
    source=st.sampled_from([None, "real", "synthetic"]),
    max_synthetic=st.none() | st.integers(0, 5),
    exclude_trajectory=maybe(
        st.integers(0, 60).map(lambda n: episode(n, source="synthetic" if n % 2 else "real").id)
    ),
    exclude_task=maybe(st.integers(0, 6).map(lambda n: f"task-{n}")),
    min_reward=st.none() | st.sampled_from([0.0, 0.5, 1.0, 1.5, 2.0]),
)


@settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    asked=st.lists(st.tuples(st.integers(0, 239), st.booleans(), any_filter), min_size=1, max_size=6),
    k=st.integers(1, 30),
)
def test_filters_are_applied_before_the_k_are_chosen(
    library: Library, asked: list[tuple[int, bool, RetrievalFilter]], k: int
) -> None:
    noise = unit_rows(np.random.default_rng(asked[0][0]), len(asked))
    stored = np.array([library.keys[row] for row, *_ in asked])
    exact = np.array([exact for _, exact, _ in asked])[:, None]
    keys = np.where(exact, stored, noise).astype(np.float32)
    filters = [each for *_, each in asked]
    found = asyncio.run(library.buffer.nearest(keys, k=k, filters=filters))
    for key, each, hits in zip(keys, filters, found, strict=True):
        expected = library.expected(key, k, each)
        assert [hit.transition_id for hit in hits] == [name for name, _ in expected]
        assert [hit.similarity for hit in hits] == pytest.approx([score for _, score in expected], abs=1e-6)


def rows_of(count: int, first: int = 1, **columns: npt.NDArray[Any]) -> list[Row]:
    ones = np.ones(count, np.int64)
    rewards = columns.get("rewards", np.zeros(count)).tolist()
    names = [[str(name) for name in columns.get(column, ones)] for column in ("trajectories", "tasks")]
    return list(zip(range(first, first + count), rewards, *names, strict=True))


def partition_of(keys: Keys, **columns: npt.NDArray[Any]) -> Partition:
    partition = Partition(keys.shape[1])
    partition.append(keys, rows_of(len(keys), 1, **columns))
    return partition


def plain(count: int, min_reward: float | None = None, **excluded: npt.NDArray[Any]) -> list[RetrievalFilter]:
    nothing = np.zeros(count, np.int64)
    pairs = zip(excluded.get("trajectories", nothing), excluded.get("tasks", nothing), strict=True)
    return [
        RetrievalFilter(
            environment="household",
            min_reward=min_reward,
            exclude_trajectory=str(trajectory) if trajectory else None,
            exclude_task=str(task) if task else None,
        )
        for trajectory, task in pairs
    ]


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_a_partition_orders_equal_rows_by_age_whatever_was_evicted(data: st.DataObject) -> None:
    rows = data.draw(st.integers(1, 300))
    seed = data.draw(st.integers(0, 1000))
    floor = data.draw(st.integers(0, rows))
    k = data.draw(st.integers(1, 200))
    min_reward = data.draw(st.sampled_from([None, 0.0, 1.0, 2.0]))
    rng = np.random.default_rng(seed)
    corners = np.eye(4, dtype=np.float32)[rng.integers(0, 4, rows)]  # only four keys: ties everywhere
    trajectories, tasks = rng.integers(1, 9, rows), rng.integers(1, 4, rows)
    rewards = rng.integers(0, 3, rows).astype(np.float64)
    partition = partition_of(corners, trajectories=trajectories, tasks=tasks, rewards=rewards)
    partition.evict(floor)
    asked = data.draw(st.integers(1, 20))
    queries = unit_rows(rng, asked, 4)
    own_trajectories, own_tasks = rng.integers(0, 9, asked), rng.integers(0, 4, asked)
    filters = plain(asked, min_reward, trajectories=own_trajectories, tasks=own_tasks)
    for number, hits in enumerate(partition.search(queries, k, filters)):
        scores = np.minimum((corners.astype(np.float64) * queries[number]).sum(axis=1), 1.0)
        allowed = [
            row
            for row in range(floor, rows)
            if trajectories[row] != own_trajectories[number]
            and tasks[row] != own_tasks[number]
            and (min_reward is None or rewards[row] >= min_reward)
        ]
        best = sorted(allowed, key=lambda row: (-scores[row], row))[:k]
        assert hits == [(scores[row], row + 1) for row in best]


def by_definition(keys: Keys, query: Keys, k: int) -> list[tuple[float, int]]:
    scores = np.minimum((keys.astype(np.float64) * query).sum(axis=1), 1.0)
    return [(scores[row], row + 1) for row in np.lexsort((np.arange(len(keys)), -scores))[:k].tolist()]


@pytest.mark.parametrize("faiss", [True, False])
def test_evicted_rows_are_not_found_and_later_ones_are(faiss: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not faiss:
        monkeypatch.setattr("dreamgym.replay.index.has_faiss", lambda: False)
    rng = np.random.default_rng(1)
    rows = 6000
    keys = clustered(rng, rows, 24)
    partition = partition_of(keys)
    queries = unit_rows(rng, 20, 24)
    for floor in (0, 1, 1000, 2500, 5000, rows - 3):
        partition.evict(floor)
        assert len(partition) == rows - floor
        for query, hits in zip(queries, partition.search(queries, 8, plain(20)), strict=True):
            expected = [(score, row + floor) for score, row in by_definition(keys[floor:], query, 8)]
            assert hits == expected
    partition.evict(rows)
    assert partition.search(queries, 8, plain(20)) == [[]] * 20
    partition.append(queries[:1], rows_of(1, rows + 1))
    ((similarity, seq),) = partition.search(queries[:1], 8, plain(1))[0]
    assert (round(similarity, 6), seq) == (1.0, rows + 1)


@pytest.mark.parametrize("faiss", [True, False])
def test_a_batch_gives_what_single_searches_give_to_the_last_digit(
    faiss: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not faiss:
        monkeypatch.setattr("dreamgym.replay.index.has_faiss", lambda: False)
    keys = clustered(np.random.default_rng(8), 4000)
    partition = partition_of(keys, trajectories=np.arange(4000) // 12 + 1)
    asked = np.arange(0, 4000, 61)
    filters = plain(len(asked), trajectories=asked // 12 + 1)
    together = partition.search(keys[asked], 8, filters)
    alone = [
        partition.search(keys[row : row + 1], 8, [each])[0] for row, each in zip(asked, filters, strict=True)
    ]
    assert together == alone


def test_a_thousand_copies_of_one_row_are_answered_oldest_first() -> None:
    rng = np.random.default_rng(2)
    keys = np.repeat(unit_rows(rng, 3, 16), [2, 5000, 1], axis=0)
    hits = partition_of(keys).search(keys[[0, 2, -1]], 4, plain(3))
    assert [seq for _, seq in hits[1]] == [3, 4, 5, 6]
    assert {1, 2} <= {seq for _, seq in hits[0]}
    assert hits[2][0][1] == 5003


def test_the_youngest_of_hundreds_of_nearly_equal_rows_is_first_if_it_is_nearer_by_a_hair() -> None:
    keys = np.zeros((500, 16), np.float32)
    keys[:, 0], keys[:, 1] = 0.6, 0.8
    keys[-1, 0] = np.nextafter(np.float32(0.6), np.float32(1))
    (hits,) = partition_of(keys).search(np.eye(1, 16, dtype=np.float32), 3, plain(1))
    assert [seq for _, seq in hits] == [500, 1, 2]


def clustered(rng: np.random.Generator, rows: int, dimension: int = 48) -> Keys:
    """Keys as embeddings are: in clumps, and every fourth row a copy of another."""
    centres = unit_rows(rng, 64, dimension)
    keys = centres[rng.integers(0, 64, rows)] + 0.3 * unit_rows(rng, rows, dimension)
    copies = rng.integers(0, rows, rows // 4)
    keys[rng.permutation(rows)[: len(copies)]] = keys[copies]
    return restore_keys(round_keys(keys / np.linalg.norm(keys, axis=1, keepdims=True)))


def with_ivf(partition: Partition) -> Partition:
    partition.build_ivf()
    return partition


def test_ivf_finds_nearly_what_a_scan_finds() -> None:
    rng = np.random.default_rng(3)
    rows = 18_000
    keys = clustered(rng, rows)
    trajectories, tasks = np.arange(rows) // 12 + 1, rng.integers(1, 4, rows)
    rewards = rng.integers(0, 20, rows).astype(np.float64)
    partition = with_ivf(partition_of(keys, trajectories=trajectories, tasks=tasks, rewards=rewards))
    asked = rng.integers(0, rows, 60)
    for min_reward, k in ((None, 8), (5.0, 8), (19.0, 8), (None, 50)):
        a_few = np.where(np.arange(60) % 20, 0, 1)  # leave out a third of all rows
        filters = plain(60, min_reward, trajectories=trajectories[asked], tasks=a_few)
        scanned = partition.search(keys[asked], k, filters, exact=True)
        found = partition.search(keys[asked], k, filters)
        shared = sum(hit in scan for scan, hits in zip(scanned, found, strict=True) for hit in hits)
        assert shared >= 0.98 * sum(map(len, scanned))
        for number, hits in enumerate(found):
            assert not {seq for _, seq in hits} & set(
                np.flatnonzero(trajectories == trajectories[asked[number]]) + 1
            )


def test_rows_newer_than_the_ivf_index_are_found_and_evicted_ones_are_not() -> None:
    rng = np.random.default_rng(4)
    keys = clustered(rng, FEW_KEYS + 4000)
    partition = with_ivf(partition_of(keys[:-100]))
    partition.append(keys[-100:], rows_of(100, len(keys) - 99))
    fresh, filters = keys[-100:], plain(100)
    assert partition.search(fresh, 1, filters) == partition.search(fresh, 1, filters, exact=True)
    partition.evict(900)
    assert partition.ivf is not None
    assert all(seq > 900 for hits in partition.search(keys[:50], 8, plain(50)) for _, seq in hits)
    partition.evict(len(keys) - 3)
    assert partition.search(keys[-3:], 1, plain(3)) == partition.search(keys[-3:], 1, plain(3), exact=True)


async def test_a_large_partition_switches_to_ivf_by_itself_and_reports_its_recall(
    tmp_path: Path,
) -> None:
    rows = FEW_KEYS + 1500
    keys = clustered(np.random.default_rng(6), rows, DIMENSION)
    template = records(episode(1, steps=12))
    many = [
        dataclasses.replace(template[row % 12], trajectory_id=f"t{row // 12}", position=row % 12)
        for row in range(rows)
    ]
    log = SqliteStore(tmp_path / "replay.sqlite", embedder="made up", dimension=DIMENSION)
    log.append([Addition(records=many, keys=keys, embedder="made up")], capacity=None)
    scanned, searched = MemoryIndex(index="exact"), MemoryIndex(index="auto", exact_limit=FEW_KEYS)
    for view in (scanned, searched):
        view.refresh(log)
    assert searched.recall(sample=40, k=8) >= 0.98
    assert scanned.recall(sample=40, k=8) == 1.0
    assert "approximate" in searched.describe()["household/real"]
    assert "exact" in scanned.describe()["household/real"]
    filters = [RetrievalFilter(environment="household")] * 5
    assert searched.search(keys[:5], k=3, filters=filters) == scanned.search(keys[:5], k=3, filters=filters)
    log.close()
