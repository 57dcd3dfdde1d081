"""What was acknowledged survives `kill -9`, and processes that share a store do not harm it."""

from __future__ import annotations

import asyncio
import random
import signal
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

from dreamgym.replay.buffer import ReplayBuffer
from dreamgym.types import RetrievalFilter
from tests.replay.household import episode

HERE = Path(__file__).parent
ROUNDS = 20


def start_writer(store: str, number: int) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, str(HERE / "crashing_writer.py"), store, str(number)],
        stdout=subprocess.PIPE,
        text=True,
    )


def killed_after(writer: subprocess.Popen[str], count: int) -> list[str]:
    """Whole lines that the writer said until its death, which comes when `count` of them were heard."""
    assert writer.stdout is not None
    heard = [writer.stdout.readline() for _ in range(count)]
    assert all(heard), "the writer died by itself"
    writer.send_signal(signal.SIGKILL)
    said = "".join(heard) + writer.stdout.read()
    writer.stdout.close()
    assert writer.wait() == -signal.SIGKILL
    return said[: said.rfind("\n")].splitlines()


async def missing(store: str, acknowledged: list[str]) -> list[str]:
    """Acknowledged trajectories that are not there whole, or that a search does not find."""
    expected = {name: int(steps) for name, steps in (line.split() for line in acknowledged)}
    with ReplayBuffer.open(store) as buffer:
        known = await buffer.known(list(expected))
        lost = [name for name, steps in expected.items() if known.get(name) != set(range(steps))]
        for name in random.Random(0).sample(sorted(expected), 3):
            step = episode(int(name.rpartition("-")[2]), steps=expected[name]).transitions[0]
            (found,) = await buffer.search(
                [(step.state.text, step.action)], k=3, filters=[RetrievalFilter(environment="household")]
            )
            lost += [] if any(name == each.trajectory_id for each in found) else [f"{name} is not found"]
    return lost


@pytest.mark.slow
def test_nothing_acknowledged_is_lost_when_the_writer_is_killed_twenty_times(tmp_path: Path) -> None:
    store = str(tmp_path / "replay.sqlite")
    rng = random.Random(7)
    total: list[str] = []
    for number in range(ROUNDS):
        acknowledged = killed_after(start_writer(store, number), rng.randrange(3, 100))
        total += acknowledged
        assert asyncio.run(missing(store, acknowledged)) == []
    assert asyncio.run(missing(store, total)) == []
    with sqlite3.connect(store) as db:
        assert db.execute("PRAGMA integrity_check").fetchone() == ("ok",)
    db.close()
    assert len(total) > 10 * ROUNDS


def test_nothing_acknowledged_is_lost_on_a_server_whose_client_is_killed(new_schema: object) -> None:
    assert callable(new_schema)
    store = str(new_schema())
    acknowledged = killed_after(start_writer(store, 0), 50)
    assert asyncio.run(missing(store, acknowledged)) == []


def test_two_processes_write_while_a_third_reads(tmp_path: Path) -> None:
    store = str(tmp_path / "replay.sqlite")  # both find nothing and create it
    writers = [start_writer(store, number) for number in (1, 2)]
    for writer in writers:
        assert writer.stdout is not None
        writer.stdout.readline()

    async def watch() -> list[int]:
        with ReplayBuffer.open(store) as reader:
            seen = []
            for _ in range(5):
                (found,) = await reader.search(
                    [("You arrive at desk 1.", "look")],
                    k=50_000,
                    filters=[RetrievalFilter(environment="household")],
                )
                seen.append(len(found))
                assert len({each.transition_id for each in found}) == len(found)
                await asyncio.sleep(0.1)
            return seen

    seen = asyncio.run(watch())
    assert seen == sorted(seen)
    assert seen[0] < seen[-1]
    acknowledged = [line for writer in writers for line in killed_after(writer, 3)]
    assert asyncio.run(missing(store, acknowledged)) == []
    with ReplayBuffer.open(store) as buffer:
        about = buffer.stats()
        assert sum(each.rows for each in about.holdings) == about.rows
