"""Trajectories on disk: append-only shards that survive a crash, validated row by row when read.

A directory has one writer at a time. What `append` returned from is on disk. Readers need no lock.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Set
from pathlib import Path
from typing import Self

from dreamgym.data.schema import (
    SCHEMA_VERSION,
    TrajectoryRow,
    decode_trajectory,
    encode_trajectory,
    parse_json,
    shorten,
)
from dreamgym.errors import DataError, StoreError
from dreamgym.files import (
    MAX_LINE_BYTES,
    PARTIAL,
    AppendLog,
    OnBad,
    OnRead,
    atomic_write,
    lock_directory,
    read_lines,
    report,
    with_checksum,
)
from dreamgym.types import Trajectory

__all__ = [
    "SCHEMA_VERSION",
    "TrajectoryWriter",
    "decode_trajectory",
    "encode_trajectory",
    "read_trajectories",
    "shards",
]


SUFFIXES = (".jsonl", ".jsonl.gz", ".jsonl.xz")


def shards(path: Path) -> list[Path]:
    """The trajectory files at `path`, in reading order: itself, or those directly in the directory.

    Raises:
        DataError: there is nothing, or nothing with a name that ends like a shard's.
    """
    if path.is_dir():
        found = sorted(
            file for file in path.iterdir() if file.name.endswith(SUFFIXES) and not file.name.startswith(".")
        )
        if not found:
            raise DataError(f"{path}: expected a directory of {', '.join(SUFFIXES)} files, found none in it")
        return found
    if not path.exists():
        raise DataError(f"{path}: expected a trajectory file or a directory of them, found nothing")
    if not path.name.endswith(SUFFIXES):
        raise DataError(f"{path}: expected a name ending in {', '.join(SUFFIXES)}, got {path.name!r}")
    return [path]


def read_trajectories(
    path: Path | str, *, on_bad: OnBad | None = None, on_read: OnRead | None = None
) -> Iterator[Trajectory]:
    """Every trajectory of a file or a directory of shards, in order.

    Args:
        on_bad: called for each row that is not one, which is then skipped; without it the first one raises.
        on_read: called with the bytes of the files consumed so far, for progress.

    Raises:
        DataError: ``file:line: expected …, got …``.
    """
    for shard in shards(Path(path)):
        for number, line in read_lines(shard, on_bad=on_bad, on_read=on_read):
            try:
                trajectory = decode_trajectory(line)
            except DataError as error:
                report(DataError(f"{shard}:{number}: {error}"), on_bad)
            else:
                yield trajectory


class TrajectoryWriter:
    """Appends trajectories durably to the shards of one directory.

    Opening locks the directory, reads the ids of all rows, and repairs the last shard: what an interrupted
    write left moves to ``<shard>.torn`` and is counted in `torn_bytes`. Each row carries a checksum.

    Appending an id that is there already does nothing (the first row wins), so work repeated after a crash is
    not recorded twice.

    Raises:
        StoreError: another writer holds the directory, or it cannot be written.
        DataError: a row before the tail is damaged; nothing is repaired then.
    """

    def __init__(self, directory: Path, *, shard_rows: int = 1000) -> None:
        if shard_rows < 1:
            raise ValueError(f"expected shard_rows of at least 1, got {shard_rows}")
        self._directory = directory
        self._shard_rows = shard_rows
        self._ids: set[str] = set()
        self._shard: AppendLog[str] | None = None
        self._number = self._rows = 0
        self.torn_bytes = 0
        self._created = not directory.exists()
        try:
            directory.mkdir(parents=True, exist_ok=True)
            self._lock = lock_directory(directory)
        except OSError as error:
            raise _cannot_open(directory, error) from None
        try:
            self._open_last_shard()
        except OSError as error:
            self.close()
            raise _cannot_open(directory, error) from None
        except BaseException:
            self.close()
            raise

    @property
    def ids(self) -> Set[str]:
        """The ids of all rows in the directory."""
        return self._ids

    def append(self, trajectories: Iterable[Trajectory]) -> int:
        """Store a batch with one sync; return how many were new. All rows are on disk when it returns.

        Raises:
            DataError: one cannot be written as a row; none of the batch has been stored.
            StoreError: the disk is full or broken; rows of this batch may be missing, none is incomplete.
        """
        rows: dict[str, bytes] = {}
        for trajectory in trajectories:
            if trajectory.id not in self._ids and trajectory.id not in rows:
                rows[trajectory.id] = _row(trajectory)
        pending = list(rows.items())
        while pending:
            room = self._shard_rows - self._rows
            if room <= 0:
                self._next_shard()
                continue
            batch, pending = pending[:room], pending[room:]
            self._check_open()
            if self._shard is None:
                self._shard = self._open_shard()
            self._shard.append(row for _, row in batch)
            self._ids.update(identity for identity, _ in batch)
            self._rows += len(batch)
        return len(rows)

    def add_shard(self, trajectories: Iterable[Trajectory]) -> int:
        """Store a whole stream or nothing of it; return how many were new.

        The rows become one shard of their own, which appears when the last one is on disk. An error of the
        stream passes through.
        """
        self._check_open()
        fresh: set[str] = set()
        if self._rows:
            self._next_shard()
        with atomic_write(self._path(self._number)) as path:
            with path.open("wb") as shard:
                for trajectory in trajectories:
                    if trajectory.id not in self._ids and trajectory.id not in fresh:
                        shard.write(with_checksum(_row(trajectory)) + b"\n")
                        fresh.add(trajectory.id)
            if not fresh:
                path.unlink()
        self._ids |= fresh
        self._rows += len(fresh)
        return len(fresh)

    def close(self) -> None:
        """Release the directory; one that this writer created and left empty is removed."""
        if self._shard is not None:
            self._shard.close()
            self._shard = None
        if self._created and not self._lock.closed:
            lock = self._directory / ".lock"
            if list(self._directory.iterdir()) == [lock]:
                lock.unlink()
                self._directory.rmdir()
        self._lock.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _path(self, number: int) -> Path:
        return self._directory / f"trajectories-{number:05d}.jsonl"

    def _open_shard(self) -> AppendLog[str]:
        return AppendLog(self._path(self._number), _row_id, lock=False)

    def _open_last_shard(self) -> None:
        for left_over in self._directory.glob(f".*{PARTIAL}"):
            left_over.unlink()
        ours = sorted(self._directory.glob("trajectories-[0-9][0-9][0-9][0-9][0-9].jsonl"))
        last = ours[-1] if ours else None
        others = [path for path in self._directory.iterdir() if path.name.endswith(SUFFIXES) and path != last]
        for path in sorted(others):
            self._ids.update(_located_id(line, path, number) for number, line in read_lines(path))
        if last is not None:
            self._number = int(last.stem.rpartition("-")[2])
            self._shard = self._open_shard()
            self._rows, self.torn_bytes = len(self._shard.rows), self._shard.torn_bytes
            self._ids.update(self._shard.rows)

    def _next_shard(self) -> None:
        if self._shard is not None:
            self._shard.close()
            self._shard = None
        self._number += 1
        self._rows = 0

    def _check_open(self) -> None:
        if self._lock.closed:
            raise StoreError(f"{self._directory}: this writer is closed; open a new one")


def _cannot_open(directory: Path, error: OSError) -> StoreError:
    if directory.exists() and not directory.is_dir():
        return StoreError(f"{directory}: expected a directory for trajectories, found a file; choose another")
    why = (error.strerror or str(error)).lower()
    return StoreError(f"{directory}: cannot be written ({why}); choose a directory that you may write")


def _row(trajectory: Trajectory) -> bytes:
    row = encode_trajectory(trajectory).encode()
    if len(row) > MAX_LINE_BYTES - 64:
        raise DataError(
            f"trajectory {trajectory.id!r}: expected a row of at most {MAX_LINE_BYTES} bytes, "
            f"got {len(row)}; it could not be read back"
        )
    return row


def _row_id(line: bytes) -> str:
    """The id of a row; its values are validated when it is read."""
    row = parse_json(line)
    if not isinstance(row, dict) or not isinstance(row.get("id"), str):
        raise DataError(f"expected a trajectory with an id, got {shorten(row)}")
    if unknown := row.keys() - TrajectoryRow.model_fields:
        raise DataError(f"expected no key {min(unknown)!r}, got {shorten(row[min(unknown)])}")
    return str(row["id"])


def _located_id(line: bytes, path: Path, number: int) -> str:
    try:
        return _row_id(line)
    except DataError as error:
        raise DataError(f"{path}:{number}: {error}") from None
