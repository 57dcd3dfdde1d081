"""Opens the player that the settings ask for: this process, worker processes, or a Ray cluster."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from dreamgym.config import Config, is_database
from dreamgym.distributed.player import GroupPlayer
from dreamgym.distributed.pool import PoolSettings, Worker, WorkerPool
from dreamgym.distributed.pooled import PooledPlayer, Publisher, WeightFiles
from dreamgym.distributed.processes import ProcessWorker
from dreamgym.distributed.worker import TrainSetup, WorkerSetup
from dreamgym.envs.synthetic import StartFor
from dreamgym.errors import ConfigError
from dreamgym.models.usage import Usage
from dreamgym.rollouts import CircuitBreaker
from dreamgym.training.audits import Audits
from dreamgym.training.dream_loading import Dream
from dreamgym.training.dream_setup import EpisodeSource

LOGS = "workers"
"""In the run directory: what worker processes print."""


def pool_settings(
    config: Config, workers: int, *, jobs: int, episodes: int, concurrency: int
) -> PoolSettings:
    """
    Args:
        jobs: that are wanted at a time.
        episodes: of one job.
        concurrency: episodes at once, of all workers together.
    """
    cluster = config.cluster
    most = max(1, concurrency // workers // episodes)
    return PoolSettings(
        slots=max(1, min(most, -(-jobs // workers))),
        seconds=cluster.group_seconds,
        attempts=cluster.attempts,
        late=cluster.late_groups,
        start_seconds=cluster.start_seconds,
    )


async def open_training_player(
    stack: AsyncExitStack,
    setup: TrainSetup,
    source: EpisodeSource,
    audits: Audits | None,
    breaker: CircuitBreaker,
    *,
    usage: Usage,
    start_for: StartFor,
    on_event: Callable[[str], None],
) -> GroupPlayer:
    """Plays the groups of a training run and the real episodes of its audits on ``train.workers`` workers."""
    config, chosen = setup.config, setup.config.train
    settings = pool_settings(
        config,
        chosen.workers,
        jobs=chosen.tasks_per_step * (1 + chosen.max_staleness),
        episodes=chosen.group_size,
        concurrency=chosen.concurrency,
    )
    dream = source.factory.inner
    player = await open_player(
        *(stack, config, replace(setup, config=divided(config, chosen.workers), store=source.store)),
        *(settings, breaker),
        workers=chosen.workers,
        logs=setup.folder / LOGS,
        on_event=on_event,
        usage=usage,
        start_for=start_for,
        begin_after=dream.begin_after if isinstance(dream, Dream) else None,
        experience_version=lambda: 0 if audits is None else audits.version,
        kept_versions=1 + chosen.max_staleness,
    )
    if audits is not None:
        audits.replayer = player.replay
    return player


def fitting_workers(config: Config, most: int) -> int:
    """At most one for each core of this machine; none on one core, beside a GPU, which one process uses
    better, and with a budget."""
    from dreamgym.training.model_setup import find_device

    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    workers = min(most, cores)
    if workers < 2 or _has_budget(config) or find_device(config.agent.device, section="agent") != "cpu":
        return 0
    return workers


def _has_budget(config: Config) -> bool:
    return any(limit is not None for limit in config.budget.model_dump().values())


def check_budget(config: Config, instead: str) -> None:
    if _has_budget(config):
        raise ConfigError(
            f"budget.money, tokens and requests are counted in one process: use {instead}, or limit the "
            "budget at the server"
        )


def divided(config: Config, workers: int) -> Config:
    """The settings of one of several workers: rate limits of endpoints are divided among them."""

    def part(limit: int | None) -> int | None:
        return None if limit is None else max(1, limit // workers)

    endpoints = {
        name: each.model_copy(
            update={
                "concurrency": part(each.concurrency),
                "requests_per_minute": part(each.requests_per_minute),
                "tokens_per_minute": part(each.tokens_per_minute),
            }
        )
        for name, each in config.endpoints.items()
    }
    return config.model_copy(update={"endpoints": endpoints})


async def open_player(
    stack: AsyncExitStack,
    config: Config,
    setup: WorkerSetup,
    settings: PoolSettings,
    breaker: CircuitBreaker,
    *,
    workers: int,
    logs: Path,
    on_event: Callable[[str], None],
    **options: Any,
) -> PooledPlayer:
    """A player on `workers` workers, closed by the stack; `options` are those of `PooledPlayer`."""
    pool, publisher = await open_pool(
        stack, config, setup, settings, workers=workers, logs=logs, on_event=on_event
    )
    return PooledPlayer(pool, publisher, breaker, workers=workers, **options)


async def open_pool(
    stack: AsyncExitStack,
    config: Config,
    setup: WorkerSetup,
    settings: PoolSettings,
    *,
    workers: int,
    logs: Path,
    on_event: Callable[[str], None],
) -> tuple[WorkerPool, Publisher]:
    """Workers where ``cluster.address`` says, and the way weights take to them; closed by the stack."""
    made: Sequence[Worker]
    publisher: Publisher
    if config.cluster.address == "none":
        made = [ProcessWorker(number, setup, logs / f"worker-{number}.log") for number in range(workers)]
        publisher = WeightFiles()
    else:
        from dreamgym.distributed import ray_actors

        ray = ray_actors.connect(config.cluster.address)
        setup = _on_cluster(ray, config, setup)
        made = [ray_actors.RayWorker(number, ray, setup, config, settings.slots) for number in range(workers)]
        publisher = ray_actors.RayObjects(ray)
    stack.callback(publisher.close)
    pool = WorkerPool(made, settings, on_event=on_event)
    stack.push_async_callback(pool.aclose)
    await pool.start()
    return pool, publisher


def _on_cluster(ray: Any, config: Config, setup: WorkerSetup) -> WorkerSetup:
    """The setup with a replay buffer that other nodes can search."""
    from dreamgym.distributed.ray_actors import serve_buffer

    if not isinstance(setup, TrainSetup) or not setup.searches or is_database(setup.store):
        return setup
    if config.cluster.address.startswith("ray://"):
        raise ConfigError(
            f"cluster.address={config.cluster.address!r}: the experience model is shown demonstrations from "
            "the run's replay buffer, a file that must be on a node of the cluster; start the run there "
            "('ray job submit', or a shell on the head node) with cluster.address=auto, or set "
            "replay.store=postgresql://…"
        )
    return replace(setup, retriever=serve_buffer(ray, Path(setup.store), config.replay))
