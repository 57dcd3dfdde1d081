"""The embedded log: one SQLite file, durable on its own, nothing to install.

Write-ahead log with `synchronous=FULL`: a commit returns after the disk has it. One connection writes and one
reads, so that searching never waits for a disk. Several processes may share the file: writers take turns.
"""

from __future__ import annotations

import contextlib
import json
import logging
import shutil
import sqlite3
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

import numpy as np

from dreamgym.errors import DreamGymError, StoreError
from dreamgym.files import sync_directory
from dreamgym.protocols import Keys
from dreamgym.replay import sqlite_tables as tables
from dreamgym.replay.serialization import decode_payload, decode_record, plan_append, restore_keys, round_keys
from dreamgym.replay.store import (
    CHUNK_ROWS,
    SCHEMA_VERSION,
    Addition,
    Chunk,
    Holding,
    LogStatus,
    Record,
    nothing_there,
    other_embedder,
)
from dreamgym.replay.wal import WalPicture, wal_picture

APPLICATION_ID: Final = 0x44474D52
PAGE_SIZE: Final = 16384
"""Rows of a kilobyte or two pack badly into SQLite's default of 4096 (4.2 kB a row instead of 2.4)."""

logger = logging.getLogger("dreamgym.replay")


class SqliteStore:
    """A `TransitionStore` in one file."""

    def __init__(
        self,
        path: Path,
        *,
        embedder: str | None,
        dimension: int | None = None,
        create: bool = True,
        busy_seconds: float = 30.0,
    ) -> None:
        """Open, or `create` if there is nothing; without an `embedder`, accept whichever made the file."""
        self._path = path
        self._busy_seconds = busy_seconds
        self.repaired: str | None = None
        create = create and embedder is not None
        if not create and not path.exists():
            raise nothing_there(self.name)
        self._write_lock = threading.Lock()
        self._read_lock = threading.Lock()
        with self._explained():
            path.parent.mkdir(parents=True, exist_ok=True)
            crashed = self._wal.exists() and self._wal.stat().st_size > 0
            self._writer = self._connect()
            try:
                self._create_or_check(embedder, dimension, create=create)
                if crashed:
                    self._report_torn_tail()
                self._reader = self._connect()
            except BaseException:
                self._writer.close()
                raise

    @property
    def name(self) -> str:
        return str(self._path)

    def status(self) -> LogStatus:
        with self._read_lock, self._explained():
            return self._checked_status(self._reader)

    def append(self, additions: Sequence[Addition], *, capacity: int | None) -> list[int | DreamGymError]:
        with self._transaction() as db:
            status = self._checked_status(db)
            ids = {record.trajectory_id for addition in additions for record in addition.records}
            plan = plan_append(additions, tables.known(db, ids), status)
            tables.insert(db, plan)
            tables.settle(db, status, plan, capacity)
        return plan.results

    def scan(self, after: int) -> Chunk:
        with self._read_lock, self._explained():
            self._reader.execute("BEGIN")  # one picture: the keys may be replaced between two statements
            try:
                dimension = self._checked_status(self._reader).dimension
                rows = self._reader.execute(tables.SCAN, (after, CHUNK_ROWS)).fetchall()
            finally:
                self._reader.execute("COMMIT")
        seqs, keys, environments, sources, trajectories, tasks, rewards = (
            zip(*rows, strict=True) if rows else [()] * 7
        )
        return Chunk(
            seqs=np.array(seqs, np.int64),
            keys=restore_keys(np.frombuffer(b"".join(keys), np.float16).reshape(len(rows), dimension)),
            environments=environments,
            sources=sources,
            trajectories=trajectories,
            tasks=tasks,
            rewards=np.array(rewards, np.float64),
        )

    def get(self, seqs: Sequence[int]) -> dict[int, Record]:
        with self._read_lock, self._explained():
            rows = self._reader.execute(tables.RESULTS, (json.dumps(list(seqs)),)).fetchall()
        return {seq: decode_record(tuple(rest)) for seq, *rest in rows}

    def known(self, trajectory_ids: Sequence[str]) -> dict[str, set[int]]:
        with self._read_lock, self._explained():
            return {key: found.positions for key, found in tables.known(self._reader, trajectory_ids).items()}

    def holdings(self) -> list[Holding]:
        with self._read_lock, self._explained():
            rows = self._reader.execute(
                "SELECT j.environment, j.source, count(*), count(DISTINCT k.trajectory)"
                " FROM keys k JOIN trajectories j ON j.code = k.trajectory GROUP BY 1, 2 ORDER BY 1, 2"
            ).fetchall()
        return [Holding(environment=e, source=s, rows=n, trajectories=t) for e, s, n, t in rows]

    def size_bytes(self) -> int:
        files = (self._path, self._wal)
        return sum(file.stat().st_size for file in files if file.exists())

    def rekey_start(self, embedder: str, dimension: int) -> None:
        with self._transaction() as db:
            if db.execute("SELECT next_embedder FROM store").fetchone()[0] == embedder:
                return
            db.execute("DELETE FROM next_keys")
            db.execute("UPDATE store SET next_embedder = ?, next_dimension = ?", (embedder, dimension))

    def rekey_next(self, limit: int) -> list[tuple[int, str, str]]:
        with self._read_lock, self._explained():
            rows = self._reader.execute(
                "SELECT seq, payload FROM transitions"
                " WHERE seq > (SELECT coalesce(max(seq), 0) FROM next_keys) ORDER BY seq LIMIT ?",
                (limit,),
            ).fetchall()
        transitions = [(seq, decode_payload(payload)) for seq, payload in rows]
        return [(seq, transition.state.text, transition.action) for seq, transition in transitions]

    def rekey_put(self, seqs: Sequence[int], keys: Keys) -> None:
        with self._transaction() as db:
            db.executemany(
                "INSERT OR IGNORE INTO next_keys SELECT seq, trajectory, ? FROM keys WHERE seq = ?",
                [(key.tobytes(), seq) for seq, key in zip(seqs, round_keys(keys), strict=True)],
            )

    def rekey_finish(self) -> bool:
        with self._read_lock:  # readers of ours meet either the old name with the old keys or the new ones
            with self._transaction() as db:
                old, new, embedder = db.execute(
                    "SELECT (SELECT count(*) FROM keys), (SELECT count(*) FROM next_keys), next_embedder"
                    " FROM store"
                ).fetchone()
                if old != new:
                    return False
                db.execute("DROP TABLE keys")
                db.execute("ALTER TABLE next_keys RENAME TO keys")
                db.execute(tables.NEXT_KEYS)
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
            self._writer.execute("VACUUM")
            self._writer.execute("PRAGMA wal_checkpoint(TRUNCATE)")

    def close(self) -> None:
        with self._read_lock, self._write_lock:
            self._reader.close()
            self._writer.close()

    @property
    def _wal(self) -> Path:
        return self._path.with_name(self._path.name + "-wal")

    def _connect(self) -> sqlite3.Connection:
        db = sqlite3.connect(
            self._path, timeout=self._busy_seconds, isolation_level=None, check_same_thread=False
        )
        if not tables.empty(db) and db.execute("PRAGMA application_id").fetchone()[0] != APPLICATION_ID:
            db.close()
            raise StoreError(f"{self.name}: expected a replay buffer, found another SQLite database")
        db.execute(f"PRAGMA page_size = {PAGE_SIZE}")  # heeded only while the file is empty
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

    def _create_or_check(self, embedder: str | None, dimension: int | None, *, create: bool) -> None:
        with self._transaction() as db:
            fresh = tables.empty(db)
            if fresh:
                if not create:
                    raise nothing_there(self.name)
                for statement in (*tables.SCHEMA.split(";\n"), tables.NEXT_KEYS):
                    db.execute(statement)
                db.execute(
                    "INSERT INTO store (only, embedder, dimension) VALUES (1, ?, ?)", (embedder, dimension)
                )
                db.execute(f"PRAGMA application_id = {APPLICATION_ID}")
                db.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
            version = db.execute("PRAGMA user_version").fetchone()[0]
            if version != SCHEMA_VERSION:
                raise StoreError(
                    f"{self.name}: expected schema version {SCHEMA_VERSION}, found {version}; "
                    "use the DreamGym version that made it, or build it again from its trajectories"
                )
            self._embedder = embedder or tables.status(db).embedder
            self._checked_status(db)
        if fresh:  # from here on even a damaged log leaves a store that opens
            self._writer.execute("PRAGMA wal_checkpoint(TRUNCATE)")
            sync_directory(self._path.parent)

    def _checked_status(self, db: sqlite3.Connection) -> LogStatus:
        status = tables.status(db)
        if status.embedder != self._embedder:
            raise other_embedder(self.name, status.embedder, self._embedder)
        return status

    def _report_torn_tail(self) -> None:
        before = self._wal_picture()
        intact = self._writer.execute("PRAGMA wal_checkpoint(PASSIVE)").fetchone()[1]
        if before is None or before != self._wal_picture():
            return  # somebody else is writing: the log is in use, not left behind
        size, commits = before.torn(intact)
        if not size:
            return
        self.repaired = f"{self.name}: dropped {size} bytes that an interrupted write left in its log"
        if commits:
            copy = self._wal.with_name(self._wal.name + ".damaged")
            shutil.copyfile(self._wal, copy)
            self.repaired += f", among them {commits} whole commits behind damage; a copy is in {copy.name}"
        logger.warning("%s", self.repaired)
        self._writer.execute("PRAGMA wal_checkpoint(TRUNCATE)")  # else the next opening reports it again

    def _wal_picture(self) -> WalPicture | None:
        with self._transaction():  # nobody writes meanwhile
            return wal_picture(self._wal, page_size=PAGE_SIZE)

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        """Everything or nothing; returns once the disk has it."""
        with self._write_lock, self._explained():
            self._writer.execute("BEGIN IMMEDIATE")
            try:
                yield self._writer
                self._writer.execute("COMMIT")
            except BaseException:
                if self._writer.in_transaction:
                    self._writer.execute("ROLLBACK")
                raise

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except (sqlite3.Error, OSError) as error:
            raise StoreError(f"{self.name}: {error}; {_advice(error)}") from error


def _advice(error: sqlite3.Error | OSError) -> str:
    primary = getattr(error, "sqlite_errorcode", -1) & 0xFF
    if primary in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
        return "another process keeps it locked: wait for it or end it, then try again"
    if primary in (sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR):
        return "free some disk space and add again: what was acknowledged is safe, this was not stored"
    if primary in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB):
        return "the file is damaged or no replay buffer: move it away and run dreamgym buffer build again"
    return "check that the folder exists and may be written"
