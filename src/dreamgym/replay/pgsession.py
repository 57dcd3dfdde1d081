"""A session with a PostgreSQL server: transactions that reconnect, and typed errors with advice."""

from __future__ import annotations

import math
import random
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final, Literal, TypeVar

import numpy as np
import numpy.typing as npt

from dreamgym.errors import MissingExtraError, StoreError
from dreamgym.protocols import Keys
from dreamgym.replay.store import restore_keys

if TYPE_CHECKING:
    import psycopg

T = TypeVar("T")

RECONNECT_SECONDS: Final = 120.0
_FIRST_WAIT, _LONGEST_WAIT = 0.1, 5.0
"""Seconds between two attempts; doubled each time."""
_LOCK_SECONDS: Final = 30
_DEFAULTS: Final = {
    "connect_timeout": 10,
    "keepalives_idle": 30,
    "keepalives_interval": 10,
    "keepalives_count": 3,
    "tcp_user_timeout": 60_000,
}
"""A server that has vanished without a word is noticed after a minute, not after two hours."""


class HalfVector:
    """A key in the binary format of pgvector's halfvec."""

    __slots__ = ("data",)

    def __init__(self, key: npt.NDArray[np.float16]) -> None:
        self.data = len(key).to_bytes(2, "big") + b"\0\0" + key.astype(">f2").tobytes()


def half_vectors(raw: Sequence[bytes], dimension: int) -> Keys:
    """Keys from pgvector's binary format: two bytes of dimension, two unused, then the numbers."""
    rounded = np.array([np.frombuffer(each, ">f2", offset=4) for each in raw], np.float16)
    return restore_keys(rounded.reshape(len(raw), dimension))


class PostgresSession:
    """One connection for reading and one for writing, each used by one thread at a time.

    A transaction whose connection broke is tried again on a new one, for `reconnect_seconds`: the server may
    have been restarted. Whether the first attempt was committed is then unknown, so what a transaction does
    must be harmless to do twice.
    """

    def __init__(self, address: str, *, reconnect_seconds: float = RECONNECT_SECONDS) -> None:
        try:
            import psycopg
        except ImportError:
            raise MissingExtraError("a store on PostgreSQL", "postgres") from None
        self._psycopg = psycopg
        self._address = address
        self._reconnect_seconds = reconnect_seconds
        self.name = self._shown()
        self.reading = threading.RLock()
        self._writing = threading.RLock()
        self._connections: dict[str, psycopg.Connection[Any]] = {}
        self._reached = False

    def read(self, work: Callable[[psycopg.Connection[Any]], T]) -> T:
        """Run `work` in a transaction with a consistent snapshot of the store."""
        with self.reading:
            return self._run("read", work)

    def write(self, work: Callable[[psycopg.Connection[Any]], T]) -> T:
        """Run `work` in a transaction that is durable when this returns."""
        with self._writing:
            return self._run("write", work)

    def alone(self, statements: Sequence[str]) -> None:
        """Run statements that cannot be part of a transaction."""
        try:
            with self._connect() as db:
                db.autocommit = True
                for statement in statements:
                    db.execute(statement)
        except self._psycopg.Error as error:
            raise self._explained(error) from error

    def close(self) -> None:
        with self.reading, self._writing:
            for connection in self._connections.values():
                connection.close()
            self._connections.clear()

    def _run(self, role: Literal["read", "write"], work: Callable[[psycopg.Connection[Any]], T]) -> T:
        deadline, wait = math.inf, _FIRST_WAIT
        while True:
            try:
                db = self._connected(role)
                with db.transaction():
                    return work(db)
            except self._psycopg.Error as error:
                known = self._connections.get(role)
                lost = isinstance(error, self._psycopg.OperationalError) and (known is None or known.closed)
                deadline = min(deadline, time.monotonic() + self._reconnect_seconds)
                # A server that never answered is a wrong address; one that did may be back in a moment.
                if not (lost and self._reached) or time.monotonic() >= deadline:
                    raise self._explained(error) from error
                self._connections.pop(role, None)
            time.sleep(wait * random.uniform(0.5, 1.0))  # many workers must not connect at the same moment
            wait = min(2 * wait, _LONGEST_WAIT)

    def _connected(self, role: Literal["read", "write"]) -> psycopg.Connection[Any]:
        if role not in self._connections:
            db = self._connections[role] = self._connect()
            if role == "read":
                db.isolation_level = self._psycopg.IsolationLevel.REPEATABLE_READ
        return self._connections[role]

    def _connect(self) -> psycopg.Connection[Any]:
        conninfo = self._psycopg.conninfo
        chosen = _DEFAULTS | conninfo.conninfo_to_dict(self._address) | {"application_name": "dreamgym"}
        db = self._psycopg.connect(conninfo.make_conninfo(**chosen))
        self._reached = True
        db.autocommit = True  # transactions are opened where they are meant
        db.execute(f"SET lock_timeout = '{_LOCK_SECONDS}s'")
        db.execute("SET synchronous_commit = on")
        register_half_vectors(db)
        return db

    def _shown(self) -> str:
        """The address without its password, for messages."""
        try:
            parts = self._psycopg.conninfo.conninfo_to_dict(self._address)
        except self._psycopg.Error:  # its text quotes the address, password and all
            raise StoreError("expected an address like postgresql://user@host/database") from None
        return f"postgresql://{parts.get('user', '')}@{parts.get('host', '')}/{parts.get('dbname', '')}"

    def _explained(self, error: psycopg.Error) -> StoreError:
        codes = {
            "53100": "the server's disk is full: free some space and add again, this was not stored",
            "55P03": f"another session has held its lock for {_LOCK_SECONDS} s: wait for it or end it",
            "58P01": "install pgvector on the server, then try again",
            "0A000": "install pgvector 0.7 or newer on the server, then try again",
            "42704": "install pgvector 0.7 or newer on the server, then ALTER EXTENSION vector UPDATE",
            "42501": "ask for the right to create schemas, tables and the extension 'vector'",
        }
        advice = codes.get(error.sqlstate or "", "check that the server is up and the address is right")
        return StoreError(f"{self.name}: {str(error).strip()}; {advice}")


def register_half_vectors(db: psycopg.Connection[Any]) -> None:
    """Let a connection send `HalfVector`; does nothing before the extension exists."""
    from psycopg.adapt import Dumper
    from psycopg.pq import Format
    from psycopg.types import TypeInfo

    class HalfVectorDumper(Dumper):
        format = Format.BINARY

        def dump(self, obj: HalfVector) -> bytes:
            return obj.data

    if info := TypeInfo.fetch(db, "halfvec"):
        HalfVectorDumper.oid = info.oid
        db.adapters.register_dumper(HalfVector, HalfVectorDumper)
