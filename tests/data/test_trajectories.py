"""Shards on disk: what was acknowledged stays, what was torn is set aside, one writer at a time."""

from __future__ import annotations

import contextlib
import gzip
import lzma
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from dreamgym import files
from dreamgym.data.trajectories import TrajectoryWriter, encode_trajectory, read_trajectories, shards
from dreamgym.errors import DataError, StoreError
from dreamgym.types import State, Trajectory
from tests.data.trajectory_examples import episode


def ids(path: Path) -> list[str]:
    return [trajectory.id for trajectory in read_trajectories(path)]


def test_appended_trajectories_are_read_back_in_order_over_shards(tmp_path: Path) -> None:
    episodes = [episode(f"e{number}") for number in range(7)]
    with TrajectoryWriter(tmp_path, shard_rows=3) as writer:
        assert writer.append(episodes[:4]) == 4
        assert writer.append(episodes[4:]) == 3
    assert [shard.name for shard in shards(tmp_path)] == [f"trajectories-0000{n}.jsonl" for n in range(3)]
    assert list(read_trajectories(tmp_path)) == episodes


def test_a_reopened_directory_knows_its_ids_and_takes_none_twice(tmp_path: Path) -> None:
    with TrajectoryWriter(tmp_path, shard_rows=2) as writer:
        writer.append([episode("a"), episode("b"), episode("c")])
    with TrajectoryWriter(tmp_path, shard_rows=2) as writer:
        assert writer.ids == {"a", "b", "c"}
        assert writer.append([episode("b"), episode("d"), episode("d"), episode("e")]) == 2
    assert ids(tmp_path) == ["a", "b", "c", "d", "e"]


def test_ids_in_compressed_shards_count_too(tmp_path: Path) -> None:
    row = encode_trajectory(episode("old")).encode() + b"\n"
    (tmp_path / "base.jsonl.gz").write_bytes(gzip.compress(row))
    with TrajectoryWriter(tmp_path) as writer:
        assert writer.append([episode("old"), episode("new")]) == 1
    assert sorted(ids(tmp_path)) == ["new", "old"]


@pytest.mark.parametrize("cut", [1, 30, 200])
def test_a_torn_tail_is_set_aside_and_reported(tmp_path: Path, cut: int) -> None:
    with TrajectoryWriter(tmp_path) as writer:
        writer.append([episode("a"), episode("b")])
    shard = shards(tmp_path)[0]
    whole = shard.read_bytes()
    torn = encode_trajectory(episode("c")).encode()[:cut]
    shard.write_bytes(whole + torn)
    with TrajectoryWriter(tmp_path) as writer:
        assert writer.torn_bytes == cut
        assert writer.ids == {"a", "b"}
        writer.append([episode("c")])
    assert shard.with_name(shard.name + ".torn").read_bytes() == torn
    assert ids(tmp_path) == ["a", "b", "c"]


def test_blocks_of_zeros_after_a_power_cut_are_a_torn_tail(tmp_path: Path) -> None:
    with TrajectoryWriter(tmp_path) as writer:
        writer.append([episode("a")])
    with shards(tmp_path)[0].open("ab") as shard:
        shard.write(b"\0" * 4096 + b"\n" + b"\0" * 100)
    with TrajectoryWriter(tmp_path) as writer:
        assert writer.torn_bytes == 4197
    assert ids(tmp_path) == ["a"]


def test_a_whole_last_row_that_lacks_only_its_line_break_is_kept(tmp_path: Path) -> None:
    (tmp_path / "trajectories-00000.jsonl").write_text(encode_trajectory(episode("a")), encoding="utf-8")
    with TrajectoryWriter(tmp_path) as writer:
        assert writer.torn_bytes == 0
        writer.append([episode("b")])
    assert ids(tmp_path) == ["a", "b"]


def test_damage_before_the_tail_is_an_error_and_changes_nothing(tmp_path: Path) -> None:
    rows = [encode_trajectory(episode(name)) for name in "abc"]
    shard = tmp_path / "trajectories-00000.jsonl"
    damaged = "\n".join([rows[0], rows[1][:50], rows[2]]) + "\n"
    shard.write_text(damaged, encoding="utf-8")
    with pytest.raises(DataError, match=r"00000\.jsonl:2: expected JSON"):
        TrajectoryWriter(tmp_path)
    assert shard.read_text(encoding="utf-8") == damaged
    with pytest.raises(DataError):
        TrajectoryWriter(tmp_path)  # and the lock was given back


def test_a_second_writer_is_refused_while_the_first_is_open(tmp_path: Path) -> None:
    with TrajectoryWriter(tmp_path), pytest.raises(StoreError, match="another process is writing here"):
        TrajectoryWriter(tmp_path)
    TrajectoryWriter(tmp_path).close()


def test_a_bad_batch_stores_none_of_it(tmp_path: Path) -> None:
    with TrajectoryWriter(tmp_path) as writer:
        with pytest.raises(DataError):
            writer.append([episode("good"), episode("\ud800")])
        assert writer.ids == set()
        assert writer.append([episode("good")]) == 1


def test_a_stream_becomes_a_shard_of_its_own(tmp_path: Path) -> None:
    with TrajectoryWriter(tmp_path, shard_rows=2) as writer:
        writer.append([episode("a")])
        assert writer.add_shard(episode(name) for name in "abcb") == 2
        assert writer.add_shard([episode("c")]) == 0
        assert writer.append([episode("d"), episode("e")]) == 2
    assert [len(shard.read_bytes().splitlines()) for shard in shards(tmp_path)] == [1, 2, 2]
    with TrajectoryWriter(tmp_path) as writer:
        assert writer.ids == set("abcde")


def test_a_stream_that_fails_leaves_nothing_behind(tmp_path: Path) -> None:
    def failing() -> Iterator[Trajectory]:
        yield episode("b")
        raise DataError("no more")

    with TrajectoryWriter(tmp_path) as writer:
        writer.append([episode("a")])
        with pytest.raises(DataError, match="no more"):
            writer.add_shard(failing())
        writer.append([episode("b")])
    assert ids(tmp_path) == ["a", "b"]
    assert not list(tmp_path.glob(".*partial"))


def test_what_a_killed_stream_left_is_unseen_and_cleared_away(tmp_path: Path) -> None:
    left = tmp_path / ".trajectories-00000.jsonl.77.partial"
    left.write_text(encode_trajectory(episode("half")), encoding="utf-8")
    with TrajectoryWriter(tmp_path) as writer:
        writer.append([episode("a")])
        assert not left.exists()
    assert ids(tmp_path) == ["a"]


def test_a_row_too_long_to_be_read_back_is_refused(tmp_path: Path) -> None:
    huge = replace(episode("x"), start=State(text="x" * files.MAX_LINE_BYTES), transitions=())
    with TrajectoryWriter(tmp_path) as writer, pytest.raises(DataError, match="expected a row of at most"):
        writer.append([huge])


FULL_DISK = """
import resource, sys
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from tests.data.trajectory_examples import episode
from dreamgym.errors import StoreError
from dreamgym.data.trajectories import TrajectoryWriter
resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
with TrajectoryWriter(Path(sys.argv[1])) as writer:
    stored = 0
    try:
        while True:
            stored += writer.append([episode(f"e{stored}"), episode(f"e{stored + 1}")])
    except StoreError as error:
        print(stored, error)
    try:
        writer.append([episode("late")])
    except StoreError as error:
        print(error)
"""


def test_a_full_disk_is_a_store_error_and_leaves_no_half_row(tmp_path: Path) -> None:
    finished = subprocess.run(
        [sys.executable, "-c", FULL_DISK, str(tmp_path), str(Path(__file__).parent)],
        capture_output=True, text=True, check=True, timeout=600,
    )  # fmt: skip
    first, second = finished.stdout.splitlines()
    stored = int(first.split()[0])
    assert stored > 5
    assert "cannot append" in first
    assert "open a new one" in second
    assert ids(tmp_path) == [f"e{number}" for number in range(stored)]
    with TrajectoryWriter(tmp_path) as writer:
        assert writer.torn_bytes == 0
        writer.append([episode("late")])
    assert ids(tmp_path)[-1] == "late"


WRITE_UNTIL_KILLED = """
import itertools, sys
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from tests.data.trajectory_examples import episode
from dreamgym.data.trajectories import TrajectoryWriter
with TrajectoryWriter(Path(sys.argv[1]), shard_rows=40) as writer:
    for number in itertools.count(len(writer.ids)):
        writer.append([episode(f"e{number}", turns=50)])
        print(number, flush=True)
"""


def test_what_append_acknowledged_survives_kill_nine(tmp_path: Path) -> None:
    acknowledged = -1
    for seed in range(4):
        with subprocess.Popen(
            [sys.executable, "-c", WRITE_UNTIL_KILLED, str(tmp_path), str(Path(__file__).parent)],
            stdout=subprocess.PIPE, text=True,
        ) as process:  # fmt: skip
            assert process.stdout is not None
            process.stdout.readline()
            time.sleep(random.Random(seed).uniform(0.01, 0.1))
            os.kill(process.pid, signal.SIGKILL)
            acknowledged = max(acknowledged, *map(int, process.stdout.read().split()), 0)
        TrajectoryWriter(tmp_path, shard_rows=40).close()
        found = ids(tmp_path)
        assert found == [f"e{number}" for number in range(len(found))]
        assert len(found) > acknowledged
    assert acknowledged > 4


def test_a_bad_row_is_reported_with_file_and_line(tmp_path: Path) -> None:
    file = tmp_path / "mine.jsonl"
    file.write_text(encode_trajectory(episode("a")) + "\n\n" + '{"id": 3}\n', encoding="utf-8")
    with pytest.raises(DataError) as refusal:
        ids(file)
    assert str(refusal.value).startswith(f"{file}:3: expected")


def test_bad_rows_can_be_skipped_and_counted(tmp_path: Path) -> None:
    good = [encode_trajectory(episode(name)).encode() for name in "abc"]
    (tmp_path / "mine.jsonl").write_bytes(
        b"\n".join([good[0], b"\xff", good[1], b"{}", good[2][:40]]) + b"\n"
    )
    problems: list[DataError] = []
    assert [t.id for t in read_trajectories(tmp_path, on_bad=problems.append)] == ["a", "b"]
    assert [str(problem).split(": ")[0].rpartition(":")[2] for problem in problems] == ["2", "4", "5"]


def test_a_line_without_an_end_is_refused_without_being_kept(tmp_path: Path) -> None:
    file = tmp_path / "bomb.jsonl.gz"
    file.write_bytes(gzip.compress(b"a" * 5_000_000 + b"\n" + b"b\n"))
    with pytest.raises(DataError, match=r"bomb.jsonl.gz:1: expected a line of at most 1000 bytes"):
        list(files.read_lines(file, max_bytes=1000))
    problems: list[DataError] = []
    assert list(files.read_lines(file, max_bytes=1000, on_bad=problems.append)) == [(2, b"b")]
    assert len(problems) == 1


@pytest.mark.parametrize("name", ["cut.jsonl.gz", "cut.jsonl.xz", "no.jsonl.gz", "no.jsonl.xz"])
def test_a_damaged_archive_is_a_data_error(tmp_path: Path, name: str) -> None:
    row = encode_trajectory(episode("a")).encode() + b"\n"
    packed = gzip.compress(row) if name.endswith("gz") else lzma.compress(row)
    file = tmp_path / name
    file.write_bytes(packed[: len(packed) // 2] if name.startswith("cut") else b"not an archive")
    with pytest.raises(DataError, match=name):
        ids(file)
    problems: list[DataError] = []
    list(read_trajectories(file, on_bad=problems.append))
    assert len(problems) == 1


@pytest.mark.parametrize("name", ["nothing.jsonl", "folder", "table.csv"])
def test_a_path_without_trajectories_says_what_was_expected(tmp_path: Path, name: str) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "table.csv").touch()
    with pytest.raises(DataError, match=rf"{name}: expected a (trajectory|directory|name)"):
        ids(tmp_path / name)


def test_one_flipped_bit_in_a_shard_is_noticed_by_reader_and_writer(tmp_path: Path) -> None:
    with TrajectoryWriter(tmp_path) as writer:
        writer.append([episode(f"e{number}", turns=4) for number in range(6)])
    (shard,) = shards(tmp_path)
    whole, expected = shard.read_bytes(), list(read_trajectories(tmp_path))
    for bit in random.Random(0).sample(range(8 * len(whole)), 150):
        damaged = bytearray(whole)
        damaged[bit // 8] ^= 1 << bit % 8
        shard.write_bytes(damaged)
        problems: list[DataError] = []
        kept = list(read_trajectories(tmp_path, on_bad=problems.append))
        assert problems, f"bit {bit} was not noticed by the reader"
        assert all(trajectory in expected for trajectory in kept)
        with contextlib.suppress(DataError), TrajectoryWriter(tmp_path) as writer:
            assert writer.torn_bytes, f"bit {bit} was not noticed by the writer"


def test_a_row_edited_by_hand_is_read_without_its_checksum(tmp_path: Path) -> None:
    with TrajectoryWriter(tmp_path) as writer:
        writer.append([episode("a")])
    (shard,) = shards(tmp_path)
    edited = shard.read_bytes().replace(b'"id":"a"', b'"id":"b"')
    shard.write_bytes(edited)
    with pytest.raises(DataError, match='remove its "crc32"'):
        ids(tmp_path)
    shard.write_bytes(edited[: edited.index(b',"crc32"')] + b"}\n")
    assert ids(tmp_path) == ["b"]


def test_a_writer_that_stored_nothing_leaves_no_directory(tmp_path: Path) -> None:
    TrajectoryWriter(tmp_path / "new").close()
    assert not (tmp_path / "new").exists()
    (tmp_path / "file").touch()
    with pytest.raises(StoreError, match="found a file"):
        TrajectoryWriter(tmp_path / "file")
    with pytest.raises(StoreError, match="cannot be written"):
        TrajectoryWriter(Path("/proc/nowhere"))
