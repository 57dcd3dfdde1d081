"""The store on PostgreSQL with pgvector, shared by several machines.

Sequence numbers of PostgreSQL become visible out of order, so an index that asks for "rows after n" could
miss a late commit. Here every writer locks the single row of `replay_store` first and takes its numbers from
it: numbers follow the order of commits. Tables are in the schema that the address selects.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, Final

from dreamgym.errors import DreamGymError, StoreError
from dreamgym.protocols import Keys
from dreamgym.replay.pgsession import HalfVector, PostgresSession, half_vectors, register_half_vectors
from dreamgym.replay.store import (
    CHUNK_ROWS,
    SCHEMA_VERSION,
    STATUS_COLUMNS,
    Addition,
    AppendPlan,
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
    round_keys,
    texts_of,
)
from dreamgym.types import Demonstration

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

_OLDEST: Final = "SELECT seq FROM replay_keys WHERE source = %s AND seq > %s ORDER BY seq LIMIT %s"
_SET_COUNTS: Final = (
    "UPDATE replay_store SET last_seq = %s, real_rows = %s, synthetic_rows = %s,"
    " real_floor = %s, synthetic_floor = %s"
)


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
        session.write(lambda db: self._create_or_check(db, embedder, dimension, create=create))

    @property
    def name(self) -> str:
        return self._session.name

    def status(self) -> StoreStatus:
        return self._session.read(self._checked_status)

    def append(self, additions: Sequence[Addition], *, capacity: int | None) -> list[int | DreamGymError]:
        ids = {record.trajectory_id for addition in additions for record in addition.records}

        def work(db: psycopg.Connection[Any]) -> AppendPlan:
            status = self._checked_status(db, lock=True)
            plan = plan_append(additions, _known(db, ids), status)
            _insert(db, plan)
            gone, counts = evict(status, plan, capacity, lambda *which: db.execute(_OLDEST, which).fetchall())
            for table in ("replay_transitions", "replay_keys", "replay_next_keys") if gone else ():
                db.execute(f"DELETE FROM {table} WHERE seq = ANY(%s)", ([seq for (seq,) in gone],))
            if counts is not None:
                db.execute(_SET_COUNTS, counts)
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
        return Chunk.of(rows, half_vectors([row[1] for row in rows], dimension))

    def get(self, seqs: Sequence[int]) -> dict[int, Demonstration]:
        rows = self._session.read(
            lambda db: db.execute(
                "SELECT t.seq, t.position, t.payload, j.id, j.task, j.details"
                " FROM replay_transitions t JOIN replay_trajectories j ON j.code = t.trajectory"
                " WHERE t.seq = ANY(%s)",
                (list(seqs),),
                binary=True,
            ).fetchall()
        )
        return decode_rows(rows)

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
        return [Holding(*row) for row in rows]

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
        return texts_of(rows)

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

        with self._session.reading:  # a reader sees the old embedder with the old keys, or both new
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
        # Not the table of another schema in the search path.
        if _one(db, "SELECT to_regclass(quote_ident(current_schema()) || '.replay_store')")[0] is None:
            if not create or embedder is None or dimension is None:
                raise nothing_there(self.name)
            db.execute("CREATE EXTENSION IF NOT EXISTS vector")
            register_half_vectors(db)
            db.execute(_SCHEMA)
            db.execute(_KEYS.format(table="replay_keys", dimension=int(dimension)))
            db.execute(_KEYS.format(table="replay_next_keys", dimension=int(dimension)))
            db.execute(
                "INSERT INTO replay_store (version, embedder, dimension) VALUES (%s, %s, %s)",
                (SCHEMA_VERSION, embedder, dimension),
            )
        version, stored = _one(db, "SELECT version, embedder FROM replay_store")
        if version != SCHEMA_VERSION:
            raise other_version(self.name, version)
        self._embedder = embedder or str(stored)
        self._checked_status(db)

    def _checked_status(self, db: psycopg.Connection[Any], *, lock: bool = False) -> StoreStatus:
        lock_row = " FOR UPDATE" if lock else ""
        status = StoreStatus(*_one(db, f"SELECT {STATUS_COLUMNS} FROM replay_store{lock_row}"))
        if status.embedder != self._embedder:
            raise other_embedder(self.name, status.embedder, self._embedder)
        return status


def _one(db: psycopg.Connection[Any], query: str) -> tuple[Any, ...]:
    row = db.execute(query).fetchone()
    if row is None:
        raise StoreError("expected the row of replay_store, found its table empty; build the buffer again")
    return tuple(row)


def _known(db: psycopg.Connection[Any], trajectory_ids: Iterable[str]) -> dict[str, KnownTrajectory]:
    rows = db.execute(
        "SELECT id, code, environment, source, task FROM replay_trajectories WHERE id = ANY(%s)",
        (list(trajectory_ids),),
    )
    positions = "SELECT trajectory, position FROM replay_transitions WHERE trajectory = ANY(%s)"
    return known_trajectories(rows, lambda codes: db.execute(positions, (codes,)))


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
