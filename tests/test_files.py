"""Durable files: atomic writes, locks, and logs that notice a torn tail and a changed bit."""

from __future__ import annotations

import contextlib
import json
import os
import random
from pathlib import Path

import pytest

from dreamgym.errors import DataError, StoreError
from dreamgym.files import (
    AppendLog,
    atomic_directory,
    atomic_write,
    lock_directory,
    read_log,
    with_checksum,
    without_checksum,
    write_text,
)


def decode(line: bytes) -> str:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise DataError(f"expected JSON, got {error}") from None
    if not isinstance(row, dict) or set(row) != {"id"}:
        raise DataError(f"expected an object with an id, got {line!r}")
    return str(row["id"])


def filled(path: Path, *names: str) -> bytes:
    with AppendLog(path, decode) as log:
        log.append(json.dumps({"id": name}).encode() for name in names)
    return path.read_bytes()


def test_a_failed_write_leaves_the_old_file_and_no_other(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "file.txt"
    write_text(path, "old")
    with contextlib.suppress(ValueError), atomic_write(path) as partial:
        partial.write_text("half")
        raise ValueError
    assert path.read_text() == "old"
    assert os.listdir(path.parent) == ["file.txt"]  # noqa: PTH208


def test_a_name_that_cannot_be_written_is_a_store_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StoreError, match="cannot write"):
        write_text(tmp_path / "file" / "below", "text")


def test_a_directory_is_replaced_as_a_whole_or_not_at_all(tmp_path: Path) -> None:
    target = tmp_path / "model"
    with atomic_directory(target) as fresh:
        (fresh / "old").touch()
    with contextlib.suppress(RuntimeError), atomic_directory(target) as fresh:
        (fresh / "half").touch()
        raise RuntimeError
    assert [file.name for file in target.iterdir()] == ["old"]
    with atomic_directory(target) as fresh:
        (fresh / "new").touch()
    assert [file.name for file in target.iterdir()] == ["new"]
    assert [file.name for file in tmp_path.iterdir()] == ["model"]


def test_a_second_lock_is_refused_until_the_first_is_closed(tmp_path: Path) -> None:
    lock = lock_directory(tmp_path)
    with pytest.raises(StoreError, match="another process is writing here"):
        lock_directory(tmp_path)
    lock.close()
    lock_directory(tmp_path).close()


def test_rows_are_read_back_at_opening_and_while_the_log_is_open(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "log.jsonl"
    filled(path, "a", "b")
    with AppendLog(path, decode) as log:
        assert log.rows == ["a", "b"]
        log.append([b'{"id": "c"}'])
        assert list(read_log(path, decode)) == ["a", "b", "c"]
        with pytest.raises(StoreError, match="another process"):
            AppendLog(path, decode)
    with pytest.raises(StoreError, match="open a new one"):
        log.append([b'{"id": "d"}'])


def test_a_tail_cut_anywhere_is_moved_aside_and_earlier_rows_stay(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    whole = filled(path, "a", "b")
    first = whole.index(b"\n") + 1
    for cut in range(first + 1, len(whole) - 1):
        path.write_bytes(whole[:cut])
        assert list(read_log(path, decode)) == ["a"]
        with AppendLog(path, decode) as log:
            assert log.rows == ["a"]
            assert log.torn_bytes == cut - first
            log.append([b'{"id": "b"}'])
        assert path.read_bytes() == whole
    path.write_bytes(whole[:-1])
    assert AppendLog(path, decode).rows == ["a", "b"]
    assert path.read_bytes() == whole


def test_any_single_changed_bit_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    whole = filled(path, "first", "second", "third")
    places = random.Random(0).sample(range(8 * len(whole)), 400)
    for bit in places:
        damaged = bytearray(whole)
        damaged[bit // 8] ^= 1 << bit % 8
        path.write_bytes(damaged)
        try:
            with AppendLog(path, decode) as log:
                noticed = log.torn_bytes > 0
        except DataError as error:
            noticed = str(error).startswith(f"{path}:")
        assert noticed, bit


def test_damage_before_the_tail_leaves_the_file_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    damaged = filled(path, "a", "b").replace(b'"a"', b'"x"')
    path.write_bytes(damaged)
    with pytest.raises(DataError, match=r"log\.jsonl:1: expected a row with checksum"):
        AppendLog(path, decode)
    with pytest.raises(DataError, match=r"log\.jsonl:1: "):
        list(read_log(path, decode))
    assert path.read_bytes() == damaged


def test_an_edited_row_is_accepted_without_its_checksum() -> None:
    row = b'{"id":"a"}'
    sealed = with_checksum(row)
    assert json.loads(sealed).keys() == {"id", "crc32"}
    assert without_checksum(sealed) == without_checksum(row) == row
    with pytest.raises(DataError, match="crc32"):
        without_checksum(sealed.replace(b"a", b"b", 1))
