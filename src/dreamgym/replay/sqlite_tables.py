"""The tables of the SQLite store, and the statements that run inside an open transaction."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterable
from typing import Final

from dreamgym.replay.serialization import AppendPlan, KnownTrajectory, evict, known_trajectories
from dreamgym.replay.store import StoreStatus

SCHEMA: Final = """
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
CREATE TABLE keys (seq INTEGER PRIMARY KEY, trajectory INTEGER NOT NULL, key BLOB NOT NULL);
"""
"""Keys lie apart from payloads: opening a buffer then reads a third of the file, and re-embedding rewrites
one table."""

NEXT_KEYS: Final = (
    "CREATE TABLE next_keys (seq INTEGER PRIMARY KEY, trajectory INTEGER NOT NULL, key BLOB NOT NULL)"
)
"""Holds the keys of another embedder until every row has one."""


RESULTS: Final = """
SELECT t.seq, t.position, t.payload, j.id, j.environment, j.task, j.reward, j.details
FROM transitions t JOIN trajectories j ON j.code = t.trajectory
WHERE t.seq IN (SELECT value FROM json_each(?))
"""

SCAN: Final = """
SELECT k.seq, k.key, j.environment, j.source, j.id, j.task, j.reward
FROM keys k JOIN trajectories j ON j.code = k.trajectory
WHERE k.seq > ? ORDER BY k.seq LIMIT ?
"""

_OLDEST: Final = """
SELECT k.seq FROM keys k JOIN trajectories j ON j.code = k.trajectory
WHERE j.source = ? AND k.seq > ? ORDER BY k.seq LIMIT ?
"""


def empty(db: sqlite3.Connection) -> bool:
    return bool(db.execute("SELECT count(*) FROM sqlite_master").fetchone()[0] == 0)


def status(db: sqlite3.Connection) -> StoreStatus:
    return StoreStatus.of(db.execute(f"SELECT {StoreStatus.COLUMNS} FROM store").fetchone())


def known(db: sqlite3.Connection, trajectory_ids: Iterable[str]) -> dict[str, KnownTrajectory]:
    rows = db.execute(
        "SELECT id, code, environment, source, task FROM trajectories"
        " WHERE id IN (SELECT value FROM json_each(?))",
        (json.dumps(list(trajectory_ids)),),
    )
    positions = (
        "SELECT trajectory, position FROM transitions WHERE trajectory IN (SELECT value FROM json_each(?))"
    )
    return known_trajectories(rows, lambda codes: db.execute(positions, (json.dumps(codes),)))


def insert(db: sqlite3.Connection, plan: AppendPlan) -> None:
    db.executemany("INSERT INTO trajectories VALUES (?, ?, ?, ?, ?, ?, ?)", plan.trajectories)
    db.executemany("INSERT INTO transitions VALUES (?, ?, ?, ?)", plan.transitions)
    rows = zip(plan.transitions, plan.keys, strict=True)
    keys = [(seq, code, key.tobytes()) for (seq, code, *_), key in rows]
    db.executemany("INSERT INTO keys VALUES (?, ?, ?)", keys)


def settle(db: sqlite3.Connection, status: StoreStatus, plan: AppendPlan, capacity: int | None) -> None:
    """Evict down to the capacity and update the counts."""

    def oldest(source: str, floor: int, count: int) -> list[int]:
        return [seq for (seq,) in db.execute(_OLDEST, (source, floor, count))]

    gone, counts = evict(status, plan, capacity, oldest)
    for table in ("transitions", "keys", "next_keys"):
        db.executemany(f"DELETE FROM {table} WHERE seq = ?", [(seq,) for seq in gone])
    if counts is not None:
        db.execute(
            "UPDATE store SET last_seq = ?, real_rows = ?, synthetic_rows = ?,"
            " real_floor = ?, synthetic_floor = ?",
            counts,
        )
