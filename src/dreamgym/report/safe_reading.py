"""Reads the files of a run, which may be missing, incomplete or hostile.

Nothing here raises for the content of a file: what cannot be used is added to `Problems` and skipped.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeVar

from pydantic_core import from_json

from dreamgym.errors import DataError
from dreamgym.files import read_lines
from dreamgym.printable import printable

Row = dict[str, Any]
T = TypeVar("T")

MAX_BYTES = 64 * 2**20
_MAX_MESSAGES = 20
_LARGEST = 1e15


class Problems:
    """Count of what could not be read, and the first few messages."""

    def __init__(self) -> None:
        self.count = 0
        self.messages: list[str] = []

    def add(self, problem: object) -> None:
        self.count += 1
        if len(self.messages) < _MAX_MESSAGES:
            self.messages.append(printable(str(problem))[:400])


def read_object(path: Path, problems: Problems) -> Row | None:
    """The object in a JSON file; None if it cannot be read."""
    value = read_json(path, problems)
    if value is not None and not isinstance(value, dict):
        problems.add(f"{path}: expected an object, got {type(value).__name__}")
        return None
    return value


def read_json(path: Path, problems: Problems) -> Any:
    """The content of a JSON file; None if it is missing or cannot be read."""
    try:
        if not path.is_file():
            return None
        if path.stat().st_size > MAX_BYTES:
            problems.add(f"{path}: expected at most {MAX_BYTES} bytes, got more")
            return None
        return from_json(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        problems.add(f"{path}: expected JSON, got {error}")
        return None


def read_rows(path: Path, problems: Problems) -> Iterator[Row]:
    """The objects of a JSONL file; other lines are reported and skipped."""
    if not path.is_file():
        return
    for number, line in read_lines(path, on_bad=problems.add):
        try:
            row = from_json(line)
        except (ValueError, RecursionError) as error:
            problems.add(DataError(f"{path}:{number}: expected JSON, got {error}"))
            continue
        if isinstance(row, dict):
            yield row
        else:
            problems.add(DataError(f"{path}:{number}: expected an object, got {type(row).__name__}"))


def number(value: object) -> float | None:
    """A finite number of a size that charts can draw, else None.

    >>> [number(each) for each in (3, 0.5, True, "7", float("nan"), None, 10**400)]
    [3.0, 0.5, None, None, None, None, None]
    """
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        found = float(value)
    except OverflowError:
        return None
    return found if abs(found) <= _LARGEST else None  # no comparison holds for NaN


def count(value: object) -> int:
    """A count; 0 if the value is none."""
    found = number(value)
    return int(found) if found is not None and found >= 0 else 0


def row_at(row: object, *names: str) -> Row:
    """The object under a path of keys; empty if there is none."""
    for name in names:
        row = row.get(name) if isinstance(row, dict) else None
    return row if isinstance(row, dict) else {}


def items(value: object, kind: type[T]) -> list[T]:
    """The elements of this type; empty if the value is no list."""
    return [each for each in value if isinstance(each, kind)] if isinstance(value, list) else []
