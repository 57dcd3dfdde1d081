"""Plays many episodes and compares resources before and after: memory, files, threads, tasks, processes."""

from __future__ import annotations

import asyncio
import gc
import os
import random
import threading
from dataclasses import dataclass
from pathlib import Path

from dreamgym.testing.episode_probe import NONSENSE, CheckFailed, CheckSkipped, Subject, act, begin
from dreamgym.types import Task

_TOLERANCE = 1.10
_SETTLING = 60
"""Polls, 0.05 s apart, for closed episodes to release their resources."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ResourceUsage:
    """Resources of this process and its children."""

    megabytes: float
    files: int
    threads: int
    tasks: int
    processes: int


async def leaks_nothing(subject: Subject) -> str:
    """Compares usage at the end with usage after warm-up: at most 10% more (of countable resources: or 3)."""
    tasks = await subject.tasks()
    played = 0
    weights: list[ResourceUsage] = []
    while played < subject.episodes:
        wave = range(played, min(played + subject.concurrency, subject.episodes))
        await asyncio.gather(*(_short_episode(subject, tasks[n % len(tasks)], n) for n in wave))
        played = wave.stop
        weights.append(await _settled())
        subject.say(f"{played} of {subject.episodes} episodes, {weights[-1].megabytes:.0f} MB")
    warm, last = weights[len(weights) // 3], weights[-1]
    grown = [
        f"{name} grew from {before:g} to {after:g}"
        for name in ("megabytes", "files", "threads", "tasks", "processes")
        if (after := getattr(last, name)) > _limit(name, before := getattr(warm, name))
    ]
    if grown:
        raise CheckFailed(f"over {played} episodes, {', '.join(grown)}")
    if len(weights) < 3:
        raise CheckSkipped(f"{played} episodes are too few for this check: use {3 * subject.concurrency}")
    return (
        f"{played} episodes, {warm.megabytes:.0f} MB after warming up and {last.megabytes:.0f} MB at the end"
    )


def _limit(name: str, before: float) -> float:
    return before * _TOLERANCE if name == "megabytes" else max(before * _TOLERANCE, before + 3)


async def _short_episode(subject: Subject, task: Task, number: int) -> None:
    """Start, a few actions, close: also episodes that are closed early must not leak."""
    source = random.Random(number)
    async with subject.episode(task) as environment:
        state = await begin(environment)
        for _ in range(number % 5):
            outcome = await act(environment, source.choice(state.admissible_actions or (NONSENSE,)))
            state = outcome.next_state
            if outcome.over:
                break


async def _settled() -> ResourceUsage:
    """Usage once nothing is released any more."""
    gc.collect()
    weight = _measure()
    for _ in range(_SETTLING):
        await asyncio.sleep(0.05)
        before, weight = weight, _measure()
        if (weight.processes, weight.tasks, weight.files) >= (before.processes, before.tasks, before.files):
            break
    return weight


def _measure() -> ResourceUsage:
    tasks = len(asyncio.all_tasks())
    try:
        import psutil
    except ModuleNotFoundError:
        return ResourceUsage(
            megabytes=_own_megabytes(),
            files=_own_files(),
            threads=threading.active_count(),
            tasks=tasks,
            processes=0,
        )
    process = psutil.Process()
    children = process.children(recursive=True)
    memory = process.memory_info().rss
    for child in children:
        try:
            memory += child.memory_info().rss
        except psutil.Error:  # it has just ended
            continue
    return ResourceUsage(
        megabytes=memory / 1e6,
        files=process.num_fds() if hasattr(process, "num_fds") else process.num_handles(),
        threads=process.num_threads(),
        tasks=tasks,
        processes=len(children),
    )


def _own_megabytes() -> float:
    statistics = Path("/proc/self/statm")
    if statistics.exists():
        return int(statistics.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6
    import resource  # the peak, and in units that differ by platform: growth still shows

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3


def _own_files() -> int:
    folder = Path("/dev/fd")
    return len(list(folder.iterdir())) if folder.exists() else 0
