"""The tables of the embedded log, and what is done to them inside an open transaction."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterable
from typing import Final

from dreamgym.replay.serialization import AppendPlan, KnownTrajectory
from dreamgym.replay.store import EVICTION_ORDER, LogStatus

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


def status(db: sqlite3.Connection) -> LogStatus:
    row = db.execute(
        "SELECT embedder, dimension, generation, last_seq, real_rows, synthetic_rows, real_floor,"
        " synthetic_floor FROM store"
    ).fetchone()
    embedder, dimension, generation, last_seq, real_rows, synthetic_rows, real_floor, synthetic_floor = row
    return LogStatus(
        embedder=embedder,
        dimension=dimension,
        generation=generation,
        last_seq=last_seq,
        rows={"real": real_rows, "synthetic": synthetic_rows},
        floors={"real": real_floor, "synthetic": synthetic_floor},
    )


def known(db: sqlite3.Connection, trajectory_ids: Iterable[str]) -> dict[str, KnownTrajectory]:
    rows = db.execute(
        "SELECT id, code, environment, source, task FROM trajectories"
        " WHERE id IN (SELECT value FROM json_each(?))",
        (json.dumps(list(trajectory_ids)),),
    )
    known = {
        key: KnownTrajectory(code=code, environment=environment, source=source, task=task)
        for key, code, environment, source, task in rows
    }
    by_code = {trajectory.code: trajectory for trajectory in known.values()}
    for code, position in db.execute(
        "SELECT trajectory, position FROM transitions WHERE trajectory IN (SELECT value FROM json_each(?))",
        (json.dumps(list(by_code)),),
    ):
        by_code[code].positions.add(position)
    return known


def insert(db: sqlite3.Connection, plan: AppendPlan) -> None:
    db.executemany("INSERT INTO trajectories VALUES (?, ?, ?, ?, ?, ?, ?)", plan.trajectories)
    db.executemany("INSERT INTO transitions VALUES (?, ?, ?, ?)", plan.transitions)
    rows = zip(plan.transitions, plan.keys, strict=True)
    keys = [(seq, code, key.tobytes()) for (seq, code, *_), key in rows]
    db.executemany("INSERT INTO keys VALUES (?, ?, ?)", keys)


def settle(db: sqlite3.Connection, status: LogStatus, plan: AppendPlan, capacity: int | None) -> None:
    """Evict what is too much, synthetic first and oldest first, and bring the book up to date."""
    rows = {source: count + plan.added[source] for source, count in status.rows.items()}
    floors = dict(status.floors)
    for source in EVICTION_ORDER:
        excess = min(sum(rows.values()) - capacity, rows[source]) if capacity else 0
        if excess > 0:
            gone = db.execute(_OLDEST, (source, floors[source], excess)).fetchall()
            for table in ("transitions", "keys", "next_keys"):
                db.executemany(f"DELETE FROM {table} WHERE seq = ?", gone)
            floors[source] = gone[-1][0]
            rows[source] -= len(gone)
    if plan.keys or floors != status.floors:
        db.execute(
            "UPDATE store SET last_seq = ?, real_rows = ?, synthetic_rows = ?,"
            " real_floor = ?, synthetic_floor = ?",
            (plan.last_seq, rows["real"], rows["synthetic"], floors["real"], floors["synthetic"]),
        )
