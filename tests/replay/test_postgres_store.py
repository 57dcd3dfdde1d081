"""The shared store when its server hiccups, its writers race, and its index is only nearly exact."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import tempfile
import threading
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import numpy as np
import psycopg
import pytest

from dreamgym.errors import StoreError
from dreamgym.replay.buffer import ReplayBuffer
from dreamgym.replay.embedders import LexicalEmbedder
from dreamgym.replay.index import MemoryIndex
from dreamgym.replay.pgsession import PostgresSession
from dreamgym.replay.pgvector import PgvectorIndex
from dreamgym.replay.postgres import PostgresStore
from dreamgym.replay.store import Addition, records
from dreamgym.types import RetrievalFilter, Trajectory
from tests.replay.household import episode

NewSchema = Callable[[], str]
EMBEDDER = LexicalEmbedder()


def addition(trajectory: Trajectory) -> Addition:
    pairs = [(step.state.text, step.action) for step in trajectory.transitions]
    return Addition(records=records(trajectory), keys=EMBEDDER.keys(pairs), embedder=EMBEDDER.identity)


def open_log(address: str) -> tuple[PostgresStore, PostgresSession]:
    session = PostgresSession(address)
    return PostgresStore(session, embedder=EMBEDDER.identity, dimension=EMBEDDER.dimension), session


async def test_an_empty_database_is_made_ready_by_opening_it(postgres: str) -> None:
    with psycopg.connect(postgres, autocommit=True) as db:
        db.execute("CREATE DATABASE fresh")
    with ReplayBuffer.open(postgres.replace("/postgres?", "/fresh?")) as buffer:
        assert await buffer.add(episode(1)) == 4


async def test_a_lost_connection_is_made_again(new_schema: NewSchema) -> None:
    address = new_schema()
    with ReplayBuffer.open(address) as buffer:
        await buffer.add(episode(1))
        for number in (2, 3):
            with psycopg.connect(address, autocommit=True) as db:
                db.execute(
                    "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
                    " WHERE application_name = 'dreamgym'"
                )
            results = await asyncio.gather(*(buffer.add(episode(number * 10 + n)) for n in range(5)))
            assert sum(results) == 20
            assert len(await buffer.known([episode(number * 10).id])) == 1
        assert buffer.stats().rows == 44


@contextlib.asynccontextmanager
async def without_acknowledgement(socket: Path) -> AsyncIterator[tuple[Path, list[bytes]]]:
    """The folder of a socket that passes everything on, but for one answer to a COMMIT: the server has
    committed, and the connection is closed instead. The list has the answer; clear it to lose another."""
    folder, lost = Path(tempfile.mkdtemp(prefix="pg")), list[bytes]()

    async def passed(client: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        answers, server = await asyncio.open_unix_connection(socket)
        commits = asyncio.Event()

        async def requests() -> None:
            while data := await client.read(65536):
                if b"COMMIT" in data and not lost:
                    commits.set()
                server.write(data)
            server.close()

        task = asyncio.create_task(requests())
        while data := await answers.read(65536):
            if commits.is_set() and b"COMMIT" in data:
                lost.append(data)
                break
            writer.write(data)
        task.cancel()
        writer.close()

    proxy = await asyncio.start_unix_server(passed, folder / socket.name)
    try:
        yield folder, lost
    finally:
        proxy.close()
        shutil.rmtree(folder)


async def test_an_append_whose_acknowledgement_is_lost_is_stored_once(
    postgres: str, new_schema: NewSchema
) -> None:
    socket = Path(postgres.partition("host=")[2]) / ".s.PGSQL.5432"
    address = new_schema()
    with ReplayBuffer.open(address) as witness:
        async with without_acknowledgement(socket) as (folder, lost):
            buffer = await asyncio.to_thread(
                ReplayBuffer.open, address.replace(str(socket.parent), str(folder)), create=False
            )
            assert lost, "also the opening was tried again"
            lost.clear()
            assert await buffer.add(episode(1)) == 0, "the second attempt finds the rows of the first"
            assert lost
            await asyncio.to_thread(buffer.close)
        assert witness.stats().rows == 4
        assert await witness.known([episode(1).id]) == {episode(1).id: {0, 1, 2, 3}}


def test_a_password_appears_in_no_message() -> None:
    for address in (
        "postgresql://me:hunter2@127.0.0.1:9/db?connect_timeout=1",
        "postgresql://me:hunter2@127.0.0.1:port/db",
        "postgresql://me:hunter2@[bad/db",
    ):
        with pytest.raises(StoreError) as raised:
            ReplayBuffer.open(address)
        assert "hunter2" not in str(raised.value)


def test_rows_become_visible_in_the_order_of_their_numbers(new_schema: NewSchema) -> None:
    address = new_schema()
    follower, session = open_log(address)
    finished = threading.Event()

    def write(start: int) -> None:
        log, own = open_log(address)
        for number in range(start, start + 25):
            log.append([addition(episode(number, steps=1 + number % 4))], capacity=None)
        own.close()

    writers = [threading.Thread(target=write, args=(start,)) for start in (100, 200, 300)]

    def watch() -> None:
        for writer in writers:
            writer.join()
        finished.set()

    for thread in (*writers, threading.Thread(target=watch)):
        thread.start()
    seen: list[int] = []
    looks = 0
    while True:
        last = finished.is_set()
        chunk = follower.scan(seen[-1] if seen else 0)
        seen += chunk.seqs.tolist()
        looks += bool(len(chunk.seqs))
        assert seen == list(range(1, len(seen) + 1))  # a gap now would be a row missed for ever
        if last and not len(chunk.seqs):
            break
    assert looks > 3
    status = follower.status()
    assert len(seen) == status.last_seq == status.real_rows + status.synthetic_rows
    session.close()


def test_the_server_s_index_finds_nearly_what_a_scan_finds(new_schema: NewSchema) -> None:
    log, session = open_log(new_schema())
    trajectories = [episode(n, steps=10, source="synthetic" if n % 3 else "real") for n in range(60)]
    log.append([addition(each) for each in trajectories], capacity=None)
    view, scan = PgvectorIndex(session, few_rows=20), MemoryIndex(index="exact")
    for each in (view, scan):
        each.refresh(log)
    assert view.recall(sample=20, k=8) >= 0.98
    pairs = [(step.state.text, step.action) for each in trajectories for step in each.transitions[:2]]
    keys = EMBEDDER.keys(pairs)
    filters = [
        RetrievalFilter(
            environment="household",
            max_synthetic=2,
            exclude_trajectory=trajectories[n // 2].id,
            exclude_task=f"task-{n % 5}",
            min_reward=0.5,
        )
        for n in range(len(pairs))
    ]
    found = view.search(keys, k=6, filters=filters)
    exact = scan.search(keys, k=6, filters=filters)
    shared = np.mean([len(set(a) & set(b)) / len(b) for a, b in zip(found, exact, strict=True)])
    assert shared >= 0.98
    indexes = session.read(lambda db: str(db.execute("SELECT indexdef FROM pg_indexes").fetchall()))
    assert "USING hnsw" in indexes
    session.close()
