"""The replay buffer: real and synthetic transitions, durable and searchable by (state, action).

The rows are in a durable store; an index in memory follows it and can be rebuilt. Two threads do the work:
one commits all waiting additions with a single disk sync, one answers all waiting searches with a single
matrix product. `add` returns when the rows are on disk and in the index.
"""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Final, Generic, Self, TypeVar

import numpy as np

from dreamgym.config import ReplayConfig, is_database
from dreamgym.errors import ConfigError, DataError, StoreError
from dreamgym.protocols import Embedder, Keys
from dreamgym.replay.embedders import make_embedder
from dreamgym.replay.index import IndexKind, MemoryIndex
from dreamgym.replay.sqlite import SqliteStore
from dreamgym.replay.store import Addition, Holding, Record, TransitionStore, check_addition, records
from dreamgym.types import Demonstration, RetrievalFilter, Trajectory

if TYPE_CHECKING:
    from dreamgym.replay.pgvector import PgvectorIndex

T = TypeVar("T")
R = TypeVar("R")
_REEMBED_ROWS: Final = 256
_MAX_BATCH: Final = 1024
_FEW: Final = 4
"""After this many batches of one request in a row, a batch no longer waits for more."""
_DECODED_ROWS: Final = 4096
"""Demonstrations kept in memory, the most recently found ones: rollouts of a task find the same ones."""
_LINGER: Final = 0.02
"""Seconds that a batch of searches waits for more. Episodes that are answered together stay in step, so the
language models behind them get larger batches too: 10 to 20% less CPU in most training steps measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BufferStats:
    """What a replay buffer holds."""

    store: str
    embedder: str
    dimension: int
    rows: int
    real: int
    synthetic: int
    holdings: tuple[Holding, ...]
    size_bytes: int
    capacity: int | None
    index: dict[str, str]
    """How each environment and source is searched."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Search:
    keys: Keys
    k: int
    filters: Sequence[RetrievalFilter]
    embedder: str


class Batcher(Generic[T, R]):
    """A thread that processes all waiting requests as one batch: those that arrive meanwhile form the next.

    `serve` returns a result or an error for each request. A batch waits `linger` seconds for more requests,
    unless the last few had only one.
    """

    def __init__(
        self, name: str, serve: Callable[[Sequence[T]], Sequence[R | Exception]], *, linger: float = 0.0
    ) -> None:
        self._name = name
        self._serve = serve
        self._linger = linger
        self._alone = _FEW
        """How many of the last batches had one request."""
        self._waiting: queue.SimpleQueue[tuple[T, Future[R]] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, request: T) -> Future[R]:
        """Cancelling the future before its batch starts withdraws the request; later it has no effect."""
        future: Future[R] = Future()
        with self._lock:
            if self._closed:
                raise StoreError(f"{self._name}: it is closed; open the replay buffer again")
            self._waiting.put((request, future))
        return future

    def close(self) -> None:
        """Process waiting requests, then stop."""
        with self._lock:
            if not self._closed:
                self._closed = True
                self._waiting.put(None)
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _run(self) -> None:
        last = False
        while not last:
            batch, last = self._next_batch()
            batch = [(request, future) for request, future in batch if future.set_running_or_notify_cancel()]
            results: Sequence[R | Exception]
            try:
                results = self._serve([request for request, _ in batch]) if batch else []
            except Exception as error:
                results = [error] * len(batch)
            for (_, future), result in zip(batch, results, strict=True):
                if isinstance(result, Exception):
                    future.set_exception(result)
                else:
                    future.set_result(result)

    def _next_batch(self) -> tuple[list[tuple[T, Future[R]]], bool]:
        """(requests, whether it is the last batch); waits for the first, takes all waiting."""
        batch: list[tuple[T, Future[R]]] = []
        item = self._waiting.get()
        until = time.monotonic() + (self._linger if self._alone < _FEW else 0.0)
        try:
            while item is not None:
                batch.append(item)
                if len(batch) == _MAX_BATCH:
                    return batch, False
                item = self._waiting.get(timeout=max(until - time.monotonic(), 0.0))
        except queue.Empty:
            return batch, False
        finally:
            self._alone = 0 if len(batch) > 1 else self._alone + 1
        return batch, True


class ReplayBuffer:
    """Stores transitions and finds those that resemble a (state, action): a `Retriever` that grows.

    Open it with `ReplayBuffer.open`. Every method may be called from any thread and event loop.
    """

    def __init__(
        self,
        store: TransitionStore,
        index: MemoryIndex | PgvectorIndex,
        embedder: Embedder | None,
        *,
        capacity: int | None = None,
        max_synthetic: int | None = None,
    ) -> None:
        self._store, self._index = store, index
        self._embedder, self._capacity, self._max_synthetic = embedder, capacity, max_synthetic
        self._decoded: dict[int, Demonstration] = {}
        self._read_identity()
        self._index.refresh(store)
        self._writer = Batcher[Addition, int](f"{store.name} (writing)", self._commit)
        self._searcher = Batcher[_Search, list[list[Demonstration]]](
            f"{store.name} (searching)", self._answer, linger=_LINGER
        )

    @classmethod
    def open(
        cls,
        store: str | Path,
        *,
        embedder: Embedder | str | None = "lexical",
        index: IndexKind = "auto",
        exact_limit: int = 300_000,
        capacity: int | None = None,
        max_synthetic: int | None = None,
        reconnect_seconds: float = 120.0,
        create: bool = True,
        read_only: bool = False,
    ) -> Self:
        """Open a store, or create it.

        Args:
            store: a file, or ``postgresql://…`` for a server with pgvector.
            embedder: the embedder or its name; None opens an existing store, to look at it or to re-embed it.
            index: `auto` is exact up to `exact_limit` rows of one environment and source, approximate above.
            capacity: rows kept; beyond it the oldest synthetic rows go, and real ones only when none is left.
            max_synthetic: at most this many of a search's k rows are synthetic, unless its filter says.
            reconnect_seconds: how long a lost connection to a server is tried again; then `StoreError`.
            create: False to refuse a store that does not exist.
            read_only: write nothing, so that a file on read-only media or a full disk can be searched.
        """
        if capacity is not None and capacity < 1:
            raise ConfigError(f"expected a capacity of at least 1 row, got {capacity}")
        chosen = make_embedder(embedder) if isinstance(embedder, str) else embedder
        opened, searched = _open(
            str(store), chosen, index, exact_limit, reconnect_seconds, create=create, read_only=read_only
        )
        try:
            return cls(opened, searched, chosen, capacity=capacity, max_synthetic=max_synthetic)
        except BaseException:
            opened.close()
            raise

    @classmethod
    def open_configured(
        cls, store: str | Path, settings: ReplayConfig, *, create: bool = True, read_only: bool = False
    ) -> Self:
        """`open` with a run's settings."""
        names = {"embedder", "index", "exact_limit", "capacity", "max_synthetic", "reconnect_seconds"}
        return cls.open(store, **settings.model_dump(include=names), create=create, read_only=read_only)

    async def embed(self, pairs: Sequence[tuple[str, str]]) -> Keys:
        """Keys of (state text, action) pairs: compute them once, search with them, pass them to `add`."""
        if self._embedder is None:
            raise ConfigError(
                f"{self._store.name}: opened without an embedder; "
                f"open it with the one that made its keys, {self._identity!r}"
            )
        return await self._embedder.embed(pairs)

    async def add(self, experience: Trajectory | Sequence[Record], *, keys: Keys | None = None) -> int:
        """Store a trajectory, or single records; returns once they are durable and can be found.

        Rows whose id is stored already are left as they are, so adding again after a failure is harmless.
        If the call is cancelled, the rows are stored either all or not at all.

        `keys` has one per row, if they were computed already. Returns the number of rows that were new, or
        raises `StoreError` or `DataError` if nothing of this call was stored.
        """
        rows = records(experience) if isinstance(experience, Trajectory) else tuple(experience)
        if not rows:
            return 0
        if keys is None:
            keys = await self._current([(row.transition.state.text, row.transition.action) for row in rows])
        check_addition(rows, keys, self._dimension)
        addition = Addition(records=rows, keys=np.array(keys, np.float32), embedder=self._identity)
        return await asyncio.wrap_future(self._writer.submit(addition))

    async def nearest(
        self, keys: Keys, *, k: int, filters: Sequence[RetrievalFilter]
    ) -> list[list[Demonstration]]:
        """Like `search`, by keys that `embed` made. Concurrent calls are answered as one batch."""
        if keys.shape != (len(filters), self._dimension):
            raise DataError(f"expected keys of shape {(len(filters), self._dimension)}, got {keys.shape}")
        if k < 1:
            raise DataError(f"expected k of at least 1, got {k}")
        if not filters:
            return []
        if self._max_synthetic is not None:
            filters = [
                each if each.max_synthetic is not None else replace(each, max_synthetic=self._max_synthetic)
                for each in filters
            ]
        search = _Search(keys=np.array(keys, np.float32), k=k, filters=filters, embedder=self._identity)
        return await asyncio.wrap_future(self._searcher.submit(search))

    async def search(
        self, queries: Sequence[tuple[str, str]], *, k: int, filters: Sequence[RetrievalFilter]
    ) -> list[list[Demonstration]]:
        """See `Retriever`: the k nearest rows to each (state text, action)."""
        return await self.nearest(await self._current(queries), k=k, filters=filters)

    async def _current(self, pairs: Sequence[tuple[str, str]]) -> Keys:
        """Keys of the embedder that the store has when they are made: `reembed` may end meanwhile."""
        while True:
            identity = self._identity
            keys = await self.embed(pairs)
            if identity == self._identity:
                return keys

    async def known(self, trajectory_ids: Sequence[str]) -> dict[str, set[int]]:
        """The stored positions of these trajectories: what need not be embedded and added again."""
        return await asyncio.to_thread(self._store.known, trajectory_ids)

    async def recall(self, *, sample: int = 64, k: int = 8) -> float:
        """Share of the exact k nearest that searches find; 1.0 unless something is searched approximately."""
        return await asyncio.to_thread(self._index.recall, sample=sample, k=k)

    def stats(self) -> BufferStats:
        self._index.refresh(self._store)
        status = self._store.status()
        return BufferStats(
            store=self._store.name,
            embedder=status.embedder,
            dimension=status.dimension,
            rows=status.real_rows + status.synthetic_rows,
            real=status.real_rows,
            synthetic=status.synthetic_rows,
            holdings=tuple(self._store.holdings()),
            size_bytes=self._store.size_bytes(),
            capacity=self._capacity,
            index=self._index.describe(),
        )

    def limit_synthetic(self, rows: int) -> None:
        """Keep at most this many synthetic rows, the newest, besides the real ones of now; unless the buffer
        was opened with a capacity."""
        if self._capacity is None:
            self._capacity = max(1, self._store.status().real_rows + rows)

    async def compact(self) -> tuple[int, int]:
        """Evict down to the capacity and free unused space; returns bytes before and after."""
        before = self._store.size_bytes()
        await asyncio.to_thread(self._store.append, [], capacity=self._capacity)
        await asyncio.to_thread(self._store.compact)
        return before, self._store.size_bytes()

    async def reembed(self, embedder: Embedder, *, on_progress: Callable[[int], None] | None = None) -> None:
        """Make new keys for every row, then switch to them at once.

        Until the switch searches use the old keys. If it is interrupted, the same call resumes.
        `on_progress` is called with the number of rows done.
        """
        await asyncio.to_thread(self._store.rekey_start, embedder.identity, embedder.dimension)
        done = 0
        while True:
            rows = await asyncio.to_thread(self._store.rekey_next, _REEMBED_ROWS)
            if not rows and await asyncio.to_thread(self._store.rekey_finish):
                break
            keys = await embedder.embed([(state, action) for _, state, action in rows])
            await asyncio.to_thread(self._store.rekey_put, [seq for seq, *_ in rows], keys)
            done += len(rows)
            if on_progress is not None:
                on_progress(done)
        self._embedder = embedder
        self._read_identity()
        await asyncio.to_thread(self._index.refresh, self._store)

    def close(self) -> None:
        """Finish pending calls, then close the store."""
        self._writer.close()
        self._searcher.close()
        self._store.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _read_identity(self) -> None:
        status = self._store.status()
        self._identity, self._dimension = status.embedder, status.dimension

    def _commit(self, additions: Sequence[Addition]) -> list[int | Exception]:
        results = self._store.append(additions, capacity=self._capacity)
        self._index.refresh(self._store)
        return list(results)

    def _answer(self, searches: Sequence[_Search]) -> list[list[list[Demonstration]] | Exception]:
        self._index.refresh(self._store)
        current = [search for search in searches if search.embedder == self._identity]
        answers = iter(self._demonstrations(current))
        stale = StoreError(f"{self._store.name}: re-embedded meanwhile; make new keys and search again")
        return [next(answers) if search.embedder == self._identity else stale for search in searches]

    def _demonstrations(self, searches: Sequence[_Search]) -> list[list[list[Demonstration]]]:
        if not searches:
            return []
        keys = np.concatenate([search.keys for search in searches])
        filters = [each for search in searches for each in search.filters]
        found = self._index.search(keys, k=max(search.k for search in searches), filters=filters)
        rows = self._read(sorted({seq for hits in found for _, seq in hits}))
        hits_of_key = iter(found)
        return [
            [
                # A row may be evicted between the search and the reading: it is left out.
                [replace(rows[seq], similarity=score) for score, seq in hits[: search.k] if seq in rows]
                for hits in islice(hits_of_key, len(search.filters))
            ]
            for search in searches
        ]

    def _read(self, seqs: Sequence[int]) -> dict[int, Demonstration]:
        """Stored rows by number. Rows never change and no number is used twice, so decoded rows are kept.

        Only the searching thread calls this.
        """
        rows = {seq: self._decoded.pop(seq) for seq in seqs if seq in self._decoded}
        if missing := [seq for seq in seqs if seq not in rows]:
            rows |= self._store.get(missing)
        self._decoded |= rows  # the most recently found are last
        for seq in list(islice(self._decoded, max(0, len(self._decoded) - _DECODED_ROWS))):
            del self._decoded[seq]
        return rows


def _open(
    store: str,
    embedder: Embedder | None,
    index: IndexKind,
    limit: int,
    reconnect_seconds: float,
    *,
    create: bool,
    read_only: bool,
) -> tuple[TransitionStore, MemoryIndex | PgvectorIndex]:
    identity, dimension = (embedder.identity, embedder.dimension) if embedder else (None, None)
    if not is_database(store):
        searched = MemoryIndex(index=index, exact_limit=limit)
        path = Path(store)
        opened = SqliteStore(path, embedder=identity, dimension=dimension, create=create, read_only=read_only)
        return opened, searched
    from dreamgym.replay.pgsession import PostgresSession
    from dreamgym.replay.pgvector import PgvectorIndex
    from dreamgym.replay.postgres import PostgresStore

    session = PostgresSession(store, reconnect_seconds=reconnect_seconds)
    try:
        server = PostgresStore(session, embedder=identity, dimension=dimension, create=create)
        if index == "approximate":
            return server, PgvectorIndex(session)
        return server, MemoryIndex(index=index, exact_limit=limit)
    except BaseException:
        session.close()
        raise
