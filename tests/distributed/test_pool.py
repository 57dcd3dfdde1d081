"""A pool of worker processes: limits, deadlines, workers that die, freeze, or cannot start."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from dreamgym.distributed.jobs import Loss
from dreamgym.distributed.pool import PoolSettings, WorkerPool
from dreamgym.distributed.processes import ProcessWorker
from dreamgym.errors import ConfigError, EpisodeFailedError, RolloutsFailingError
from dreamgym.types import FailureKind
from tests.distributed.pool_jobs import Job, Setup


def pool(folder: Path, count: int = 2, setup: Setup | None = None, **settings: Any) -> WorkerPool:
    chosen = {"slots": 2, "seconds": 60.0, "answer_seconds": 2.0} | settings
    workers = [ProcessWorker(number, setup or Setup(), folder / f"{number}.log") for number in range(count)]
    return WorkerPool(workers, PoolSettings(**chosen))


async def results(workers: WorkerPool, jobs: Sequence[Job]) -> list[Any]:
    return await asyncio.gather(*(workers.run(job) for job in jobs))


def gone(pid: int) -> bool:
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.02)
    return False


async def test_jobs_are_divided_among_workers_and_no_worker_has_more_than_its_slots(tmp_path: Path) -> None:
    async with pool(tmp_path) as workers:
        found = await results(workers, [Job(number, 0.1) for number in range(12)])
    assert [number for number, *_ in found] == list(range(12))
    pids = {pid for _, pid, _ in found}
    assert len(pids) == 2
    assert max(most for *_, most in found) == 2
    assert all(map(gone, pids)), "a closed pool leaves no process"


async def test_a_pool_holds_at_most_two_jobs_per_slot_and_further_calls_wait(tmp_path: Path) -> None:
    async with pool(tmp_path, 1, slots=1) as workers:
        calls = [asyncio.create_task(workers.run(Job(number, 0.02))) for number in range(6)]
        most = 0
        while not all(call.done() for call in calls):
            most = max(most, len(workers._waiting) + len(workers._running))
            await asyncio.sleep(0.002)
    assert most == 2


async def test_jobs_of_a_worker_that_dies_are_done_by_another(tmp_path: Path) -> None:
    once = tmp_path / "once"
    once.touch()
    async with pool(tmp_path) as workers:
        jobs = [Job(0, fault="die", once=once), *(Job(number, 0.2) for number in range(1, 8))]
        found = await results(workers, jobs)
        assert [number for number, *_ in found] == list(range(8))
        assert workers.events["workers lost"] == 1
        again = await results(workers, [Job(number, 0.3) for number in range(8)])
    assert len({pid for _, pid, _ in again}) == 2, "the lost worker was restarted"


async def test_a_job_that_kills_every_worker_is_a_counted_loss(tmp_path: Path) -> None:
    async with pool(tmp_path, slots=1) as workers:
        lost = await workers.run(Job(0, fault="die"))
        assert isinstance(lost, Loss)
        assert (lost.kind, lost.attempts) == (FailureKind.CRASHED, 3)
        assert workers.events["losses"] == 1
        assert (await workers.run(Job(1)))[0] == 1


async def test_a_frozen_worker_costs_one_deadline(tmp_path: Path) -> None:
    once = tmp_path / "once"
    once.touch()
    async with pool(tmp_path, seconds=1.5, answer_seconds=0.5) as workers:
        found = await results(workers, [Job(0, fault="freeze", once=once), Job(1), Job(2)])
        assert [number for number, *_ in found] == [0, 1, 2]
        assert workers.events["late jobs"] >= 1
        assert workers.events["workers lost"] == 1


async def test_a_late_job_is_done_elsewhere_or_dropped_by_setting(tmp_path: Path) -> None:
    once = tmp_path / "once"
    for late in ("retry", "drop"):
        once.touch()
        async with pool(tmp_path, seconds=1.0, late=late) as workers:
            found, other = await results(workers, [Job(0, fault="hang", once=once), Job(1, 0.1)])
            assert other[0] == 1
            assert not workers.events["workers lost"], "it still answers"
        if late == "retry":
            assert found[0] == 0
        else:
            assert isinstance(found, Loss)
            assert found.kind is FailureKind.TIMEOUT


async def test_errors_of_a_job_reach_the_caller_as_they_are(tmp_path: Path) -> None:
    async with pool(tmp_path, 1) as workers:
        with pytest.raises(EpisodeFailedError, match="the server is down") as failed:
            await workers.run(Job(0, fault="fail"))
        assert failed.value.kind is FailureKind.SERVER_DOWN
        with pytest.raises(KeyError) as bug:
            await workers.run(Job(1, fault="bug"))
        assert "_fault" in "".join(bug.value.__notes__), "the worker's traceback"


async def test_a_job_that_workers_cannot_read_is_an_error_that_names_what_they_lack(tmp_path: Path) -> None:
    lacking = ModuleType("only_in_the_driver")
    lacking.Unreadable = type("Unreadable", (Job,), {"__module__": lacking.__name__})  # type: ignore[attr-defined]
    async with pool(tmp_path) as workers:
        pids = {pid for _, pid, _ in await results(workers, [Job(number, 0.1) for number in range(8)])}
        sys.modules[lacking.__name__] = lacking
        try:
            with pytest.raises(ModuleNotFoundError, match="only_in_the_driver"):
                await workers.run(lacking.Unreadable(0))
        finally:
            del sys.modules[lacking.__name__]
        again = await results(workers, [Job(number, 0.1) for number in range(8)])
        assert {pid for _, pid, _ in again} == pids, "no worker was lost"


async def test_a_worker_that_cannot_start_is_an_error_with_its_reason(tmp_path: Path) -> None:
    (tmp_path / "refused").touch()
    with pytest.raises(ConfigError, match="expected no refused"):
        async with pool(tmp_path, setup=Setup(tmp_path / "refused")):
            pass


async def test_without_any_worker_left_the_run_ends_with_the_reason(tmp_path: Path) -> None:
    refused = tmp_path / "refused"
    async with pool(tmp_path, 1, Setup(refused), restarts=1) as workers:
        refused.touch()
        with pytest.raises(RolloutsFailingError, match=r"no worker is left.*expected no refused"):
            await workers.run(Job(0, fault="die"))
        with pytest.raises(RolloutsFailingError, match="no worker is left"):
            await workers.run(Job(1))


async def test_a_caller_that_gives_up_frees_its_slot(tmp_path: Path) -> None:
    async with pool(tmp_path, 1, slots=1) as workers:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.3):
                await workers.run(Job(0, 3600))
        async with asyncio.timeout(30):
            assert (await workers.run(Job(1)))[0] == 1
