"""The shared log: PostgreSQL with pgvector, for buffers that outgrow one machine.

Sequence numbers of PostgreSQL become visible out of order, so a follower asking for "rows after n" could miss
a late commit. Here every writer locks the single row of `replay_store` first and takes its numbers from it:
numbers follow the order of commits. Tables lie in the schema that the address selects.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from dreamgym.errors import DreamGymError, StoreError
from dreamgym.protocols import Keys
from dreamgym.replay.pgsession import HalfVector, PostgresSession, half_vectors, teach_half_vectors
from dreamgym.replay.serialization import (
    AppendPlan,
    KnownTrajectory,
    decode_payload,
    decode_record,
    plan_append,
    round_keys,
)
from dreamgym.replay.store import (
    CHUNK_ROWS,
    EVICTION_ORDER,
    SCHEMA_VERSION,
    Addition,
    Chunk,
    Holding,
    LogStatus,
    Record,
    nothing_there,
    other_embedder,
)

if TYPE_CHECKING:
    import psycopg

_SCHEMA: Final = """
CREATE TABLE replay_store (
    version integer NOT NULL, embedder text NOT NULL, dimension integer NOT NULL,
    generation integer NOT NULL DEFAULT 1, last_seq bigint NOT NULL DEFAULT 0,
    real_rows bigint NOT NULL DEFAULT 0, synthetic_rows bigint NOT NULL DEFAULT 0,
    real_floor bigint NOT NULL DEFAULT 0, synthetic_floor bigint NOT NULL DEFAULT 0,
    next_embedder text, next_dimension integer
);
CREATE TABLE replay_trajectories (
    code bigint PRIMARY KEY, id text NOT NULL UNIQUE, environment text NOT NULL, source text NOT NULL,
    task text NOT NULL, reward double precision NOT NULL, details text NOT NULL
);
CREATE TABLE replay_transitions (
    seq bigint PRIMARY KEY, trajectory bigint NOT NULL, position integer NOT NULL, payload bytea NOT NULL,
    UNIQUE (trajectory, position)
);
"""

_KEYS: Final = """
CREATE TABLE {table} (
    seq bigint PRIMARY KEY, trajectory bigint NOT NULL, environment text NOT NULL, source text NOT NULL,
    task text NOT NULL, reward double precision NOT NULL, key halfvec({dimension}) STORAGE PLAIN NOT NULL
);
CREATE INDEX ON {table} (environment, source, reward);
"""
"""Keys carry what filters ask for, so that the server can search them without a join."""


class PostgresStore:
    """A `TransitionStore` on a server. Lost connections are made again; a repeated append changes nothing."""

    def __init__(
        self,
        session: PostgresSession,
        *,
        embedder: str | None,
        dimension: int | None = None,
        create: bool = True,
    ) -> None:
        """Open, or `create` if there is nothing; without an `embedder`, accept whichever made the store."""
        self._session = session
        self.repaired: str | None = None
        session.write(lambda db: self._create_or_check(db, embedder, dimension, create=create))

    @property
    def name(self) -> str:
        return self._session.name

    def status(self) -> LogStatus:
        return self._session.read(self._checked_status)

    def append(self, additions: Sequence[Addition], *, capacity: int | None) -> list[int | DreamGymError]:
        ids = {record.trajectory_id for addition in additions for record in addition.records}

        def work(db: psycopg.Connection[Any]) -> AppendPlan:
            status = self._checked_status(db, lock=True)
            plan = plan_append(additions, _known(db, ids), status)
            _insert(db, plan)
            _settle(db, status, plan, capacity)
            return plan

        return self._session.write(work).results

    def scan(self, after: int) -> Chunk:
        def work(db: psycopg.Connection[Any]) -> tuple[list[Any], int]:
            dimension = self._checked_status(db).dimension
            rows = db.execute(
                "SELECT k.seq, k.key, k.environment, k.source, j.id, k.task, k.reward"
                " FROM replay_keys k JOIN replay_trajectories j ON j.code = k.trajectory"
                " WHERE k.seq > %s ORDER BY k.seq LIMIT %s",
                (after, CHUNK_ROWS),
                binary=True,
            ).fetchall()
            return rows, dimension

        rows, dimension = self._session.read(work)
        columns = zip(*rows, strict=True) if rows else [()] * 7
        seqs, keys, environments, sources, trajectories, tasks, rewards = columns
        return Chunk(
            seqs=np.array(seqs, np.int64),
            keys=half_vectors(keys, dimension),
            environments=environments,
            sources=sources,
            trajectories=trajectories,
            tasks=tasks,
            rewards=np.array(rewards, np.float64),
        )

    def get(self, seqs: Sequence[int]) -> dict[int, Record]:
        rows = self._session.read(
            lambda db: db.execute(
                "SELECT t.seq, t.position, t.payload, j.id, j.environment, j.task, j.reward, j.details"
                " FROM replay_transitions t JOIN replay_trajectories j ON j.code = t.trajectory"
                " WHERE t.seq = ANY(%s)",
                (list(seqs),),
                binary=True,
            ).fetchall()
        )
        return {seq: decode_record(tuple(rest)) for seq, *rest in rows}

    def known(self, trajectory_ids: Sequence[str]) -> dict[str, set[int]]:
        found = self._session.read(lambda db: _known(db, trajectory_ids))
        return {key: trajectory.positions for key, trajectory in found.items()}

    def holdings(self) -> list[Holding]:
        rows = self._session.read(
            lambda db: db.execute(
                "SELECT environment, source, count(*), count(DISTINCT trajectory) FROM replay_keys"
                " GROUP BY 1, 2 ORDER BY 1, 2"
            ).fetchall()
        )
        return [Holding(environment=e, source=s, rows=n, trajectories=t) for e, s, n, t in rows]

    def size_bytes(self) -> int:
        tables = ("replay_trajectories", "replay_transitions", "replay_keys")
        sizes = self._session.read(
            lambda db: [db.execute("SELECT pg_total_relation_size(%s)", (t,)).fetchone() for t in tables]
        )
        return sum(int(size[0]) for size in sizes if size)

    def rekey_start(self, embedder: str, dimension: int) -> None:
        def work(db: psycopg.Connection[Any]) -> None:
            self._checked_status(db, lock=True)
            if _one(db, "SELECT next_embedder FROM replay_store")[0] == embedder:
                return
            db.execute("DROP TABLE replay_next_keys")
            db.execute(_KEYS.format(table="replay_next_keys", dimension=int(dimension)))
            db.execute(
                "UPDATE replay_store SET next_embedder = %s, next_dimension = %s", (embedder, dimension)
            )

        self._session.write(work)

    def rekey_next(self, limit: int) -> list[tuple[int, str, str]]:
        rows = self._session.read(
            lambda db: db.execute(
                "SELECT seq, payload FROM replay_transitions"
                " WHERE seq > (SELECT coalesce(max(seq), 0) FROM replay_next_keys) ORDER BY seq LIMIT %s",
                (limit,),
                binary=True,
            ).fetchall()
        )
        transitions = [(seq, decode_payload(payload)) for seq, payload in rows]
        return [(seq, transition.state.text, transition.action) for seq, transition in transitions]

    def rekey_put(self, seqs: Sequence[int], keys: Keys) -> None:
        rows = [(HalfVector(key), seq) for seq, key in zip(seqs, round_keys(keys), strict=True)]

        def work(db: psycopg.Connection[Any]) -> None:
            self._checked_status(db, lock=True)  # so that no row is evicted meanwhile
            db.cursor().executemany(
                "INSERT INTO replay_next_keys SELECT seq, trajectory, environment, source, task, reward, %s"
                " FROM replay_keys WHERE seq = %s ON CONFLICT DO NOTHING",
                rows,
            )

        self._session.write(work)

    def rekey_finish(self) -> bool:
        def work(db: psycopg.Connection[Any]) -> str | None:
            self._checked_status(db, lock=True)
            old, new, embedder = _one(
                db,
                "SELECT (SELECT count(*) FROM replay_keys), (SELECT count(*) FROM replay_next_keys),"
                " next_embedder FROM replay_store",
            )
            if old != new:
                return None
            db.execute("DROP TABLE replay_keys")
            db.execute("ALTER TABLE replay_next_keys RENAME TO replay_keys")
            db.execute(_KEYS.format(table="replay_next_keys", dimension=1))
            db.execute(
                "UPDATE replay_store SET embedder = next_embedder, dimension = next_dimension,"
                " generation = generation + 1, next_embedder = NULL, next_dimension = NULL"
            )
            return str(embedder)

        with (
            self._session.reading
        ):  # readers of ours meet either the old name with the old keys or the new ones
            embedder = self._session.write(work)
            if embedder is not None:
                self._embedder = embedder
            return embedder is not None

    def compact(self) -> None:
        def drop_orphans(db: psycopg.Connection[Any]) -> None:
            self._checked_status(db, lock=True)
            db.execute(
                "DELETE FROM replay_trajectories j"
                " WHERE NOT EXISTS (SELECT 1 FROM replay_keys k WHERE k.trajectory = j.code)"
            )

        self._session.write(drop_orphans)
        tables = ("replay_trajectories", "replay_transitions", "replay_keys")
        self._session.alone([f"VACUUM (ANALYZE) {table}" for table in tables])

    def close(self) -> None:
        self._session.close()

    def _create_or_check(
        self, db: psycopg.Connection[Any], embedder: str | None, dimension: int | None, *, create: bool
    ) -> None:
        # Two processes may find nothing and create at the same time: let them take turns.
        db.execute("SELECT pg_advisory_xact_lock(hashtext('dreamgym.replay'))")
        if _one(db, "SELECT to_regclass('replay_store')")[0] is None:
            if not create or embedder is None or dimension is None:
                raise nothing_there(self.name)
            db.execute("CREATE EXTENSION IF NOT EXISTS vector")
            teach_half_vectors(db)
            db.execute(_SCHEMA)
            db.execute(_KEYS.format(table="replay_keys", dimension=int(dimension)))
            db.execute(_KEYS.format(table="replay_next_keys", dimension=int(dimension)))
            db.execute(
                "INSERT INTO replay_store (version, embedder, dimension) VALUES (%s, %s, %s)",
                (SCHEMA_VERSION, embedder, dimension),
            )
        version, stored = _one(db, "SELECT version, embedder FROM replay_store")
        if version != SCHEMA_VERSION:
            raise StoreError(
                f"{self.name}: expected schema version {SCHEMA_VERSION}, found {version}; "
                "use the DreamGym version that made it, or build it again from its trajectories"
            )
        self._embedder = embedder or str(stored)
        self._checked_status(db)

    def _checked_status(self, db: psycopg.Connection[Any], *, lock: bool = False) -> LogStatus:
        row = _one(
            db,
            "SELECT embedder, dimension, generation, last_seq, real_rows, synthetic_rows, real_floor,"
            " synthetic_floor FROM replay_store" + (" FOR UPDATE" if lock else ""),
        )
        embedder, dimension, generation, last_seq, real_rows, synthetic_rows, real_floor, synthetic_floor = (
            row
        )
        if embedder != self._embedder:
            raise other_embedder(self.name, embedder, self._embedder)
        return LogStatus(
            embedder=embedder,
            dimension=dimension,
            generation=generation,
            last_seq=last_seq,
            rows={"real": real_rows, "synthetic": synthetic_rows},
            floors={"real": real_floor, "synthetic": synthetic_floor},
        )


def _one(db: psycopg.Connection[Any], query: str) -> tuple[Any, ...]:
    row = db.execute(query).fetchone()
    if row is None:
        raise StoreError("expected the replay buffer's book, found its table empty; build the buffer again")
    return tuple(row)


def _known(db: psycopg.Connection[Any], trajectory_ids: Iterable[str]) -> dict[str, KnownTrajectory]:
    rows = db.execute(
        "SELECT id, code, environment, source, task FROM replay_trajectories WHERE id = ANY(%s)",
        (list(trajectory_ids),),
    )
    known = {
        key: KnownTrajectory(code=code, environment=environment, source=source, task=task)
        for key, code, environment, source, task in rows
    }
    by_code = {trajectory.code: trajectory for trajectory in known.values()}
    for code, position in db.execute(
        "SELECT trajectory, position FROM replay_transitions WHERE trajectory = ANY(%s)", (list(by_code),)
    ):
        by_code[code].positions.add(position)
    return known


def _insert(db: psycopg.Connection[Any], plan: AppendPlan) -> None:
    if not plan.keys:
        return
    cursor = db.cursor()
    cursor.executemany(
        "INSERT INTO replay_trajectories VALUES (%s, %s, %s, %s, %s, %s, %s)", plan.trajectories
    )
    cursor.executemany("INSERT INTO replay_transitions VALUES (%s, %s, %s, %s)", plan.transitions)
    rows = zip(plan.transitions, plan.keys, strict=True)
    cursor.executemany(
        "INSERT INTO replay_keys SELECT %s, code, environment, source, task, reward, %s"
        " FROM replay_trajectories WHERE code = %s",
        [(seq, HalfVector(key), code) for (seq, code, *_), key in rows],
    )


def _settle(db: psycopg.Connection[Any], status: LogStatus, plan: AppendPlan, capacity: int | None) -> None:
    """Evict what is too much, synthetic first and oldest first, and bring the book up to date."""
    rows = {source: count + plan.added[source] for source, count in status.rows.items()}
    floors = dict(status.floors)
    for source in EVICTION_ORDER:
        excess = min(sum(rows.values()) - capacity, rows[source]) if capacity else 0
        if excess > 0:
            gone = db.execute(
                "SELECT seq FROM replay_keys WHERE source = %s AND seq > %s ORDER BY seq LIMIT %s",
                (source, floors[source], excess),
            ).fetchall()
            for table in ("replay_transitions", "replay_keys", "replay_next_keys"):
                db.execute(f"DELETE FROM {table} WHERE seq = ANY(%s)", ([seq for (seq,) in gone],))
            floors[source] = gone[-1][0]
            rows[source] -= len(gone)
    if plan.keys or floors != status.floors:
        db.execute(
            "UPDATE replay_store SET last_seq = %s, real_rows = %s, synthetic_rows = %s,"
            " real_floor = %s, synthetic_floor = %s",
            (plan.last_seq, rows["real"], rows["synthetic"], floors["real"], floors["synthetic"]),
        )
