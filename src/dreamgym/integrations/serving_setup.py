"""Opens what `dreamgym serve` names: the dream of a run with its real environment, or a real environment."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from dreamgym.config import Config, nearest_name
from dreamgym.envs.registry import environment_names, is_known, open_environment
from dreamgym.errors import ConfigError
from dreamgym.integrations.served_results import open_results
from dreamgym.integrations.serving import Mode, ServedEnvironment
from dreamgym.models.registry import names_language_model
from dreamgym.training.dream_loading import Dream
from dreamgym.training.experience_run import RUN_FILE
from dreamgym.training.run_dir import BUFFER, CONFIG, read_config

FRESH_ROWS = 10_000
"""Fresh transitions in the replay buffer of a server, which has no end, unless `replay.capacity` is set."""


@asynccontextmanager
async def open_served(
    name: str,
    config: Config,
    *,
    mode: Mode | None = None,
    out: Path | None = None,
    data: Iterable[str] | None = None,
    group_size: int | None = None,
) -> AsyncIterator[ServedEnvironment]:
    """
    Args:
        name: a run of an experience model, of training or of `learn`; a language model to prompt; or a real
            environment.
        mode: of episodes that do not choose it; by default ``dream`` where there is one.
        out: directory for trajectories, task pool, replay buffer and metrics; by default they are temporary.
        data: recorded trajectories, for a prompted language model.
        group_size: episodes of one task that are compared; by default that of the run.
    """
    dreamt = experience_of(name)
    with TemporaryDirectory(prefix="dreamgym-serve-") as temporary:
        if dreamt is None:
            options = config.environment.options
            served = ServedEnvironment(
                name, open_real=lambda: open_environment(name, options), mode=mode, seed=config.seed
            )
        else:
            folder = out or Path(temporary)
            folder.mkdir(parents=True, exist_ok=True)
            served = await _served_dream(dreamt, config, folder, out is not None, mode, data, group_size)
        try:
            yield served
        finally:
            await served.aclose()


async def _served_dream(
    name: str,
    config: Config,
    folder: Path,
    keep: bool,
    mode: Mode | None,
    data: Iterable[str] | None,
    group_size: int | None,
) -> ServedEnvironment:
    settings: dict[str, Any] = {} if group_size is None else {"group_size": group_size}
    dream = Dream.load(name, config, data=list(data) if data else None, buffer=folder / BUFFER, **settings)
    environment = dream.config.environment
    try:
        if dream.buffer is not None:
            dream.buffer.limit_synthetic(FRESH_ROWS)
        if dream.models is not None:
            await dream.models.check_reachable()
        results = await open_results(dream, folder, keep=keep)
    except BaseException:
        await dream.aclose()
        raise
    known = is_known(environment.name)
    return ServedEnvironment(
        environment.name,
        dream=dream,
        open_real=(lambda: open_environment(environment.name, environment.options)) if known else None,
        results=results,
        mode=mode,
        seed=dream.config.seed,
    )


def experience_of(name: str) -> str | None:
    """The experience model of a run or language model; None for a real environment.

    Raises:
        ConfigError: the name is none of these, or a run without an experience model.
    """
    folder = Path(name)
    if names_language_model(name) or (folder / RUN_FILE).exists():
        return name
    if (folder / "experience" / RUN_FILE).exists():  # a run of `learn`
        return str(folder / "experience")
    if (folder / CONFIG).exists():
        found = read_config(folder).train.experience
        if found is None:
            raise ConfigError(f"{name} was trained in the real environment; serve that, or another run")
        return found
    if is_known(name):
        return None
    raise ConfigError(
        f"{name!r} is neither a run directory nor an environment{nearest_name(name, environment_names())}"
    )
