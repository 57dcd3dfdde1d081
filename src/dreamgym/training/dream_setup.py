"""Opens the environment that a run trains in: the real one, or a synthetic one with a replay buffer."""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

from dreamgym.config import Config, ReplayConfig, is_database
from dreamgym.envs.synthetic import StartFor
from dreamgym.envs.wrappers import StepCounter
from dreamgym.errors import ConfigError, DataError
from dreamgym.files import write_text
from dreamgym.models.registry import LanguageModels
from dreamgym.protocols import EnvironmentFactory, ExperienceModel
from dreamgym.replay.buffer import ReplayBuffer
from dreamgym.training.dream_loading import Dream, OnRow, open_buffer, uses_demonstrations
from dreamgym.training.run_dir import BUFFER, SCHEMA
from dreamgym.types import Task, Trajectory


@dataclass(slots=True, kw_only=True)
class EpisodeSource:
    """Where the episodes of a run come from."""

    factory: StepCounter
    tasks: list[Task]
    buffer: ReplayBuffer
    """Receives fresh transitions."""
    store: str
    """Where it is: a file, or the address of a database."""
    experience_model: ExperienceModel | None = None
    """None for a real environment."""


async def open_episode_source(
    stack: AsyncExitStack,
    config: Config,
    path: Path,
    offline: Sequence[Trajectory],
    *,
    real: EnvironmentFactory | None,
    experience_model: ExperienceModel | None,
    models: LanguageModels,
    start_for: StartFor,
    on_row: OnRow,
) -> EpisodeSource:
    """In the run directory `path`; `experience_model` replaces that of the settings."""
    chosen = config.train
    shown = experience_model is None and uses_demonstrations(config)
    store = run_store(path, config.replay)
    buffer = stack.enter_context(await open_buffer(store, config, offline, shown=shown, on_row=on_row))
    if chosen.mode == "real":
        assert real is not None
        tasks = await _real_tasks(config, real, offline)
        return EpisodeSource(factory=StepCounter(real), tasks=tasks, buffer=buffer, store=store)

    if experience_model is not None:
        dream = Dream(experience_model, offline, config, buffer=buffer, start_for=start_for)
    else:
        dream = Dream.create(config, offline, buffer, models=models, start_for=start_for)
    stack.push_async_callback(dream.aclose)
    return EpisodeSource(
        factory=StepCounter(dream),
        tasks=list(dream.known_tasks),
        buffer=buffer,
        store=store,
        experience_model=dream.experience_model,
    )


def run_store(path: Path, settings: ReplayConfig) -> str:
    """Where the replay buffer of the run in `path` is. Runs that share a database share no rows."""
    if not is_database(settings.store):
        return str(path / BUFFER)
    from dreamgym.replay.pgschema import create_schema

    name = _schema_of(path)
    return create_schema(settings.store, name, reconnect_seconds=settings.reconnect_seconds)


def _schema_of(path: Path) -> str:
    """Its name is kept in the run directory, which may be moved."""
    file = path / SCHEMA
    if not file.exists():
        name = re.sub("[^a-z0-9]+", "_", path.name.lower())[:32]
        write_text(file, json.dumps({"schema": f"dreamgym_{name}_{secrets.token_hex(6)}"}) + "\n")
    try:
        found = json.loads(file.read_text(encoding="utf-8"))["schema"]
        if re.fullmatch("[a-z_][a-z0-9_]{0,62}", found):
            return str(found)
    except (ValueError, LookupError, TypeError):
        pass
    raise DataError(f'{file}: expected {{"schema": NAME}}, the schema of the replay buffer in the database')


async def _real_tasks(config: Config, real: EnvironmentFactory, offline: Sequence[Trajectory]) -> list[Task]:
    chosen = config.train
    if chosen.tasks_from == "environment":
        return list(await real.tasks(chosen.split, chosen.num_tasks, seed=config.seed))
    place = (real.name, chosen.split)
    recorded = {t.task.id: t.task for t in offline if (t.task.environment, t.task.split) == place}
    if not recorded:
        raise ConfigError(
            f"expected trajectories of environment {place[0]!r}, split {place[1]!r} to take tasks from, "
            f"train.data={chosen.data} has none; set environment.name, train.split or train.data, or "
            "train.tasks_from=environment"
        )
    return list(recorded.values())[: chosen.num_tasks]
