"""Plays many episodes and compares resources before and after: memory, files, threads, tasks, processes."""

from __future__ import annotations

import asyncio
import gc

from dreamgym.testing.episode_probe import CheckFailed, CheckSkipped, Subject, play
from dreamgym.types import Task

_TOLERANCE = 1.10
_MEGABYTES = 100.0
"""The most growth of memory: 10% of a large process would hide a leak."""
_SETTLING = 60
"""Polls, 0.05 s apart, for closed episodes to release their resources."""


async def leaks_nothing(subject: Subject) -> str:
    """Compares usage at the end with usage after warm-up: at most 10% more (of memory: and at most 100 MB; of
    countable resources: or 3)."""
    tasks = await subject.tasks()
    played = 0
    usages: list[dict[str, float]] = []
    while played < subject.episodes:
        wave = range(played, min(played + subject.concurrency, subject.episodes))
        await asyncio.gather(*(_short_episode(subject, tasks[n % len(tasks)], n) for n in wave))
        played = wave.stop
        usages.append(await _settled())
        subject.say(f"{played} of {subject.episodes} episodes, {usages[-1]['megabytes']:.0f} MB")
    warm, last = usages[len(usages) // 3], usages[-1]
    grown = [
        f"{name} grew from {warm[name]:g} to {last[name]:g}"
        for name in warm
        if last[name] > _most(name, warm[name])
    ]
    if grown:
        raise CheckFailed(f"over {played} episodes, {', '.join(grown)}")
    if len(usages) < 3:
        raise CheckSkipped(f"{played} episodes are too few for this check: use {3 * subject.concurrency}")
    return (
        f"{played} episodes, {warm['megabytes']:.0f} MB after warm-up, {last['megabytes']:.0f} MB at the end"
    )


def _most(name: str, warm: float) -> float:
    """
    >>> _most("megabytes", 300.0), _most("megabytes", 3000.0), _most("files", 4)
    (330.0, 3100.0, 7)
    """
    if name == "megabytes":
        return min(warm * _TOLERANCE, warm + _MEGABYTES)
    return max(warm * _TOLERANCE, warm + 3)


async def _short_episode(subject: Subject, task: Task, number: int) -> None:
    """Start, a few actions, close: also episodes that are closed early must not leak."""
    async with subject.started(task) as (environment, start):
        await play(environment, start, steps=number % 5, seed=number)


async def _settled() -> dict[str, float]:
    """Usage once nothing is released any more."""
    gc.collect()
    usage = _measure()
    for _ in range(_SETTLING):
        await asyncio.sleep(0.05)
        before, usage = usage, _measure()
        if all(usage[name] >= before[name] for name in ("processes", "tasks", "files")):
            break
    return usage


def _measure() -> dict[str, float]:
    """Resources of this process and its children."""
    import psutil

    process = psutil.Process()
    children = process.children(recursive=True)
    memory = process.memory_info().rss
    for child in children:
        try:
            memory += child.memory_info().rss
        except psutil.Error:  # it has just ended
            continue
    return {
        "megabytes": memory / 1e6,
        "files": process.num_fds() if hasattr(process, "num_fds") else process.num_handles(),
        "threads": process.num_threads(),
        "tasks": len(asyncio.all_tasks()),
        "processes": len(children),
    }
