"""The SQLite store with torn files, full disks, read-only media, locks and foreign files."""

from __future__ import annotations

import asyncio
import shutil
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

from dreamgym.errors import StoreError
from dreamgym.replay.buffer import ReplayBuffer
from dreamgym.replay.embedders import LexicalEmbedder
from dreamgym.replay.sqlite import PAGE_SIZE, SqliteStore, copy_store
from dreamgym.types import RetrievalFilter
from tests.replay.household import episode

FRAME = 24 + PAGE_SIZE


@pytest.fixture
def crashed(tmp_path: Path) -> Path:
    """A store as a crash leaves it: ten commits in the write-ahead log, never closed."""
    with ReplayBuffer.open(tmp_path / "live.sqlite") as buffer:
        for number in range(10):
            asyncio.run(buffer.add(episode(number)))
        for end in ("", "-wal"):
            shutil.copy(tmp_path / f"live.sqlite{end}", tmp_path / f"replay.sqlite{end}")
    return tmp_path / "replay.sqlite"


def wal_of(store: Path) -> Path:
    return store.with_name(store.name + "-wal")


def stored_episodes(buffer: ReplayBuffer) -> list[int]:
    known = asyncio.run(buffer.known([episode(number).id for number in range(20)]))
    assert all(positions == {0, 1, 2, 3} for positions in known.values())
    return sorted(int(name.rpartition("-")[2]) for name in known)


@pytest.mark.parametrize("cut", [0, 1, 100, FRAME - 1, FRAME, FRAME + 5000])
def test_after_a_crash_whole_commits_are_there_and_a_torn_one_is_not(crashed: Path, cut: int) -> None:
    wal = wal_of(crashed)
    with wal.open("r+b") as file:
        file.truncate(wal.stat().st_size - cut)
    kept = 9 if cut else 10
    with ReplayBuffer.open(crashed) as buffer:
        assert stored_episodes(buffer) == list(range(kept))
        asyncio.run(buffer.add(episode(15)))
    with ReplayBuffer.open(crashed) as buffer:
        assert stored_episodes(buffer) == [*range(kept), 15]


def search_read_only(store: Path) -> list[str]:
    wanted, step = RetrievalFilter(environment="household"), episode(3).transitions[0]
    with ReplayBuffer.open(store, read_only=True) as buffer:
        (found,) = asyncio.run(buffer.search([(step.state.text, step.action)], k=1, filters=[wanted]))
        with pytest.raises(StoreError, match="opened for reading only"):
            asyncio.run(buffer.add(episode(99)))
        assert buffer.stats().rows == 40
    return [each.trajectory_id for each in found]


def test_a_store_on_read_only_media_can_be_searched(tmp_path: Path) -> None:
    folder = tmp_path / "medium"
    with ReplayBuffer.open(folder / "replay.sqlite") as buffer:
        for number in range(10):
            asyncio.run(buffer.add(episode(number)))
    folder.chmod(0o555)
    try:
        assert search_read_only(folder / "replay.sqlite") == ["household-real-3"]
    finally:
        folder.chmod(0o755)


def test_a_store_whose_shared_memory_cannot_be_created_can_be_searched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = tmp_path / "replay.sqlite"
    with ReplayBuffer.open(store) as buffer:
        for number in range(10):
            asyncio.run(buffer.add(episode(number)))
    wal_of(store).with_name(store.name + "-shm").mkdir()  # SQLite cannot open it, as on a full disk
    assert search_read_only(store) == ["household-real-3"]


def test_a_read_only_store_shows_what_a_writer_adds_meanwhile(tmp_path: Path) -> None:
    store = tmp_path / "replay.sqlite"
    with ReplayBuffer.open(store) as writer, ReplayBuffer.open(store, read_only=True) as reader:
        asyncio.run(writer.add(episode(1)))
        assert reader.stats().rows == 4
    with pytest.raises(StoreError, match="found none"):
        ReplayBuffer.open(tmp_path / "nothing.sqlite", read_only=True)


def test_a_store_of_the_same_trajectories_and_embedder_is_copied(tmp_path: Path) -> None:
    source, names = tmp_path / "source.sqlite", {episode(number).id for number in range(3)}
    with ReplayBuffer.open(source) as buffer:
        for number in range(3):
            asyncio.run(buffer.add(episode(number)))
        lexical = buffer.stats().embedder
        assert copy_store(source, tmp_path / "a.sqlite", embedder=lexical, trajectories=names)
    with ReplayBuffer.open(tmp_path / "a.sqlite") as copy:
        assert copy.stats().rows == 12
        asyncio.run(copy.add(episode(7)))
    with ReplayBuffer.open(source) as buffer:
        assert buffer.stats().rows == 12, "the copy is a store of its own"
    for embedder, wanted in (("other", names), (lexical, names - {min(names)}), (lexical, names | {"x"})):
        assert not copy_store(source, tmp_path / "b.sqlite", embedder=embedder, trajectories=wanted)
    assert not copy_store(tmp_path / "no", tmp_path / "b.sqlite", embedder=lexical, trajectories=names)
    assert not (tmp_path / "b.sqlite").exists()


def test_a_commit_is_synced_to_the_disk_in_large_pages(tmp_path: Path) -> None:
    path = tmp_path / "replay.sqlite"
    with ReplayBuffer.open(path) as buffer:
        log = buffer._store
        assert isinstance(log, SqliteStore)
        assert log._writer is not None
        assert log._writer.execute("PRAGMA synchronous").fetchone()[0] == 2
        assert log._writer.execute("PRAGMA journal_mode").fetchone()[0] == "wal"
        assert log._writer.execute("PRAGMA page_size").fetchone()[0] == 16384


def test_a_file_that_is_something_else_is_left_alone(tmp_path: Path) -> None:
    text = tmp_path / "notes.txt"
    text.write_text("not a database, but long enough to look like one. " * 50)
    other = tmp_path / "other.sqlite"
    with sqlite3.connect(other) as db:
        db.execute("CREATE TABLE mine (x)")
    db.close()
    for path in (text, other):
        before = path.read_bytes()
        with pytest.raises(StoreError, match="replay buffer"):
            ReplayBuffer.open(path)
        assert path.read_bytes() == before


def test_a_file_of_a_newer_version_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "replay.sqlite"
    ReplayBuffer.open(path).close()
    with sqlite3.connect(path) as db:
        db.execute("PRAGMA user_version = 99")
    db.close()
    with pytest.raises(StoreError, match="schema version 1, found 99"):
        ReplayBuffer.open(path)


def test_a_store_kept_locked_by_another_process_is_reported(tmp_path: Path) -> None:
    path = tmp_path / "replay.sqlite"
    ReplayBuffer.open(path).close()
    hold = f"""
import sqlite3, sys
db = sqlite3.connect({str(path)!r}, isolation_level=None)
db.execute("BEGIN IMMEDIATE")
print("held", flush=True)
sys.stdin.read()
"""
    with subprocess.Popen(
        [sys.executable, "-c", hold], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(StoreError, match="another process keeps it locked"):
            SqliteStore(path, embedder=LexicalEmbedder().identity, dimension=384, busy_seconds=0.2)
        holder.communicate("")


def test_a_folder_that_cannot_be_written_is_reported(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match="file"):
        ReplayBuffer.open(tmp_path / "file" / "replay.sqlite")


FULL_DISK = """
import asyncio, resource, sys
from tests.replay.household import episode
from dreamgym.errors import StoreError
from dreamgym.replay.buffer import ReplayBuffer

async def main(path):
    acknowledged = []
    with ReplayBuffer.open(path) as buffer:
        resource.setrlimit(resource.RLIMIT_FSIZE, (4_000_000, resource.RLIM_INFINITY))
        for number in range(1000):
            try:
                await buffer.add(episode(number))
            except StoreError as error:
                print(error)
                assert "free some disk space" in str(error)
                break
            acknowledged.append(number)
        else:
            raise AssertionError("the disk never filled")
        assert buffer.stats().rows == 4 * len(acknowledged)
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        await buffer.add(episode(number))
        acknowledged.append(number)
    with ReplayBuffer.open(path) as buffer:
        known = await buffer.known([episode(number).id for number in acknowledged])
        assert len(known) == len(acknowledged) > 5
        assert buffer.stats().rows == 4 * len(acknowledged)
    print("fine")

asyncio.run(main(sys.argv[1]))
"""


def test_a_full_disk_is_reported_and_nothing_acknowledged_is_lost(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", FULL_DISK, str(tmp_path / "replay.sqlite")],
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.stdout.endswith("fine\n"), done.stdout + done.stderr
