"""A process that adds episodes from many tasks and threads, telling each acknowledgement, until it is killed.

Usage: crashing_writer.py STORE ROUND
"""

from __future__ import annotations

import asyncio
import os
import sys
import threading

from dreamgym.replay.buffer import ReplayBuffer
from tests.replay.household import episode

TASKS, THREADS = 8, 4


def acknowledge(name: str) -> None:
    os.write(1, f"{name}\n".encode())  # one write, so that lines of several threads do not mix


async def keep_adding(buffer: ReplayBuffer, start: int) -> None:
    for number in range(start, start + 100_000):
        trajectory = episode(number, steps=1 + number % 3)
        await buffer.add(trajectory)
        acknowledge(f"{trajectory.id} {len(trajectory)}")


async def main(store: str, number: int) -> None:
    buffer = ReplayBuffer.open(store)
    starts = [number * 10**8 + worker * 10**6 for worker in range(TASKS + THREADS)]
    for start in starts[:THREADS]:
        threading.Thread(target=lambda at=start: asyncio.run(keep_adding(buffer, at)), daemon=True).start()
    await asyncio.gather(*(keep_adding(buffer, start) for start in starts[THREADS:]))


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], int(sys.argv[2])))
