"""Schemas in a shared database: every training run has its tables in one of its own."""

from __future__ import annotations

import secrets
from contextlib import closing
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qsl, quote, urlencode, urlsplit, urlunsplit

from dreamgym.errors import StoreError
from dreamgym.replay.pgsession import PostgresSession

if TYPE_CHECKING:
    import psycopg


def check_database(address: str) -> None:
    """Try all that a run needs there, and take it back.

    Raises:
        MissingExtraError: the client library is not installed.
        StoreError: the server cannot be reached, or refuses; the message says what to do.
    """

    def work(db: psycopg.Connection[Any]) -> None:
        with db.transaction(force_rollback=True):
            path = _create(db, f"dreamgym_check_{secrets.token_hex(6)}")
            db.execute(f"SET LOCAL search_path TO {path}")
            db.execute("CREATE TABLE replay_check (key halfvec(1))")

    with closing(PostgresSession(address)) as session:
        session.write(work)


def create_schema(address: str, name: str, *, reconnect_seconds: float) -> str:
    """Create the schema, unless it exists; returns the address whose tables are in it.

    Tables of other schemas stay out of sight, but for those next to the extension's types.
    """
    with closing(PostgresSession(address, reconnect_seconds=reconnect_seconds)) as session:
        path = session.write(lambda db: _create(db, name))
    parts = urlsplit(address)
    values = dict(parse_qsl(parts.query))
    values["options"] = f"{values.get('options', '')} -csearch_path={path}".strip()
    return urlunsplit(parts._replace(query=urlencode(values, quote_via=quote)))


def _create(db: psycopg.Connection[Any], name: str) -> str:
    """The search path for the schema: its name and the place of pgvector's types."""
    # Two runs may find nothing and create at the same time: let them take turns.
    db.execute("SELECT pg_advisory_xact_lock(hashtext('dreamgym.replay'))")
    db.execute("CREATE EXTENSION IF NOT EXISTS vector")
    db.execute(f"CREATE SCHEMA IF NOT EXISTS {name}")
    row = db.execute(
        "SELECT quote_ident(nspname) FROM pg_extension e JOIN pg_namespace n ON n.oid = e.extnamespace"
        " WHERE extname = 'vector'"
    ).fetchone()
    if row is None:
        raise StoreError("expected the extension 'vector' to be created; create it as an administrator")
    return f"{name},{row[0]}"
