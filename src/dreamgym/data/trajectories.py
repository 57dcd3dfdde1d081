"""Trajectories on disk: append-only shards that survive a crash, read back and checked row by row.

A directory of shards is the record of the real world. One writer at a time owns it; what `append` returned
from is on disk; a tail torn by a crash was never acknowledged, and is set aside when the directory is opened
again. Readers need no lock.
"""

from __future__ import annotations

import contextlib
import lzma
import os
from collections.abc import Iterable, Iterator, Set
from pathlib import Path
from types import TracebackType
from typing import IO, Self

from pydantic import BaseModel, ConfigDict

from dreamgym.data.jsonl import MAX_LINE_BYTES, SUFFIXES, OnBad, OnRead, read_lines, tell
from dreamgym.data.schema import SCHEMA_VERSION, check, decode_trajectory, encode_trajectory, parse_json
from dreamgym.errors import DataError, StoreError
from dreamgym.files import PARTIAL, atomic_write, lock_directory, sync, sync_directory
from dreamgym.types import Trajectory

__all__ = [
    "SCHEMA_VERSION",
    "TrajectoryWriter",
    "decode_trajectory",
    "encode_trajectory",
    "pack",
    "read_trajectories",
    "shards",
]


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
    path: Path, *, on_bad: OnBad | None = None, on_read: OnRead | None = None
) -> Iterator[Trajectory]:
    """Every trajectory of a file or a directory of shards, in order.

    Args:
        on_bad: called for each row that is not one, which is then skipped; without it the first one raises.
        on_read: called with the bytes of the files consumed so far, for progress.

    Raises:
        DataError: ``file:line: expected …, got …``.
    """
    for shard in shards(path):
        for number, line in read_lines(shard, on_bad=on_bad, on_read=on_read):
            try:
                trajectory = decode_trajectory(line)
            except DataError as error:
                tell(DataError(f"{shard}:{number}: {error}"), on_bad)
            else:
                yield trajectory


class TrajectoryWriter:
    """Appends trajectories to the shards of one directory, durably.

    Opening it takes the directory's lock, learns the ids of the rows that are there, and repairs the last
    shard: what a crash left half-written is moved to ``<shard>.torn`` and counted in `torn_bytes`.

    Appending an id that is there already does nothing (the first row wins), so work that is repeated after a
    crash cannot be recorded twice.

    Raises:
        StoreError: another writer has the directory, or it cannot be written.
        DataError: a row before the tail is damaged; nothing is repaired then.
    """

    def __init__(self, directory: Path, *, shard_rows: int = 1000) -> None:
        if shard_rows < 1:
            raise ValueError(f"expected shard_rows of at least 1, got {shard_rows}")
        self._directory = directory
        self._shard_rows = shard_rows
        self._ids: set[str] = set()
        self._shard: IO[bytes] | None = None
        self._size = 0
        self._broken = False
        self.torn_bytes = 0
        try:
            directory.mkdir(parents=True, exist_ok=True)
            self._lock = lock_directory(directory)
        except OSError as error:
            raise StoreError(f"{directory}: cannot open for writing: {error}") from None
        try:
            self._number, self._rows = self._learn()
        except OSError as error:
            self._lock.close()
            raise StoreError(f"{directory}: cannot open for writing: {error}") from None
        except BaseException:
            self._lock.close()
            raise

    @property
    def ids(self) -> Set[str]:
        """The ids of all rows in the directory."""
        return self._ids

    def append(self, trajectories: Iterable[Trajectory]) -> int:
        """Store a batch with one sync; return how many were new. All rows are on disk when it returns.

        Raises:
            DataError: one cannot be written as a row; none of the batch has been stored.
            StoreError: the disk is full or broken; rows of this batch may be missing, none is half there.
        """
        rows: dict[str, bytes] = {}
        for trajectory in trajectories:
            if trajectory.id not in self._ids and trajectory.id not in rows:
                rows[trajectory.id] = _line(trajectory)
        pending = list(rows.items())
        while pending:
            room = self._shard_rows - self._rows
            if room <= 0:
                self._next_shard()
                continue
            batch, pending = pending[:room], pending[room:]
            self._write(b"".join(row for _, row in batch))
            self._ids.update(identity for identity, _ in batch)
            self._rows += len(batch)
        return len(rows)

    def add_shard(self, trajectories: Iterable[Trajectory]) -> int:
        """Store all of a stream, or nothing of it; return how many were new.

        They become one shard of their own, which appears when the last one is on disk. An error from the
        stream itself passes through.
        """
        self._check_usable()
        fresh: set[str] = set()
        if self._rows:
            self._next_shard()
        with atomic_write(self._path(self._number)) as path:
            with path.open("wb") as shard:
                for trajectory in trajectories:
                    if trajectory.id not in self._ids and trajectory.id not in fresh:
                        shard.write(_line(trajectory))
                        fresh.add(trajectory.id)
            if not fresh:
                path.unlink()
        self._ids |= fresh
        self._rows += len(fresh)
        return len(fresh)

    def close(self) -> None:
        if self._shard is not None:
            self._shard.close()
            self._shard = None
        self._lock.close()
        self._broken = True

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _path(self, number: int) -> Path:
        return self._directory / f"trajectories-{number:05d}.jsonl"

    def _learn(self) -> tuple[int, int]:
        """Fill `ids`; return the number of the shard to append to and how many rows it has."""
        for left_over in self._directory.glob(f".*{PARTIAL}"):
            left_over.unlink()
        ours = sorted(self._directory.glob("trajectories-[0-9][0-9][0-9][0-9][0-9].jsonl"))
        last = ours[-1] if ours else None
        others = [path for path in self._directory.iterdir() if path.name.endswith(SUFFIXES) and path != last]
        for path in sorted(others):
            self._ids.update(_row_id(line, path, number) for number, line in read_lines(path))
        if last is None:
            return 0, 0
        ids, self.torn_bytes = _repair(last)
        self._ids.update(ids)
        return int(last.stem.rpartition("-")[2]), len(ids)

    def _next_shard(self) -> None:
        if self._shard is not None:
            self._shard.close()
            self._shard = None
        self._number += 1
        self._rows = 0

    def _check_usable(self) -> None:
        if self._broken:
            raise StoreError(f"{self._directory}: this writer is closed or failed before; open a new one")

    def _write(self, data: bytes) -> None:
        self._check_usable()
        path = self._path(self._number)
        try:
            if self._shard is None:
                new = not path.exists()
                self._shard = path.open("ab", buffering=0)
                self._size = path.stat().st_size
                if new:
                    sync_directory(self._directory)
            written = 0
            while written < len(data):
                written += self._shard.write(data[written:]) or 0
            os.fsync(self._shard.fileno())
            self._size += len(data)
        except OSError as error:
            # After a failed sync nobody knows what is on disk, so this writer writes no more; the next one
            # reads what is there.
            self._broken = True
            self._take_back()
            raise StoreError(
                f"{path}: cannot append {len(data)} bytes: {error}; make room and run again"
            ) from None

    def _take_back(self) -> None:
        """Cut what a failed write left; where even that fails, the next opening repairs it."""
        with contextlib.suppress(OSError):
            if self._shard is not None:
                os.ftruncate(self._shard.fileno(), self._size)


def pack(source: Path, target: Path, *, preset: int = 6) -> int:
    """Write all trajectories at `source` into one ``.jsonl.xz``, sorted by id; return how many.

    The bytes depend on the trajectories alone, not on the order or the shards they were recorded in. The
    target appears whole or not at all. All rows are held in memory while they are sorted.
    """
    if not target.name.endswith(".jsonl.xz"):
        raise DataError(f"{target}: expected a target ending in .jsonl.xz, got {target.name!r}")
    if source.is_dir() and source.resolve() == target.resolve().parent:
        raise DataError(f"{target}: expected a target outside {source}, or every row would be in it twice")
    rows: dict[str, str] = {}
    for trajectory in read_trajectories(source):
        rows.setdefault(trajectory.id, encode_trajectory(trajectory))
    with atomic_write(target) as path, lzma.open(path, "wb", preset=preset) as packed:
        for identity in sorted(rows):
            packed.write(rows[identity].encode() + b"\n")
    return len(rows)


def _line(trajectory: Trajectory) -> bytes:
    line = encode_trajectory(trajectory).encode() + b"\n"
    if len(line) > MAX_LINE_BYTES:
        raise DataError(
            f"trajectory {trajectory.id!r}: expected a row of at most {MAX_LINE_BYTES} bytes, "
            f"got {len(line)}; nobody could read it back"
        )
    return line


class _Identity(BaseModel):
    """The part of a row that a writer must know; the rest is checked when it is read."""

    model_config = ConfigDict(extra="ignore", strict=True)

    id: str


def _row_id(line: bytes, path: Path, number: int) -> str:
    try:
        return check(_Identity, parse_json(line)).id
    except DataError as error:
        raise DataError(f"{path}:{number}: {error}") from None


def _repair(shard: Path) -> tuple[list[str], int]:
    """The ids in a shard, and how many bytes of torn tail were moved from its end to ``<shard>.torn``.

    Unreadable lines are a torn tail only if nothing readable follows them; else the shard is damaged and is
    left as it is.
    """
    ids: list[str] = []
    position = whole = 0
    torn, unended = None, False
    with shard.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            position += len(line)
            if line.isspace():
                continue
            try:
                identity = _row_id(line, shard, number)
            except DataError as error:
                torn = torn or error
                continue
            if torn is not None:
                raise DataError(f"{torn}; whole rows follow, so no crash left this: mend or remove the line")
            ids.append(identity)
            whole, unended = position, not line.endswith(b"\n")
    if torn is not None:
        _set_aside(shard, whole)
    elif unended:
        with shard.open("ab") as file:
            file.write(b"\n")
            sync(file)
    return ids, position - whole if torn else 0


def _set_aside(shard: Path, start: int) -> None:
    with shard.open("r+b") as file, shard.with_name(f"{shard.name}.torn").open("ab") as aside:
        file.seek(start)
        aside.write(file.read())
        sync(aside)
        file.truncate(start)
        sync(file)
