"""Durable files: atomic writes, locks, bounded line reading and append-only logs with a checksum per row."""

from __future__ import annotations

import contextlib
import gzip
import lzma
import os
import re
import shutil
import zlib
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Generic, Self, TypeVar, cast

from dreamgym.errors import DataError, StoreError

PARTIAL = ".partial"
"""Suffix of a file that is being written; its name starts with a dot, so readers skip it."""
MAX_LINE_BYTES = 64 * 2**20
_CHECKSUM = re.compile(rb',"crc32":"([0-9a-f]{8})"\}$')

T = TypeVar("T")
OnBad = Callable[[DataError], None]
"""Called for each bad line that is skipped."""
OnRead = Callable[[int], None]
"""Called with the number of bytes read since the last call, for progress."""


# --- atomic writes -----------------------------------------------------------------------------------------


@contextmanager
def atomic_write(path: Path) -> Iterator[Path]:
    """Yield a temporary name in the directory of `path`; rename it to `path` when the block succeeds.

    The data is synced before the rename, so a crash leaves the old file or the new one. If the block removes
    the temporary file, `path` stays as it was.

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
        raise _cannot_write(path, error) from None
    finally:
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """Replace a file's content atomically. Raises `StoreError`."""
    with atomic_write(path) as partial:
        partial.write_text(text, encoding="utf-8")


@contextmanager
def atomic_directory(path: Path) -> Iterator[Path]:
    """Yield an empty temporary directory that replaces `path` when the block succeeds.

    Raises:
        StoreError: the directory cannot be written.
    """
    partial = path.with_name(f".{path.name}.{os.getpid()}{PARTIAL}")
    try:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        yield partial
        shutil.rmtree(path, ignore_errors=True)
        partial.rename(path)
        sync_directory(path.parent)
    except OSError as error:
        raise _cannot_write(path, error) from None
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def sync_directory(directory: Path) -> None:
    """Make the names in a directory durable, not only the bytes of its files."""
    handle = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _cannot_write(path: Path, error: OSError) -> StoreError:
    return StoreError(f"{path}: cannot write: {error.strerror or error}; free some space and run again")


# --- locks -------------------------------------------------------------------------------------------------


def lock_file(path: Path) -> IO[bytes]:
    """Open a file for unbuffered appending and lock it until it is closed or the process ends.

    Raises:
        StoreError: another process holds the lock.
        OSError: the file cannot be opened.
    """
    import fcntl  # writing needs a POSIX system; reading does not

    file = path.open("ab", buffering=0)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        raise StoreError(
            f"{path}: another process is writing here; wait for it, or choose another directory"
        ) from None
    return cast(IO[bytes], file)


def lock_directory(directory: Path) -> IO[bytes]:
    """Lock a directory for one writer: `lock_file` on its ``.lock``."""
    return lock_file(directory / ".lock")


# --- lines -------------------------------------------------------------------------------------------------


def read_lines(
    path: Path, *, on_bad: OnBad | None = None, on_read: OnRead | None = None, max_bytes: int = MAX_LINE_BYTES
) -> Generator[tuple[int, bytes]]:
    """(line number from 1, line without its break and checksum) of a plain, gzip or xz file, without blanks.

    A line is bounded before it is kept, so a file without line breaks or a decompression bomb cannot fill the
    memory.

    Raises:
        DataError: a line is too long or its checksum does not match (with `on_bad` the line is skipped), or
            the file cannot be read or decompressed (with `on_bad` reading stops there).
    """
    number = 0
    try:
        with path.open("rb") as raw:
            stream = decompressed(raw, path)
            seen = 0
            while line := stream.readline(max_bytes + 1):
                number += 1
                if len(line) > max_bytes and not line.endswith(b"\n"):
                    why = f"expected a line of at most {max_bytes} bytes, got more"
                    report(DataError(f"{path}:{number}: {why}"), on_bad)
                    _skip_line(stream, max_bytes)
                elif not line.isspace():
                    try:
                        content = without_checksum(line.rstrip(b"\r\n"))
                    except DataError as error:
                        report(DataError(f"{path}:{number}: {error}"), on_bad)
                    else:
                        yield number, content
                if on_read is not None:
                    position = raw.tell()
                    on_read(position - seen)
                    seen = position
    except (OSError, EOFError, zlib.error, lzma.LZMAError) as error:
        why = f"{type(error).__name__}: {error}"
        report(DataError(f"{path}:{number + 1}: expected a readable file, got {why}"), on_bad)


def report(problem: DataError, on_bad: OnBad | None) -> None:
    """Pass a problem to `on_bad`, or raise it where there is none."""
    if on_bad is None:
        raise problem from None
    on_bad(problem)


def decompressed(raw: IO[bytes], path: Path) -> IO[bytes]:
    if path.suffix == ".gz":
        return cast(IO[bytes], gzip.GzipFile(fileobj=raw))
    return cast(IO[bytes], lzma.LZMAFile(raw)) if path.suffix == ".xz" else raw


@contextmanager
def compressed(raw: IO[bytes], path: Path) -> Iterator[IO[bytes]]:
    """A stream into `raw`, compressed by the suffix of `path`; equal content gives equal bytes."""
    if path.suffix == ".gz":
        with gzip.GzipFile(filename="", mode="wb", fileobj=raw, mtime=0) as stream:
            yield cast(IO[bytes], stream)
    elif path.suffix == ".xz":
        with lzma.LZMAFile(raw, "wb") as packed:
            yield cast(IO[bytes], packed)
    else:
        yield raw


def _skip_line(stream: IO[bytes], chunk: int) -> None:
    while (part := stream.readline(chunk)) and not part.endswith(b"\n"):
        pass


# --- checksums and append-only logs ------------------------------------------------------------------------


def with_checksum(row: bytes) -> bytes:
    """Add the CRC-32 of a JSON object as its last key.

    >>> with_checksum(b'{"id":"a"}')
    b'{"id":"a","crc32":"9aa4e643"}'
    """
    return b'%s,"crc32":"%08x"}' % (row[:-1], zlib.crc32(row))


def without_checksum(line: bytes) -> bytes:
    """Verify and remove what `with_checksum` added; a row without a checksum is returned as it is.

    Raises:
        DataError: the checksum does not match.
    """
    found = _CHECKSUM.search(line, max(0, len(line) - 22))
    if found is None:
        return line
    row = line[: found.start()] + b"}"
    if int(found[1], 16) != zlib.crc32(row):
        raise _ChecksumError(
            f"expected a row with checksum {found[1].decode()}, got {zlib.crc32(row):08x}: the row was "
            'changed after it was written; restore or remove it (or remove its "crc32" if you edited it)'
        )
    return row


class _ChecksumError(DataError):
    """A complete row whose content changed: damage, never the tail of an interrupted write."""


class AppendLog(Generic[T]):
    """An append-only JSONL file with one writer, a checksum per row, and repair of a torn tail.

    Opening reads every row. What an interrupted write left at the end (lines that `decode` refuses, with no
    valid row after them) moves to ``<name>.torn`` and is counted in `torn_bytes`. After a failed write the
    log accepts no more rows, because what is on disk is unknown until it is opened again.

    Args:
        decode: parses one row without its checksum, and raises `DataError` for one that is not valid.
        fsync: whether `append` waits for the disk; otherwise rows survive a crash of the process only.
        lock: whether to lock the file; False where the directory is locked already.
        checksum: whether rows get a checksum.

    Raises:
        StoreError: the file cannot be opened for writing, or another process is writing it.
        DataError: a row before the tail is damaged; the file is left as it is.
    """

    def __init__(
        self,
        path: Path,
        decode: Callable[[bytes], T],
        *,
        fsync: bool = True,
        lock: bool = True,
        checksum: bool = True,
    ) -> None:
        self.path = path
        self.rows: list[T] = []
        """The rows that were there at opening, decoded."""
        self.torn_bytes = 0
        self._fsync, self._checksum = fsync, checksum
        self._failed = False
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            new = not path.exists()
            self._file = lock_file(path) if lock else cast(IO[bytes], path.open("ab", buffering=0))
            if new and fsync:
                sync_directory(path.parent)
        except OSError as error:
            raise StoreError(f"{path}: cannot open for writing: {error.strerror or error}") from None
        try:
            self._repair(decode)
        except OSError as error:
            self._file.close()
            raise StoreError(f"{path}: cannot open for writing: {error.strerror or error}") from None
        except BaseException:
            self._file.close()
            raise

    def append(self, rows: Iterable[bytes]) -> None:
        """Write rows (JSON objects without a line break) with one sync.

        Raises:
            StoreError: they cannot be written; some may be missing, none is incomplete.
        """
        if self._failed or self._file.closed:
            raise StoreError(f"{self.path}: this log is closed or failed before; open a new one")
        data = b"".join((with_checksum(row) if self._checksum else row) + b"\n" for row in rows)
        size = os.fstat(self._file.fileno()).st_size
        try:
            left = memoryview(data)
            while left:
                left = left[self._file.write(left) :]
            if self._fsync:
                os.fsync(self._file.fileno())
        except OSError as error:
            self._failed = True
            with contextlib.suppress(OSError):  # otherwise the next opening repairs the tail
                os.ftruncate(self._file.fileno(), size)
            raise StoreError(
                f"{self.path}: cannot append {len(data)} bytes: {error.strerror or error}; "
                "free some space and run again"
            ) from None

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _repair(self, decode: Callable[[bytes], T]) -> None:
        position = end = 0
        problem: DataError | None = None
        complete = True
        with self.path.open("rb") as lines:
            for number, line in enumerate(lines, 1):
                position += len(line)
                if line.isspace():
                    continue
                try:
                    row = _decode_line(self.path, number, line, decode)
                except _ChecksumError:
                    raise
                except DataError as error:
                    problem = problem or error
                    continue
                if problem is not None:
                    raise DataError(f"{problem}; valid rows follow, so it is no torn tail: repair the line")
                self.rows.append(row)
                end, complete = position, line.endswith(b"\n")
        if problem is not None:
            self.torn_bytes = position - end
            self._move_tail(end)
        elif not complete:
            self._file.write(b"\n")

    def _move_tail(self, start: int) -> None:
        with (
            self.path.open("rb") as file,
            self.path.with_name(f"{self.path.name}.torn").open("ab") as aside,
        ):
            file.seek(start)
            shutil.copyfileobj(file, aside)
            aside.flush()
            os.fsync(aside.fileno())
        os.ftruncate(self._file.fileno(), start)
        os.fsync(self._file.fileno())


def read_log(path: Path, decode: Callable[[bytes], T]) -> Iterator[T]:
    """The rows of an append-only log, also while it is written; an incomplete last line is skipped.

    Raises:
        DataError: the file cannot be read, or a complete line is damaged.
    """
    try:
        with path.open("rb") as lines:
            for number, line in enumerate(lines, 1):
                if not line.endswith(b"\n"):
                    return
                if not line.isspace():
                    yield _decode_line(path, number, line, decode)
    except OSError as error:
        raise DataError(f"{path}: expected a readable file, {error.strerror or error}") from None


def _decode_line(path: Path, number: int, line: bytes, decode: Callable[[bytes], T]) -> T:
    try:
        return decode(without_checksum(line.rstrip(b"\r\n")))
    except _ChecksumError as error:
        raise _ChecksumError(f"{path}:{number}: {error}") from None
    except DataError as error:
        raise DataError(f"{path}:{number}: {error}") from None
