"""Plays rollout groups on a pool of workers: publishes weights, sends groups, collects results in order."""

from __future__ import annotations

import asyncio
import tempfile
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

from dreamgym.distributed.jobs import GroupJob, GroupResult, Loss, ReplayJob
from dreamgym.distributed.player import GroupRequest
from dreamgym.distributed.pool import Box, WorkerPool
from dreamgym.envs.synthetic import StartFor
from dreamgym.evaluation.closed_loop import ActionList
from dreamgym.models.usage import Usage
from dreamgym.rollouts import CircuitBreaker, GroupReport
from dreamgym.seeding import derive_seed
from dreamgym.training.audits import Replayed
from dreamgym.training.dream_loading import BeginAfter
from dreamgym.types import RolloutFailure, RolloutGroup, Task


class Publisher(Protocol):
    """Puts weights where workers can read them."""

    async def put(self, version: int, weights: Mapping[str, Any]) -> Box: ...

    def drop(self, box: Box) -> None:
        """No job needs these weights any more."""
        ...

    def close(self) -> None: ...


class WeightFiles:
    """Weights in files of a temporary directory, for workers on this machine."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="dreamgym-weights-")

    async def put(self, version: int, weights: Mapping[str, Any]) -> Path:
        import torch

        path = Path(self._folder.name) / f"{version:09d}.pt"
        await asyncio.to_thread(torch.save, dict(weights), path)
        return path

    def drop(self, box: Path) -> None:
        box.unlink(missing_ok=True)

    def close(self) -> None:
        self._folder.cleanup()


class PooledPlayer:
    """The role `GroupPlayer` on a pool; the circuit breaker and the counts stay in the driver."""

    def __init__(
        self,
        pool: WorkerPool,
        publisher: Publisher,
        breaker: CircuitBreaker,
        *,
        workers: int,
        usage: Usage | None = None,
        start_for: StartFor | None = None,
        begin_after: BeginAfter | None = None,
        experience_version: Callable[[], int] = lambda: 0,
        stage: str = "train",
        kept_versions: int = 1,
    ) -> None:
        """
        Args:
            workers: of the pool; the episodes at once are divided among them.
            usage: receives the workers' usage of endpoints.
            start_for: starts of generated tasks, which workers do not know.
            begin_after: turns that the imagined episodes of a task begin after.
            experience_version: of the experience model's weights, which audits change.
            kept_versions: published weights that jobs may still need.
        """
        self._pool, self._publisher, self._breaker = pool, publisher, breaker
        self._workers = workers
        self._usage = usage
        self._start_for, self._begin_after = start_for, begin_after
        self._experience_version = experience_version
        self._stage = stage
        self._kept = kept_versions
        self._published: deque[tuple[int, Box]] = deque()

    async def publish(self, version: int, weights: Callable[[], Mapping[str, Any]]) -> None:
        if self._published and self._published[-1][0] == version:
            return
        while len(self._published) >= self._kept:  # before the new one needs its space
            self._publisher.drop(self._published.popleft()[1])
        self._published.append((version, await self._publisher.put(version, weights())))

    async def play(self, request: GroupRequest) -> GroupReport:
        report = GroupReport()
        try:
            async with asyncio.TaskGroup() as group:
                running = [
                    group.create_task(self._play(number, task, request))
                    for number, task in request.numbered()
                ]
        except ExceptionGroup as several:
            raise several.exceptions[0] from None  # the others were cancelled because of the first
        finally:
            report.pauses = self._breaker.pauses
        for each in running:
            found = each.result()
            if isinstance(found.result, RolloutGroup):
                report.groups.append(found.result)
            else:
                report.dropped.append(found.result)
            report.episodes += found.episodes
            report.steps += found.steps
            report.taken += found.taken
        return report

    async def _play(self, number: int, task: Task, request: GroupRequest) -> GroupResult:
        await self._breaker.closed()
        limit = request.share()
        settings = replace(
            request.settings, concurrency=max(1, request.settings.concurrency // self._workers)
        )
        job = GroupJob(
            number=number,
            task=task,
            prefix=request.name,
            seed=request.seed,
            settings=settings,
            origin=request.origin,
            stage=self._stage,
            start=self._start(task, derive_seed(request.seed, "group", number)),
            turns=() if self._begin_after is None else self._begin_after(task),
            experience_version=self._experience_version(),
            limit=limit,
        )
        version, box = self._published[-1] if self._published else (-1, None)
        # The steps of a lost attempt are unknown: with a budget it counts as all that it was allowed.
        attempts = None if limit is None else 1
        found = await self._pool.run(job, version=version, box=box, attempts=attempts)
        if isinstance(found, Loss):
            failure = RolloutFailure(
                task=task, kind=found.kind, message=found.message, attempts=found.attempts
            )
            found = GroupResult(number=number, result=failure, taken=limit or 0)
        assert isinstance(found, GroupResult)
        if self._usage is not None:
            self._usage.add(found.usage)
        self._breaker.count(found.result)
        if request.on_group is not None and isinstance(found.result, RolloutGroup):
            request.on_group(found.result)
        return found

    async def replay(self, actions: ActionList, trajectory_id: str) -> Replayed:
        """A `Replayer` on the workers; a lost episode counts as if it had been played to its end."""
        found = await self._pool.run(ReplayJob(actions=actions, trajectory_id=trajectory_id), attempts=1)
        return (None, len(actions.actions)) if isinstance(found, Loss) else found

    def _start(self, task: Task, seed: int) -> Any:
        if self._start_for is None or task.origin == "seed":
            return None
        return self._start_for(task, seed)
