"""Completions on disk, keyed by a hash of the request; several processes may share one file.

A completion that `put` stored survives a crash of the process; a power failure may lose the newest ones, not
the file. Prompts and API keys are not stored.
"""

from __future__ import annotations

import json
import sqlite3
import zlib
from dataclasses import asdict
from pathlib import Path
from typing import Any

from dreamgym.errors import StoreError
from dreamgym.types import Completion

_TABLE = "CREATE TABLE IF NOT EXISTS replies (key BLOB PRIMARY KEY, reply BLOB NOT NULL) WITHOUT ROWID"


class ReplyCache:
    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._database = sqlite3.connect(
                path, timeout=30.0, isolation_level=None, check_same_thread=False
            )
            self._database.execute("PRAGMA journal_mode=WAL")
            self._database.execute("PRAGMA synchronous=NORMAL")
            self._database.execute(_TABLE)
        except (OSError, sqlite3.Error) as error:
            raise StoreError(f"{path}: cannot cache replies there: {error}; choose another cache") from None

    def get(self, key: bytes) -> Completion | None:
        """None for an unreadable row too: the request is sent again and the row is replaced."""
        try:
            found = self._database.execute("SELECT reply FROM replies WHERE key = ?", (key,)).fetchone()
            if found is None:
                return None
            stored: dict[str, Any] = json.loads(zlib.decompress(found[0]))
            return Completion(**{name: _frozen(value) for name, value in stored.items()})
        except (sqlite3.Error, zlib.error, ValueError, TypeError, AttributeError):
            return None

    def put(self, key: bytes, completion: Completion) -> None:
        reply = zlib.compress(json.dumps(asdict(completion), separators=(",", ":")).encode())
        try:
            self._database.execute("INSERT OR REPLACE INTO replies VALUES (?, ?)", (key, reply))
        except sqlite3.Error as error:
            raise StoreError(f"{self.path}: cannot write a reply: {error}; make room and run again") from None

    def __len__(self) -> int:
        return int(self._database.execute("SELECT count(*) FROM replies").fetchone()[0])

    def close(self) -> None:
        self._database.close()


def _frozen(value: Any) -> Any:
    return tuple(_frozen(each) for each in value) if isinstance(value, list) else value
