"""Opens the environment that a run trains in: the real one, or a synthetic one with a replay buffer."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass

from dreamgym.config import Config
from dreamgym.envs.synthetic import EpisodeStart, StartFor
from dreamgym.envs.wrappers import StepCounter
from dreamgym.errors import ConfigError
from dreamgym.models.registry import LanguageModels
from dreamgym.protocols import EnvironmentFactory, ExperienceModel
from dreamgym.replay.buffer import ReplayBuffer
from dreamgym.training.dream_loading import Dream, OnRow, open_buffer, uses_demonstrations
from dreamgym.training.run_dir import BUFFER, RunDir
from dreamgym.types import Task, Trajectory


@dataclass(slots=True, kw_only=True)
class EpisodeSource:
    """Where the episodes of a run come from."""

    factory: StepCounter
    tasks: list[Task]
    buffer: ReplayBuffer | None
    """Receives fresh transitions."""
    experience_model: ExperienceModel | None = None
    """None for a real environment."""


@dataclass(slots=True, kw_only=True)
class Overrides:
    """Objects that the caller passes instead of names in the settings."""

    real: EnvironmentFactory | None = None
    experience_model: ExperienceModel | None = None
    start_for: StartFor | None = None
    """The starts of tasks that no trajectory holds, such as generated ones."""
    models: LanguageModels | None = None
    """Opens language models by name."""


async def open_episode_source(
    stack: AsyncExitStack,
    config: Config,
    folder: RunDir,
    offline: Sequence[Trajectory],
    given: Overrides,
    on_row: OnRow,
) -> EpisodeSource:
    chosen, real = config.train, given.real
    shown = given.experience_model is None and uses_demonstrations(config)
    buffer: ReplayBuffer | None = None
    if chosen.update_replay_buffer or shown:
        path = folder.path / BUFFER
        buffer = stack.enter_context(await open_buffer(path, config, offline, shown=shown, on_row=on_row))
    if chosen.mode == "real":
        assert real is not None
        tasks = await _real_tasks(config, real, offline)
        return EpisodeSource(factory=StepCounter(real), tasks=tasks, buffer=buffer)

    def start_for(task: Task, seed: int) -> EpisodeStart | None:  # a curriculum sets it later
        return None if given.start_for is None else given.start_for(task, seed)

    if given.experience_model is not None:
        dream = Dream(given.experience_model, offline, config, buffer=buffer, start_for=start_for)
    else:
        dream = Dream.create(config, offline, buffer, models=given.models, start_for=start_for)
    stack.push_async_callback(dream.aclose)
    return EpisodeSource(
        factory=StepCounter(dream),
        tasks=list(dream.known_tasks),
        buffer=buffer,
        experience_model=dream.experience_model,
    )


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
