"""The store in one SQLite file.

Write-ahead log with `synchronous=FULL`: a commit returns when the data is on disk, and SQLite recovers by
itself after a crash. One connection writes and one reads, so a search never waits for a disk sync. Several
processes may share the file: writers take turns.
"""

from __future__ import annotations

import contextlib
import json
import sqlite3
import threading
import time
from collections.abc import Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Final

import numpy as np

from dreamgym.errors import DreamGymError, StoreError
from dreamgym.files import atomic_write, sync_directory
from dreamgym.protocols import Keys
from dreamgym.replay.store import (
    CHUNK_ROWS,
    SCHEMA_VERSION,
    STATUS_COLUMNS,
    Addition,
    Chunk,
    Holding,
    KnownTrajectory,
    StoreStatus,
    decode_rows,
    evict,
    known_trajectories,
    nothing_there,
    other_embedder,
    other_version,
    plan_append,
    restore_keys,
    round_keys,
    texts_of,
)
from dreamgym.types import Demonstration

APPLICATION_ID: Final = 0x44474D52
PAGE_SIZE: Final = 16384
"""Rows of a kilobyte or two pack badly into SQLite's default of 4096 (4.2 kB a row instead of 2.4)."""


_SCHEMA: Final = """
CREATE TABLE store (
    only INTEGER PRIMARY KEY CHECK (only = 1),
    embedder TEXT NOT NULL, dimension INTEGER NOT NULL, generation INTEGER NOT NULL DEFAULT 1,
    last_seq INTEGER NOT NULL DEFAULT 0,
    real_rows INTEGER NOT NULL DEFAULT 0, synthetic_rows INTEGER NOT NULL DEFAULT 0,
    real_floor INTEGER NOT NULL DEFAULT 0, synthetic_floor INTEGER NOT NULL DEFAULT 0,
    next_embedder TEXT, next_dimension INTEGER
);
CREATE TABLE trajectories (
    code INTEGER PRIMARY KEY, id TEXT NOT NULL UNIQUE, environment TEXT NOT NULL, source TEXT NOT NULL,
    task TEXT NOT NULL, reward REAL NOT NULL, details TEXT NOT NULL
);
CREATE TABLE transitions (
    seq INTEGER PRIMARY KEY, trajectory INTEGER NOT NULL, position INTEGER NOT NULL, payload BLOB NOT NULL,
    UNIQUE (trajectory, position)
);
"""
_KEYS: Final = "CREATE TABLE {} (seq INTEGER PRIMARY KEY, trajectory INTEGER NOT NULL, key BLOB NOT NULL)"
"""Keys lie apart from payloads: opening a buffer then reads a third of the file, and re-embedding rewrites
one table. `next_keys` holds the keys of another embedder until every row has one."""

_ROWS: Final = """
SELECT t.seq, t.position, t.payload, j.id, j.task, j.details
FROM transitions t JOIN trajectories j ON j.code = t.trajectory
WHERE t.seq IN (SELECT value FROM json_each(?))
"""

_SCAN: Final = """
SELECT k.seq, k.key, j.environment, j.source, j.id, j.task, j.reward
FROM keys k JOIN trajectories j ON j.code = k.trajectory
WHERE k.seq > ? ORDER BY k.seq LIMIT ?
"""

_OLDEST: Final = (
    "SELECT k.seq FROM keys k JOIN trajectories j ON j.code = k.trajectory"
    " WHERE j.source = ? AND k.seq > ? ORDER BY k.seq LIMIT ?"
)

_SET_COUNTS: Final = (
    "UPDATE store SET last_seq = ?, real_rows = ?, synthetic_rows = ?, real_floor = ?, synthetic_floor = ?"
)


class SqliteStore:
    """A `TransitionStore` in one file."""

    def __init__(
        self,
        path: Path,
        *,
        embedder: str | None,
        dimension: int | None = None,
        create: bool = True,
        read_only: bool = False,
        busy_seconds: float = 30.0,
    ) -> None:
        """Open, or `create` if there is nothing; without an `embedder`, accept whichever made the file.

        With `read_only` nothing is written, so a file on read-only media or a full disk can be read.
        """
        self._path = path
        self._wal = path.with_name(path.name + "-wal")
        self._busy_seconds = busy_seconds
        create = create and embedder is not None and not read_only
        if not create and not path.exists():
            raise nothing_there(self.name)
        self._write_lock = threading.Lock()
        self._read_lock = threading.Lock()
        self._writer: sqlite3.Connection | None = None
        with self._explained():
            if read_only:
                self._reader = self._connect_read_only()
                self._check(self._reader, embedder)
                return
            path.parent.mkdir(parents=True, exist_ok=True)
            self._writer = self._connect()
            try:
                self._create_or_check(embedder, dimension, create=create)
                self._reader = self._connect()
            except BaseException:
                self._writer.close()
                raise

    @property
    def name(self) -> str:
        return str(self._path)

    def status(self) -> StoreStatus:
        with self._reading() as db:
            return self._checked_status(db)

    def append(self, additions: Sequence[Addition], *, capacity: int | None) -> list[int | DreamGymError]:
        with self._transaction() as db:
            status = self._checked_status(db)
            ids = {record.trajectory_id for addition in additions for record in addition.records}
            plan = plan_append(additions, _known(db, ids), status)
            db.executemany("INSERT INTO trajectories VALUES (?, ?, ?, ?, ?, ?, ?)", plan.trajectories)
            db.executemany("INSERT INTO transitions VALUES (?, ?, ?, ?)", plan.transitions)
            rows = zip(plan.transitions, plan.keys, strict=True)
            db.executemany(
                "INSERT INTO keys VALUES (?, ?, ?)", ((row[0], row[1], key.tobytes()) for row, key in rows)
            )
            gone, counts = evict(status, plan, capacity, lambda *which: db.execute(_OLDEST, which).fetchall())
            for table in ("transitions", "keys", "next_keys"):
                db.executemany(f"DELETE FROM {table} WHERE seq = ?", gone)
            if counts is not None:
                db.execute(_SET_COUNTS, counts)
        return plan.results

    def scan(self, after: int) -> Chunk:
        with self._reading() as db:
            db.execute("BEGIN")  # the keys may be replaced between two statements
            try:
                dimension = self._checked_status(db).dimension
                rows = db.execute(_SCAN, (after, CHUNK_ROWS)).fetchall()
            finally:
                db.execute("COMMIT")
        keys = np.frombuffer(b"".join(row[1] for row in rows), np.float16).reshape(len(rows), dimension)
        return Chunk.of(rows, restore_keys(keys))

    def get(self, seqs: Sequence[int]) -> dict[int, Demonstration]:
        with self._reading() as db:
            rows = db.execute(_ROWS, (json.dumps(list(seqs)),)).fetchall()
        return decode_rows(rows)

    def known(self, trajectory_ids: Sequence[str]) -> dict[str, set[int]]:
        with self._reading() as db:
            return {key: found.positions for key, found in _known(db, trajectory_ids).items()}

    def holdings(self) -> list[Holding]:
        with self._reading() as db:
            rows = db.execute(
                "SELECT j.environment, j.source, count(*), count(DISTINCT k.trajectory)"
                " FROM keys k JOIN trajectories j ON j.code = k.trajectory GROUP BY 1, 2 ORDER BY 1, 2"
            ).fetchall()
        return [Holding(*row) for row in rows]

    def size_bytes(self) -> int:
        return sum(file.stat().st_size for file in (self._path, self._wal) if file.exists())

    def rekey_start(self, embedder: str, dimension: int) -> None:
        with self._transaction() as db:
            if db.execute("SELECT next_embedder FROM store").fetchone()[0] == embedder:
                return
            db.execute("DELETE FROM next_keys")
            db.execute("UPDATE store SET next_embedder = ?, next_dimension = ?", (embedder, dimension))

    def rekey_next(self, limit: int) -> list[tuple[int, str, str]]:
        with self._reading() as db:
            rows = db.execute(
                "SELECT seq, payload FROM transitions"
                " WHERE seq > (SELECT coalesce(max(seq), 0) FROM next_keys) ORDER BY seq LIMIT ?",
                (limit,),
            ).fetchall()
        return texts_of(rows)

    def rekey_put(self, seqs: Sequence[int], keys: Keys) -> None:
        with self._transaction() as db:
            db.executemany(
                "INSERT OR IGNORE INTO next_keys SELECT seq, trajectory, ? FROM keys WHERE seq = ?",
                [(key.tobytes(), seq) for seq, key in zip(seqs, round_keys(keys), strict=True)],
            )

    def rekey_finish(self) -> bool:
        with self._read_lock:  # a reader sees the old embedder with the old keys, or both new
            with self._transaction() as db:
                old, new, embedder = db.execute(
                    "SELECT (SELECT count(*) FROM keys), (SELECT count(*) FROM next_keys), next_embedder"
                    " FROM store"
                ).fetchone()
                if old != new:
                    return False
                db.execute("DROP TABLE keys")
                db.execute("ALTER TABLE next_keys RENAME TO keys")
                db.execute(_KEYS.format("next_keys"))
                db.execute(
                    "UPDATE store SET embedder = next_embedder, dimension = next_dimension,"
                    " generation = generation + 1, next_embedder = NULL, next_dimension = NULL"
                )
            self._embedder = str(embedder)
            return True

    def compact(self) -> None:
        with self._transaction() as db:
            db.execute("DELETE FROM trajectories WHERE code NOT IN (SELECT trajectory FROM keys)")
        with self._write_lock, self._explained():
            writer = self._checked_writer()
            writer.execute("VACUUM")
            writer.execute("PRAGMA wal_checkpoint(TRUNCATE)")

    def close(self) -> None:
        with self._read_lock, self._write_lock:
            self._reader.close()
            if self._writer is not None:
                self._writer.close()

    def _connect(self) -> sqlite3.Connection:
        db = self._open(str(self._path))
        db.execute(f"PRAGMA page_size = {PAGE_SIZE}")  # has an effect only while the file is empty
        deadline = time.monotonic() + self._busy_seconds
        while True:
            try:
                db.execute("PRAGMA journal_mode = WAL")
                break
            except sqlite3.OperationalError:  # this one statement does not wait for other processes by itself
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.02)
        db.execute("PRAGMA synchronous = FULL")
        return db

    def _connect_read_only(self) -> sqlite3.Connection:
        address = f"{self._path.resolve().as_uri()}?mode=ro"
        try:
            return self._open(address, uri=True)
        except sqlite3.Error:
            if self._wal.exists() and self._wal.stat().st_size:
                raise
            # For media where not even the shared memory of the write-ahead log can be created.
            return self._open(f"{address}&immutable=1", uri=True)

    def _open(self, address: str, *, uri: bool = False) -> sqlite3.Connection:
        db = sqlite3.connect(
            address, timeout=self._busy_seconds, isolation_level=None, check_same_thread=False, uri=uri
        )
        try:
            if not _empty(db) and db.execute("PRAGMA application_id").fetchone()[0] != APPLICATION_ID:
                raise StoreError(f"{self.name}: expected a replay buffer, found another SQLite database")
        except BaseException:
            db.close()
            raise
        return db

    def _checked_writer(self) -> sqlite3.Connection:
        if self._writer is None:
            raise StoreError(f"{self.name}: opened for reading only; open it for writing to change it")
        return self._writer

    def _create_or_check(self, embedder: str | None, dimension: int | None, *, create: bool) -> None:
        with self._transaction() as db:
            fresh = _empty(db)
            if fresh:
                if not create:
                    raise nothing_there(self.name)
                for statement in (*_SCHEMA.split(";\n"), _KEYS.format("keys"), _KEYS.format("next_keys")):
                    db.execute(statement)
                db.execute(
                    "INSERT INTO store (only, embedder, dimension) VALUES (1, ?, ?)", (embedder, dimension)
                )
                db.execute(f"PRAGMA application_id = {APPLICATION_ID}")
                db.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
            self._check(db, embedder)
        if fresh:  # from here on even a damaged write-ahead log leaves a store that opens
            self._checked_writer().execute("PRAGMA wal_checkpoint(TRUNCATE)")
            sync_directory(self._path.parent)

    def _check(self, db: sqlite3.Connection, embedder: str | None) -> None:
        version = db.execute("PRAGMA user_version").fetchone()[0]
        if version != SCHEMA_VERSION:
            raise other_version(self.name, version)
        self._embedder = embedder or _status(db).embedder
        self._checked_status(db)

    def _checked_status(self, db: sqlite3.Connection) -> StoreStatus:
        status = _status(db)
        if status.embedder != self._embedder:
            raise other_embedder(self.name, status.embedder, self._embedder)
        return status

    @contextlib.contextmanager
    def _reading(self) -> Iterator[sqlite3.Connection]:
        with self._read_lock, self._explained():
            yield self._reader

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        """Everything or nothing; returns once the disk has it."""
        with self._write_lock, self._explained():
            writer = self._checked_writer()
            writer.execute("BEGIN IMMEDIATE")
            try:
                yield writer
                writer.execute("COMMIT")
            except BaseException:
                if writer.in_transaction:
                    writer.execute("ROLLBACK")
                raise

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except (sqlite3.Error, OSError) as error:
            raise StoreError(f"{self.name}: {error}; {_advice(error)}") from error


def copy_store(source: Path, target: Path, *, embedder: str, trajectories: Collection[str]) -> bool:
    """Copy a store if it holds exactly these trajectories with keys of this embedder; whether it did.

    Embedding them again would give the same rows.
    """
    try:
        store = SqliteStore(source, embedder=embedder, read_only=True)
    except StoreError:
        return False
    try:
        held = sum(holding.trajectories for holding in store.holdings())
        if held != len(trajectories) or len(store.known(list(trajectories))) != held:
            return False
        with atomic_write(target) as partial, contextlib.closing(sqlite3.connect(partial)) as copy:
            store._reader.backup(copy)
        return True
    finally:
        store.close()


def _empty(db: sqlite3.Connection) -> bool:
    return bool(db.execute("SELECT count(*) FROM sqlite_master").fetchone()[0] == 0)


def _status(db: sqlite3.Connection) -> StoreStatus:
    return StoreStatus(*db.execute(f"SELECT {STATUS_COLUMNS} FROM store").fetchone())


def _known(db: sqlite3.Connection, trajectory_ids: Iterable[str]) -> dict[str, KnownTrajectory]:
    rows = db.execute(
        "SELECT id, code, environment, source, task FROM trajectories"
        " WHERE id IN (SELECT value FROM json_each(?))",
        (json.dumps(list(trajectory_ids)),),
    )
    positions = (
        "SELECT trajectory, position FROM transitions WHERE trajectory IN (SELECT value FROM json_each(?))"
    )
    return known_trajectories(rows, lambda codes: db.execute(positions, (json.dumps(codes),)))


def _advice(error: sqlite3.Error | OSError) -> str:
    primary = getattr(error, "sqlite_errorcode", -1) & 0xFF
    if primary in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
        return "another process keeps it locked: wait for it or end it, then try again"
    if primary in (sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR):
        return "free some disk space and add again: what was acknowledged is safe, this was not stored"
    if primary in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB):
        return "the file is damaged or no replay buffer: move it away and run dreamgym buffer build again"
    return "check that the folder exists and may be written"
