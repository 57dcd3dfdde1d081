"""Workers as actors of a Ray cluster; weights go through its object store.

Ray places the actors, moves objects and shows both in its dashboard. Deadlines and retries are the pool's:
Ray's own retries would call a restarted actor without its state, and a frozen node would block for a minute.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dreamgym.config import Config, ReplayConfig
from dreamgym.distributed.jobs import GroupResult, Job
from dreamgym.distributed.messages import Failure
from dreamgym.distributed.pool import WorkerLostError
from dreamgym.distributed.worker import RolloutWorker, Weights, WorkerSetup
from dreamgym.errors import ConfigError, MissingExtraError
from dreamgym.types import Demonstration, RetrievalFilter

if TYPE_CHECKING:
    from dreamgym.replay.buffer import ReplayBuffer


def connect(address: str) -> Any:
    """The module `ray`, connected to a cluster that runs.

    Raises:
        MissingExtraError: Ray is not installed.
        ConfigError: there is no cluster at this address.
    """
    try:
        import ray
    except ImportError:
        raise MissingExtraError(f"cluster.address={address!r}", "ray") from None
    if not ray.is_initialized():
        try:
            ray.init(address=address, log_to_driver=False, logging_level="WARNING")
        except (ConnectionError, RuntimeError, ValueError) as error:
            raise ConfigError(
                f"cluster.address={address!r}: expected a Ray cluster, {error}; start one with "
                "'ray start --head', or set cluster.address=none for processes of this machine"
            ) from None
    return ray


_SECONDS = (0.5, 1, 2, 5, 10, 30, 60, 120, 300, 600, 1800)
"""Bounds of the histogram of a job's duration."""


class ActorMetrics:
    """Of one actor; Ray exports them with those of its node, for Prometheus."""

    def __init__(self) -> None:
        from ray.util.metrics import Counter, Histogram

        self._jobs = Counter("dreamgym_jobs", "rollout groups and real episodes", tag_keys=("result",))
        self._steps = Counter("dreamgym_environment_steps", "steps taken by rollout groups")
        self._seconds = Histogram("dreamgym_job_seconds", "seconds of a job", boundaries=list(_SECONDS))

    def count(self, result: Any, seconds: float) -> None:
        self._jobs.inc(tags={"result": "error" if isinstance(result, Failure) else "done"})
        self._seconds.observe(seconds)
        if isinstance(result, GroupResult) and result.taken:
            self._steps.inc(result.taken)


class RolloutActor:
    """A worker inside an actor: the same calls, and errors as values."""

    def __init__(self, setup: WorkerSetup) -> None:
        self._worker = RolloutWorker(setup)
        self._metrics = ActorMetrics()

    async def open(self) -> Failure | None:
        try:
            await self._worker.open()
        except Exception as error:  # the driver reports it
            return Failure.of(error)
        return None

    async def run(self, job: Job, version: int, box: Sequence[Awaitable[Any]]) -> Any:
        """`box` holds a reference to the weights: a bare one would be fetched for every call."""

        async def fetch() -> Weights:
            return from_arrays(await box[0])

        began = time.perf_counter()
        try:
            result = await self._worker.run(job, version, fetch if box else None)
        except Exception as error:
            result = Failure.of(error)
        self._metrics.count(result, time.perf_counter() - began)
        return result

    async def ping(self) -> int:
        return os.getpid()


class RayWorker:
    """The driver's side of an actor; the `Worker` role of a pool. A lost actor is replaced by a new one, on
    any node that has room; it loads the weights that its first job names."""

    def __init__(self, number: int, ray: Any, setup: WorkerSetup, config: Config, slots: int) -> None:
        self.name = f"worker {number}"
        self._ray = ray
        self._setup = setup
        cluster = config.cluster
        self._options = {
            "num_cpus": cluster.worker_cpus,
            "num_gpus": cluster.worker_gpus,
            "max_concurrency": slots + 2,  # a busy actor answers `ping`
            "max_restarts": 0,
        }
        self._actor: Any = None

    async def start(self) -> None:
        self._actor = self._ray.remote(**self._options)(RolloutActor).remote(self._setup)
        failure = await self._call(self._actor.open.remote())
        if isinstance(failure, Failure):
            await self.stop()
            raise failure.error()

    async def run(self, job: Job, version: int, box: Any) -> Any:
        if self._actor is None:
            raise WorkerLostError("its actor has ended")
        result = await self._call(self._actor.run.remote(job, version, [] if box is None else [box]))
        if isinstance(result, Failure):
            raise result.error()
        return result

    async def answers(self, seconds: float) -> bool:
        if self._actor is None:
            return False
        try:
            async with asyncio.timeout(seconds):
                await self._call(self._actor.ping.remote())
        except (TimeoutError, WorkerLostError):
            return False
        return True

    async def stop(self) -> None:
        if self._actor is not None:
            self._ray.kill(self._actor)
            self._actor = None

    async def _call(self, reference: Any) -> Any:
        errors = self._ray.exceptions
        try:
            return await reference
        except asyncio.CancelledError:
            with contextlib.suppress(Exception):  # the actor may be gone
                self._ray.cancel(reference)
            raise
        except errors.RayTaskError:
            raise  # a bug: jobs return their errors
        except errors.RayError as error:
            raise WorkerLostError(f"{type(error).__name__}: {str(error)[:1000]}") from None


class RayObjects:
    """Weights in the object store: one copy per node, read by all of its actors."""

    def __init__(self, ray: Any) -> None:
        self._ray = ray

    async def put(self, version: int, weights: Mapping[str, Any]) -> Any:
        return await asyncio.to_thread(self._ray.put, to_arrays(weights))

    def drop(self, box: Any) -> None:
        """The store frees an object when its last reference is gone."""

    def close(self) -> None:
        """The driver stays connected: other players may use the cluster."""


def to_arrays(weights: Mapping[str, Any]) -> dict[str, tuple[str, tuple[int, ...], Any]]:
    """Weights as bytes in arrays, which Ray stores without a copy; NumPy has no bfloat16."""
    import torch

    return {
        name: (
            str(weight.dtype).removeprefix("torch."),
            tuple(weight.shape),
            weight.detach().cpu().contiguous().flatten().view(torch.uint8).numpy(),
        )
        for name, weight in weights.items()
    }


def from_arrays(stored: Mapping[str, tuple[str, tuple[int, ...], Any]]) -> dict[str, Any]:
    import torch

    return {
        name: torch.from_numpy(array.copy()).view(getattr(torch, dtype)).reshape(shape)
        for name, (dtype, shape, array) in stored.items()
    }


class BufferActor:
    """Answers searches in the run's replay buffer for workers on other nodes. The driver adds rows to the
    file, and the next search finds them."""

    def __init__(self, path: Path, settings: ReplayConfig) -> None:
        self._path, self._settings = path, settings
        self._buffer: ReplayBuffer | None = None

    async def search(
        self, queries: Sequence[tuple[str, str]], k: int, filters: Sequence[RetrievalFilter]
    ) -> list[list[Demonstration]]:
        from dreamgym.replay.buffer import ReplayBuffer

        if self._buffer is None:
            self._buffer = ReplayBuffer.open_configured(self._path, self._settings, create=False)
        return await self._buffer.search(queries, k=k, filters=filters)


@dataclass(frozen=True, slots=True)
class RemoteRetriever:
    """The role `Retriever` in a worker: asks the buffer's actor."""

    actor: Any

    async def search(
        self, queries: Sequence[tuple[str, str]], *, k: int, filters: Sequence[RetrievalFilter]
    ) -> list[list[Demonstration]]:
        found: list[list[Demonstration]] = await self.actor.search.remote(list(queries), k, list(filters))
        return found


def serve_buffer(ray: Any, path: Path, settings: ReplayConfig) -> RemoteRetriever:
    """Start the buffer's actor on the driver's node, where the file is."""
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    here = ray.get_runtime_context().get_node_id()
    options: dict[str, Any] = {
        "num_cpus": 0,
        "max_concurrency": 256,
        "max_restarts": -1,  # it has no state but the file
        "max_task_retries": -1,
        "scheduling_strategy": NodeAffinitySchedulingStrategy(here, soft=False),
    }
    return RemoteRetriever(ray.remote(**options)(BufferActor).remote(path, settings))
