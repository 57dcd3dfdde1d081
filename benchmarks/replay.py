"""Speed of the replay buffer's searches and appends, against NumPy, FAISS and plain SQLite.

    python benchmarks/replay.py [--quick] [--json]

Searches: CPU milliseconds per query on one thread, measured in turns in one process. All rows are in one
environment and source, where partitions help least. Takes about five minutes; `--quick` half a minute.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import sqlite3
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from rich.console import Console
from rich.table import Table

from dreamgym.protocols import Keys
from dreamgym.replay.buffer import ReplayBuffer
from dreamgym.replay.embedders import LexicalEmbedder
from dreamgym.replay.store import Record, encode_payload, round_keys
from dreamgym.types import Outcome, Provenance, RetrievalFilter, State, Transition
from replay_library import STEPS, Blas, Faiss, Library, Ours, household_pairs

BATCH = 64
ONE_THREAD = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Retrieval:
    """One line of the first table; times in CPU ms per query."""

    keys: str
    rows: int
    queries: int
    filtered: bool
    ours: float
    blas: float
    faiss: float
    against_blas: float
    against_faiss: float
    recall_at_8: float


Search = Callable[..., list[list[int]]]


def in_turns(methods: Sequence[Search], batches: Sequence[slice], *, filtered: bool) -> list[list[float]]:
    """CPU ms per query of every method in every batch."""
    times: list[list[float]] = [[] for _ in methods]
    for search in methods:
        search(batches[0], filtered=filtered)
    for batch in batches:
        for search, taken in zip(methods, times, strict=True):
            start = time.process_time()
            search(batch, filtered=filtered)
            taken.append((time.process_time() - start) * 1e3 / (batch.stop - batch.start))
    return times


def measure_retrieval(kind: str, rows: int, rounds: int) -> Iterator[Retrieval]:
    library = Library.make(kind, rows)
    ours, blas, faiss = Ours(library, "exact"), Blas(library), Faiss(library)
    for filtered in (False, True):
        found = ours.search(slice(0, BATCH), filtered=filtered)
        share = library.recall(found, filtered=filtered)
        for queries in (1, BATCH):
            batches = [
                slice(n * queries, (n + 1) * queries) for n in range(rounds if queries > 1 else 2 * rounds)
            ]
            ways = [ours.search, blas.search, faiss.search, faiss.search_with_selector]
            mine, plain, copy, selector = in_turns(ways, batches, filtered=filtered)
            best = min(copy, selector, key=statistics.median)
            yield Retrieval(
                keys=kind,
                rows=rows,
                queries=queries,
                filtered=filtered,
                ours=statistics.median(mine),
                blas=statistics.median(plain),
                faiss=statistics.median(best),
                against_blas=statistics.median(a / b for a, b in zip(mine, plain, strict=True)),
                against_faiss=statistics.median(a / b for a, b in zip(mine, best, strict=True)),
                recall_at_8=share,
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Approximate:
    """FAISS IVF, for large partitions."""

    keys: str
    rows: int
    build_cpu_seconds: float
    ms_per_query: float
    ms_per_query_filtered: float
    recall_at_8: float
    recall_at_8_filtered: float


def measure_approximate(kind: str, rows: int, queries: int) -> Approximate:
    library = Library.make(kind, rows)
    start = time.process_time()
    ours = Ours(library, "approximate")
    ours.index.build()
    built = time.process_time() - start
    times, shares = [], []
    for filtered in (False, True):
        start = time.process_time()
        found = ours.search(slice(0, queries), filtered=filtered)
        times.append((time.process_time() - start) * 1e3 / queries)
        shares.append(library.recall(found, filtered=filtered))
    return Approximate(
        keys=kind,
        rows=rows,
        build_cpu_seconds=built,
        ms_per_query=times[0],
        ms_per_query_filtered=times[1],
        recall_at_8=shares[0],
        recall_at_8_filtered=shares[1],
    )


def made_up_records(count: int, prefix: str) -> list[Record]:
    """Rows of the size that ALFWorld's have, with some 20 admissible actions for each state."""
    pairs = household_pairs(count + 1, seed=len(prefix))
    actions = tuple(
        f"go to {name} {number}" for name in ("cabinet", "drawer", "shelf") for number in range(1, 8)
    )
    states = [State(text=text, admissible_actions=actions) for text, _ in pairs]
    return [
        Record(
            transition=Transition(
                state=states[row],
                action=pairs[row][1],
                outcome=Outcome(next_state=states[row + 1], reward=0.0, terminated=False),
            ),
            environment="household",
            task_id=f"task-{row // STEPS % 100}",
            instruction="put a clean mug on the desk",
            trajectory_id=f"{prefix}-{row // STEPS}",
            position=row % STEPS,
            trajectory_reward=float(row // STEPS % 2),
            provenance=Provenance(source="real", policy="expert"),
        )
        for row in range(count)
    ]


def keys_of(rows: Sequence[Record]) -> Keys:
    return LexicalEmbedder().keys([(row.transition.state.text, row.transition.action) for row in rows])


@dataclass(frozen=True, slots=True, kw_only=True)
class Appends:
    """Rows per second, each acknowledged when it is on disk; wall-clock time."""

    writers: int
    ours: float
    raw: float
    ratio: float
    ours_p99_ms: float
    raw_p99_ms: float


def raw_appends(
    folder: Path, writers: int, rows: Sequence[Record], keys: Keys, seconds: float
) -> list[float]:
    """Latencies of plain SQLite: every writer has a connection, and commits each row itself."""
    path = folder / f"raw{writers}.sqlite"
    db = sqlite3.connect(path, isolation_level=None)
    db.execute("PRAGMA page_size = 16384")
    db.execute("PRAGMA journal_mode = WAL")
    db.execute("CREATE TABLE rows (seq INTEGER PRIMARY KEY, id TEXT UNIQUE, payload BLOB, key BLOB)")
    db.close()
    latencies: list[float] = []
    deadline = time.perf_counter() + seconds

    def write(start: int) -> None:
        db = sqlite3.connect(path, isolation_level=None, timeout=120)
        db.execute("PRAGMA synchronous = FULL")
        for row, key in zip(rows[start::writers], keys[start::writers], strict=True):
            began = time.perf_counter()
            if began > deadline:
                break
            payload = encode_payload(row.transition)
            db.execute("BEGIN IMMEDIATE")
            db.execute(
                "INSERT OR IGNORE INTO rows (id, payload, key) VALUES (?, ?, ?)",
                (row.id, payload, round_keys(key).tobytes()),
            )
            db.execute("COMMIT")
            latencies.append(time.perf_counter() - began)
        db.close()

    threads = [threading.Thread(target=write, args=(start,)) for start in range(writers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return latencies


def our_appends(
    folder: Path, writers: int, rows: Sequence[Record], keys: Keys, seconds: float
) -> list[float]:
    """Latencies of `ReplayBuffer.add`, one row per call, from `writers` tasks."""
    latencies: list[float] = []

    async def write(buffer: ReplayBuffer, start: int, deadline: float) -> None:
        for number in range(start, len(rows), writers):
            began = time.perf_counter()
            if began > deadline:
                break
            await buffer.add(rows[number : number + 1], keys=keys[number : number + 1])
            latencies.append(time.perf_counter() - began)

    async def run() -> None:
        with ReplayBuffer.open(folder / f"ours{writers}.sqlite") as buffer:
            deadline = time.perf_counter() + seconds
            await asyncio.gather(*(write(buffer, start, deadline) for start in range(writers)))

    asyncio.run(run())
    return latencies


def measure_appends(folder: Path, seconds: float) -> Iterator[Appends]:
    rows = made_up_records(60_000, "append")
    keys = keys_of(rows)
    for writers in (1, 16, 64):
        ours = our_appends(folder, writers, rows, keys, seconds)
        raw = raw_appends(folder, writers, rows, keys, seconds)
        yield Appends(
            writers=writers,
            ours=len(ours) / seconds,
            raw=len(raw) / seconds,
            ratio=len(ours) / len(raw),
            ours_p99_ms=float(np.percentile(ours, 99)) * 1e3,
            raw_p99_ms=float(np.percentile(raw, 99)) * 1e3,
        )


OPEN = """
import sys, time, psutil
from dreamgym.replay.buffer import ReplayBuffer
before, start = psutil.Process().memory_info().rss, time.perf_counter()
with ReplayBuffer.open(sys.argv[1]):
    print(time.perf_counter() - start, psutil.Process().memory_info().rss - before)
"""
"""In a process of its own: memory that was used before and freed would hide what a buffer takes."""


def measure_whole(folder: Path, rows: int) -> dict[str, Any]:
    """A buffer on disk from filling to answering, payloads included."""
    path = folder / "whole.sqlite"
    records = made_up_records(rows, "whole")

    async def fill() -> None:
        with ReplayBuffer.open(path) as buffer:
            for start in range(0, rows, 64 * STEPS):
                group = records[start : start + 64 * STEPS]
                await asyncio.gather(*(buffer.add(group[n : n + STEPS]) for n in range(0, len(group), STEPS)))
            await buffer.compact()

    async def ask(buffer: ReplayBuffer) -> float:
        questions = records[:: max(1, rows // BATCH)][:BATCH]
        filters = [
            RetrievalFilter(environment="household", min_reward=1.0, exclude_trajectory=row.trajectory_id)
            for row in questions
        ]
        keys = keys_of(questions)
        await buffer.nearest(keys, k=4, filters=filters)
        start = time.process_time()
        for _ in range(5):
            await buffer.nearest(keys, k=4, filters=filters)
        return (time.process_time() - start) * 1e3 / (5 * len(questions))

    start = time.perf_counter()
    asyncio.run(fill())
    filled = time.perf_counter() - start
    fresh = subprocess.run([sys.executable, "-c", OPEN, path], capture_output=True, text=True, check=True)
    opened, memory = map(float, fresh.stdout.split())
    with ReplayBuffer.open(path) as buffer:
        answered = asyncio.run(ask(buffer))
    return {
        "rows": rows,
        "filled_rows_per_second": rows / filled,
        "open_seconds": opened,
        "disk_bytes_per_row": path.stat().st_size / rows,
        "memory_bytes_per_row": memory / rows,
        "nearest_4_filtered_batch_64_ms_per_query_with_payloads": answered,
    }


def measure(*, quick: bool, say: Callable[[str], None]) -> dict[str, Any]:
    sizes = (10_000, 30_000) if quick else (10_000, 100_000, 300_000)
    rounds = 5 if quick else 9
    retrieval: list[Retrieval] = []
    for kind in ("household", "clustered"):
        for rows in sizes:
            say(f"searching {rows:,} rows of {kind} keys")
            retrieval += measure_retrieval(kind, rows, rounds)
    approximate = []
    for kind in ("household", "clustered"):
        say(f"building IVF of {kind} keys")
        approximate.append(measure_approximate(kind, 15_000 if quick else 100_000, 256))
    with tempfile.TemporaryDirectory() as folder:
        say("appending")
        appends = list(measure_appends(Path(folder), 1.0 if quick else 5.0))
        say("filling, opening and asking a buffer on disk")
        whole = measure_whole(Path(folder), 10_000 if quick else 100_000)
    return {
        "machine": f"{psutil.cpu_count()} cores, {processor()}, Python {platform.python_version()}",
        "retrieval": [asdict(each) for each in retrieval],
        "approximate": [asdict(each) for each in approximate],
        "appends": [asdict(each) for each in appends],
        "whole": whole,
    }


def processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else ():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor()


def table(title: str, rows: Sequence[dict[str, Any]]) -> Table:
    made = Table(title=title, title_justify="left")
    for name in rows[0]:
        made.add_column(name.replace("_", " "))
    for row in rows:
        made.add_row(*(f"{cell:,.3g}" if isinstance(cell, float) else str(cell) for cell in row.values()))
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer rows and rounds")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    arguments = parser.parse_args()
    if any(os.environ.get(name) != value for name, value in ONE_THREAD.items()):
        # Libraries read these when they are loaded, so start again with them.
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **ONE_THREAD})
    progress = Console(stderr=True)
    result = measure(quick=arguments.quick, say=lambda text: progress.print(f"… {text}", style="dim"))
    if arguments.json:
        sys.stdout.write(json.dumps(result, indent=2) + "\n")
        return
    out = Console(width=140)
    out.print(result["machine"])
    out.print(table("retrieval: CPU ms per query, one thread; ratios are ours ÷ theirs", result["retrieval"]))
    out.print(table("approximate retrieval", result["approximate"]))
    out.print(table("durable appends: rows per second, one row per call", result["appends"]))
    out.print(table("a buffer on disk", [result["whole"]]))


if __name__ == "__main__":
    main()
