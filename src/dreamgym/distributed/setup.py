"""Opens worker processes as the settings ask for them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from dreamgym.config import Config
from dreamgym.distributed.player import GroupPlayer
from dreamgym.distributed.pool import PoolSettings, WorkerPool
from dreamgym.distributed.pooled import PooledPlayer, Publisher, WeightFiles
from dreamgym.distributed.processes import ProcessWorker
from dreamgym.distributed.worker import TrainSetup, WorkerSetup
from dreamgym.envs.synthetic import StartFor
from dreamgym.errors import ConfigError
from dreamgym.models.usage import Usage
from dreamgym.rollouts import CircuitBreaker

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
    breaker: CircuitBreaker,
    *,
    usage: Usage,
    start_for: StartFor,
    on_event: Callable[[str], None],
) -> GroupPlayer:
    """Plays the groups of a training run on ``train.workers`` workers."""
    config, chosen = setup.config, setup.config.train
    settings = pool_settings(
        config,
        chosen.workers,
        jobs=chosen.tasks_per_step * (1 + chosen.max_staleness),
        episodes=chosen.group_size,
        concurrency=chosen.concurrency,
    )
    return await open_player(
        *(stack, config, replace(setup, config=divided(config, chosen.workers)), settings, breaker),
        workers=chosen.workers,
        logs=setup.folder / LOGS,
        on_event=on_event,
        usage=usage,
        start_for=start_for,
        kept_versions=1 + chosen.max_staleness,
    )


def check_budget(config: Config, instead: str) -> None:
    if any(limit is not None for limit in config.budget.model_dump().values()):
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
) -> GroupPlayer:
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
    """Worker processes, and the way weights take to them; closed by the stack."""
    made = [ProcessWorker(number, setup, logs / f"worker-{number}.log") for number in range(workers)]
    publisher = WeightFiles()
    stack.callback(publisher.close)
    pool = WorkerPool(made, settings, on_event=on_event)
    stack.push_async_callback(pool.aclose)
    await pool.start()
    return pool, publisher
