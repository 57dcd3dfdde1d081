"""Search on the server: pgvector's HNSW index, for buffers that no client can hold in memory.

The index belongs to the table of keys, so there is nothing to read from the store. What the server finds is
scored again here, which gives the same similarities and order as the index in memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from dreamgym.protocols import Keys
from dreamgym.replay.index import SOURCES, Hit, best_of, limit_of
from dreamgym.replay.pgsession import HalfVector, PostgresSession, half_vectors
from dreamgym.replay.store import TransitionStore, round_keys
from dreamgym.types import RetrievalFilter, Source

if TYPE_CHECKING:
    import psycopg

FEW_ROWS: Final = 5000
"""Up to this many rows that pass a filter are compared exactly; the index has low recall for so few."""
_SPARE: Final = 8
"""Rows fetched beyond k, because the server compares in half precision."""


class PgvectorIndex:
    """Searches on the server; building the index may take minutes on a large store."""

    def __init__(self, session: PostgresSession, *, few_rows: int = FEW_ROWS) -> None:
        self._session = session
        self._few_rows = few_rows
        self._generation = 0

    def refresh(self, store: TransitionStore) -> None:
        status = store.status()
        if status.generation != self._generation:
            self._session.write(_ensure_index)
            self._generation = status.generation

    def search(self, keys: Keys, *, k: int, filters: Sequence[RetrievalFilter]) -> list[list[Hit]]:
        return self._search(keys, k, filters, exact=False)

    def describe(self) -> dict[str, str]:
        return {"all": "pgvector HNSW on the server"}

    def recall(self, *, sample: int = 64, k: int = 8) -> float:
        rows = self._session.read(
            lambda db: db.execute(
                "SELECT k.key, k.environment, j.id FROM replay_keys k"
                " JOIN replay_trajectories j ON j.code = k.trajectory ORDER BY random() LIMIT %s",
                (sample,),
                binary=True,
            ).fetchall()
        )
        if not rows:
            return 1.0
        keys = half_vectors([key for key, *_ in rows], (len(rows[0][0]) - 4) // 2)
        filters = [RetrievalFilter(environment=each, exclude_trajectory=own) for _, each, own in rows]
        exact = self._search(keys, k, filters, exact=True)
        found = self._search(keys, k, filters, exact=False)
        right = sum(len(hits) for hits in exact)
        same = sum(
            score >= best[-1][0] - 1e-9 for best, hits in zip(exact, found, strict=True) for score, _ in hits
        )
        return same / right if right else 1.0

    def _search(
        self, keys: Keys, k: int, filters: Sequence[RetrievalFilter], *, exact: bool
    ) -> list[list[Hit]]:
        def work(db: psycopg.Connection[Any]) -> list[list[Hit]]:
            db.execute("SET LOCAL hnsw.ef_search = 256")
            db.execute("SET LOCAL hnsw.iterative_scan = relaxed_order")
            return [
                best_of(
                    [
                        hit
                        for source in SOURCES
                        for hit in self._hits(
                            db, key, each, source=source, limit=limit_of(each, source, k), exact=exact
                        )
                    ],
                    k,
                )
                for key, each in zip(keys, filters, strict=True)
            ]

        return self._session.read(work)

    def _hits(
        self,
        db: psycopg.Connection[Any],
        key: Keys,
        filters: RetrievalFilter,
        *,
        source: Source,
        limit: int,
        exact: bool,
    ) -> list[Hit]:
        if limit == 0:
            return []
        where, values = _conditions(filters, source)
        if not exact:
            survivors = db.execute(
                f"SELECT count(*) FROM (SELECT 1 FROM replay_keys WHERE {where} LIMIT %(few)s + 1) AS few",
                {**values, "few": self._few_rows},
            ).fetchone()
            exact = survivors is not None and survivors[0] <= self._few_rows
        # The sum hides the distance from the index: rows are then compared one by one.
        order = "(key <=> %(key)s) + 0, seq" if exact else "key <=> %(key)s"
        rows = db.execute(
            f"SELECT seq, key FROM replay_keys WHERE {where} ORDER BY {order} LIMIT %(limit)s",
            {**values, "key": HalfVector(round_keys(key)), "limit": limit + _SPARE},
            binary=True,
        ).fetchall()
        if not rows:
            return []
        stored = half_vectors([raw for _, raw in rows], len(key)).astype(np.float64)
        scores = np.minimum((stored * key).sum(axis=1), 1.0).tolist()
        return best_of([(score, seq) for score, (seq, _) in zip(scores, rows, strict=True)], limit)


def _ensure_index(db: psycopg.Connection[Any]) -> None:
    db.execute("SELECT pg_advisory_xact_lock(hashtext('dreamgym.replay.index'))")
    found = db.execute(
        "SELECT 1 FROM pg_indexes WHERE schemaname = current_schema() AND tablename = 'replay_keys'"
        " AND indexdef LIKE '%USING hnsw%'"
    ).fetchone()
    if found is None:
        db.execute(
            "CREATE INDEX ON replay_keys USING hnsw (key halfvec_cosine_ops)"
            " WITH (m = 16, ef_construction = 100)"
        )


def _conditions(filters: RetrievalFilter, source: Source) -> tuple[str, dict[str, Any]]:
    where = ["environment = %(environment)s", "source = %(source)s"]
    if filters.min_reward is not None:
        where.append("reward >= %(min_reward)s")
    if filters.exclude_task is not None:
        where.append("task <> %(exclude_task)s")
    if filters.exclude_trajectory is not None:
        where.append(
            "trajectory <> coalesce("
            "(SELECT code FROM replay_trajectories WHERE id = %(exclude_trajectory)s), 0)"
        )
    values = {
        "environment": filters.environment,
        "source": source,
        "min_reward": filters.min_reward,
        "exclude_task": filters.exclude_task,
        "exclude_trajectory": filters.exclude_trajectory,
    }
    return " AND ".join(where), values
