"""Reads lines from files that may be large, compressed or hostile, and says where each came from.

A line is bounded before it is kept, so neither a file without line breaks nor a decompression bomb can fill
the memory.
"""

from __future__ import annotations

import gzip
import lzma
import zlib
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, cast

from dreamgym.errors import DataError

MAX_LINE_BYTES = 64 * 2**20
SUFFIXES = (".jsonl", ".jsonl.gz", ".jsonl.xz")

OnBad = Callable[[DataError], None]
"""Told about a bad line that is being skipped."""
OnRead = Callable[[int], None]
"""Told how many more bytes of the file on disk have been read, for progress."""


def read_lines(
    path: Path, *, on_bad: OnBad | None = None, on_read: OnRead | None = None, max_bytes: int = MAX_LINE_BYTES
) -> Generator[tuple[int, bytes]]:
    """(line number from 1, line without its break) of a plain, gzip or xz file; blank lines are passed over.

    Raises:
        DataError: a line is too long (skipped if `on_bad` is given), or the file cannot be read or
            decompressed (then nothing after it can be had: with `on_bad`, reading ends there).
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
                    tell(DataError(f"{path}:{number}: {why}"), on_bad)
                    _skip_line(stream, max_bytes)
                elif not line.isspace():
                    yield number, line.rstrip(b"\r\n")
                if on_read is not None:
                    position = raw.tell()
                    on_read(position - seen)
                    seen = position
    except (OSError, EOFError, zlib.error, lzma.LZMAError) as error:
        why = f"{type(error).__name__}: {error}"
        tell(DataError(f"{path}:{number + 1}: expected a readable file, got {why}"), on_bad)


def tell(problem: DataError, on_bad: OnBad | None) -> None:
    """Raise a problem, or pass it on where somebody counts them."""
    if on_bad is None:
        raise problem from None
    on_bad(problem)


def decompressed(raw: IO[bytes], path: Path) -> IO[bytes]:
    if path.suffix == ".gz":
        return cast(IO[bytes], gzip.GzipFile(fileobj=raw))
    return cast(IO[bytes], lzma.LZMAFile(raw)) if path.suffix == ".xz" else raw


@contextmanager
def compressed(raw: IO[bytes], path: Path) -> Iterator[IO[bytes]]:
    """A stream into `raw`, compressed as the name of `path` says; equal content gives equal bytes."""
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
