"""Replies on disk, by a hash of what was asked; several processes may share one file.

A reply that `put` returned from survives a crash of the process; a power cut may cost the newest ones, never
the file. Prompts are not kept, nor is any key.
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
        """
        Raises:
            StoreError: there is something else at this path, or it cannot be written.
        """
        self.path = path
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._rows = sqlite3.connect(path, timeout=30.0, isolation_level=None, check_same_thread=False)
            self._rows.execute("PRAGMA journal_mode=WAL")
            self._rows.execute("PRAGMA synchronous=NORMAL")
            self._rows.execute(_TABLE)
        except (OSError, sqlite3.Error) as error:
            raise StoreError(f"{path}: cannot keep replies there: {error}; choose another cache") from None

    def get(self, key: bytes) -> Completion | None:
        """A row that cannot be read counts as none: it is asked for and written anew."""
        try:
            found = self._rows.execute("SELECT reply FROM replies WHERE key = ?", (key,)).fetchone()
            if found is None:
                return None
            stored: dict[str, Any] = json.loads(zlib.decompress(found[0]))
            return Completion(**{name: _frozen(value) for name, value in stored.items()})
        except (sqlite3.Error, zlib.error, ValueError, TypeError, AttributeError):
            return None

    def put(self, key: bytes, completion: Completion) -> None:
        """
        Raises:
            StoreError: the disk is full, say.
        """
        reply = zlib.compress(json.dumps(asdict(completion), separators=(",", ":")).encode())
        try:
            self._rows.execute("INSERT OR REPLACE INTO replies VALUES (?, ?)", (key, reply))
        except sqlite3.Error as error:
            raise StoreError(f"{self.path}: cannot write a reply: {error}; make room and run again") from None

    def __len__(self) -> int:
        return int(self._rows.execute("SELECT count(*) FROM replies").fetchone()[0])

    def close(self) -> None:
        self._rows.close()


def _frozen(value: Any) -> Any:
    return tuple(_frozen(each) for each in value) if isinstance(value, list) else value
