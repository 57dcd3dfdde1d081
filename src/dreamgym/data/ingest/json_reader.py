"""Reads the JSON values of a foreign file, each with the place it came from.

A file is either JSON lines or one JSON document (a value, or a list of values), plain or compressed.
"""

from __future__ import annotations

import hashlib
import lzma
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict

from dreamgym.data.schema import dump_json, parse_json
from dreamgym.errors import DataError
from dreamgym.files import OnBad, OnRead, decompressed, read_lines, report

MAX_DOCUMENT_BYTES = 256 * 2**20
DOCUMENT_SUFFIXES = (".json", ".json.gz", ".json.xz")


class Foreign(BaseModel):
    """Part of a foreign record: known keys are validated strictly, other keys are ignored."""

    model_config = ConfigDict(extra="ignore", strict=True, allow_inf_nan=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """One JSON value of a file."""

    where: str
    """``file:line``, as error messages begin."""
    value: Any

    @property
    def digest(self) -> str:
        """Equal for equal values, whatever the order of their keys."""
        text = dump_json(self.value, what=self.where, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def refuse(self, why: object) -> DataError:
        return DataError(f"{self.where}: {why}")


def read_records(
    path: Path, *, on_bad: OnBad | None = None, on_read: OnRead | None = None
) -> Iterator[Record]:
    """Every JSON value of a file.

    Raises:
        DataError: a line or the document is not JSON (with `on_bad` it is passed there and skipped).
    """
    if path.name.endswith(DOCUMENT_SUFFIXES) and not _first_line_stands_alone(path):
        yield from _document(path, on_bad, on_read)
        return
    for number, line in read_lines(path, on_bad=on_bad, on_read=on_read):
        where = f"{path}:{number}"
        try:
            value = parse_json(line)
        except DataError as error:
            report(DataError(f"{where}: {error}"), on_bad)
        else:
            yield Record(where=where, value=value)


def _first_line_stands_alone(path: Path) -> bool:
    """Whether a ``.json`` file really holds JSON lines: its first line is an object and more lines follow."""
    lines = read_lines(path, on_bad=lambda _: None)
    try:
        first = next(lines, (0, b""))[1]
        return isinstance(parse_json(first), dict) and next(lines, None) is not None
    except DataError:
        return False
    finally:
        lines.close()


def _document(path: Path, on_bad: OnBad | None, on_read: OnRead | None) -> Iterator[Record]:
    try:
        with path.open("rb") as raw:
            content = decompressed(raw, path).read(MAX_DOCUMENT_BYTES + 1)
        if len(content) > MAX_DOCUMENT_BYTES:
            raise DataError(f"expected at most {MAX_DOCUMENT_BYTES} bytes in one document, got more")
        value = parse_json(content)
    except (DataError, OSError, EOFError, zlib.error, lzma.LZMAError) as error:
        report(DataError(f"{path}:1: {error}"), on_bad)
        return
    if on_read is not None:
        on_read(path.stat().st_size)
    if not isinstance(value, list):
        yield Record(where=f"{path}:1", value=value)
        return
    for position, item in enumerate(value, 1):
        yield Record(where=f"{path}:1 (item {position})", value=item)
