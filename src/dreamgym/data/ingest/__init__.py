"""Foreign trace formats: reading them into trajectories, and exporting trajectories to them.

`FORMATS` are read, `WRITERS` write. A file's format is recognised by its first record.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from dreamgym.config import nearest_name
from dreamgym.data.ingest import atif, messages, otel, parquet
from dreamgym.data.ingest.dialogue import Defaults
from dreamgym.data.ingest.json_reader import Record, read_records
from dreamgym.data.schema import dump_json, row_of, shorten
from dreamgym.errors import ConfigError, DataError
from dreamgym.files import OnBad, OnRead, atomic_write, compressed, report
from dreamgym.types import Trajectory

__all__ = ["FORMATS", "WRITERS", "Defaults", "Format", "detect", "export", "find_format", "read_foreign"]

Places = Iterator[tuple[str, Trajectory]]
"""Trajectories, each with the ``file:line`` it came from."""


class Format(NamedTuple):
    """A foreign format."""

    name: str
    read: Callable[[Path, Defaults, OnBad | None, OnRead | None], Places]
    recognises: Callable[[Any], bool]
    """Whether a file whose first record is this value is of the format."""


def _one_by_one(convert: Callable[[Record, Defaults], Trajectory]) -> Callable[..., Places]:
    def read(path: Path, defaults: Defaults, on_bad: OnBad | None, on_read: OnRead | None) -> Places:
        for record in read_records(path, on_bad=on_bad, on_read=on_read):
            try:
                trajectory = convert(record, defaults)
            except DataError as error:
                report(record.refuse(error), on_bad)
            else:
                yield record.where, trajectory

    return read


def _spans(path: Path, defaults: Defaults, on_bad: OnBad | None, on_read: OnRead | None) -> Places:
    return otel.from_records(read_records(path, on_bad=on_bad, on_read=on_read), defaults, on_bad)


def _parquet(path: Path, defaults: Defaults, on_bad: OnBad | None, on_read: OnRead | None) -> Places:
    return parquet.read(path, on_bad=on_bad, on_read=on_read)


def _lines(to_record: Callable[[Trajectory], Any]) -> Callable[[Iterable[Trajectory], Path], int]:
    def write(trajectories: Iterable[Trajectory], path: Path) -> int:
        """Write one line per trajectory atomically, compressed by the suffix of the name."""
        written = 0
        with atomic_write(path) as partial, partial.open("wb") as raw, compressed(raw, path) as stream:
            for trajectory in trajectories:
                line = dump_json(to_record(trajectory), what=f"trajectory {trajectory.id!r}")
                stream.write(line.encode() + b"\n")
                written += 1
        return written

    return write


FORMATS = {
    each.name: each
    for each in (
        Format("messages", _one_by_one(messages.from_record), messages.recognises),
        Format("atif", _one_by_one(atif.from_record), atif.recognises),
        Format("otel", _spans, otel.recognises),
        Format("parquet", _parquet, lambda _: False),
    )
}
WRITERS: Mapping[str, Callable[[Iterable[Trajectory], Path], int]] = {
    "trajectories": _lines(row_of),
    "messages": _lines(messages.to_record),
    "atif": _lines(atif.to_record),
    "parquet": parquet.write,
}


def find_format(name: str) -> Format:
    if name not in FORMATS:
        raise ConfigError(f"unknown format {name!r}{nearest_name(name, list(FORMATS))}")
    return FORMATS[name]


def detect(path: Path) -> Format:
    """The format of a file, by its name or its first readable record.

    Raises:
        DataError: it looks like none of them.
    """
    if path.suffix == ".parquet":
        return FORMATS["parquet"]
    problems: list[DataError] = []
    for record in read_records(path, on_bad=problems.append):
        for candidate in FORMATS.values():
            if candidate.recognises(record.value):
                return candidate
        if isinstance(record.value, dict) and {"turns", "provenance"} <= set(record.value):
            raise record.refuse("expected a foreign format, got our own trajectories: use them as they are")
        raise record.refuse(
            f"expected a record of one of the formats {', '.join(FORMATS)}, got {shorten(record.value)}; "
            "name the format with --format"
        )
    raise problems[0] if problems else DataError(f"{path}:1: expected at least one record, got an empty file")


def read_foreign(
    path: Path,
    defaults: Defaults,
    *,
    format: str | None = None,  # noqa: A002 - the word users know it by
    on_bad: OnBad | None = None,
    on_read: OnRead | None = None,
) -> Places:
    """(place, trajectory) of everything in a foreign file; `format` None means detect it.

    Raises:
        DataError: ``file:line: expected …, got …``; with `on_bad` such records are passed to it and skipped.
    """
    chosen = detect(path) if format is None else find_format(format)
    yield from chosen.read(path, defaults, on_bad, on_read)


def export(trajectories: Iterable[Trajectory], path: Path, *, format: str) -> int:  # noqa: A002
    """Write trajectories to one file in one of the formats; return how many are in it."""
    if format not in WRITERS:
        raise ConfigError(f"cannot export the format {format!r}{nearest_name(format, list(WRITERS))}")
    return WRITERS[format](trajectories, path)
