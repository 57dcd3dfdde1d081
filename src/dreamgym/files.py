"""Files that survive a crash: synced, locked, and either whole or not there."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from dreamgym.errors import StoreError

PARTIAL = ".partial"
"""Ends the name of a file that is not whole yet; a leading dot hides it from readers."""


def sync(file: IO[bytes]) -> None:
    file.flush()
    os.fsync(file.fileno())


def sync_directory(directory: Path) -> None:
    """Make the names in a directory durable, not only the bytes of its files."""
    handle = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextmanager
def atomic_write(path: Path) -> Iterator[Path]:
    """A name to write to; what is there at the end becomes `path`, and after an error nothing does.

    A writer that removes the file again leaves `path` as it was.

    Raises:
        StoreError: the file cannot be written.
    """
    partial = path.with_name(f".{path.name}.{os.getpid()}{PARTIAL}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield partial
        if partial.exists():
            with partial.open("rb") as file:
                os.fsync(file.fileno())
            partial.replace(path)
            sync_directory(path.parent)
    except OSError as error:
        raise StoreError(f"{path}: cannot write: {error}; make room and run again") from None
    finally:
        partial.unlink(missing_ok=True)


def lock_directory(directory: Path) -> IO[bytes]:
    """Hold a directory for one writer until the returned file is closed, or its process is gone.

    Raises:
        StoreError: another writer holds it.
    """
    import fcntl  # writing needs a POSIX system; reading does not

    lock = (directory / ".lock").open("ab")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.close()
        raise StoreError(
            f"{directory}: another process is writing here; wait for it, or choose another directory"
        ) from None
    return lock
