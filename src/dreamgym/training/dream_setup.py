"""Opens the environment that a run trains in: the real one, or a synthetic one with a replay buffer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

from dreamgym.config import Config
from dreamgym.envs.registry import EnvironmentSpec, environment_horizon
from dreamgym.envs.synthetic import EpisodeStart, StartFor, SyntheticFactory
from dreamgym.envs.wrappers import StepCounter
from dreamgym.errors import ConfigError
from dreamgym.experience.world_sheet import TaskCheck
from dreamgym.models.registry import LanguageModels
from dreamgym.protocols import EnvironmentFactory, ExperienceModel
from dreamgym.replay.buffer import ReplayBuffer
from dreamgym.replay.embedders import make_embedder
from dreamgym.replay.sqlite import copy_store
from dreamgym.replay.store import records
from dreamgym.training.dream import RecordedStarts
from dreamgym.training.experience_loading import (
    OWN_BUFFER,
    demonstrations_shown,
    known_starts,
    load_experience_model,
)
from dreamgym.training.run_dir import BUFFER, RunDir
from dreamgym.types import Task, Trajectory, WorldSheet

_CACHED_REPLIES = 20_000
"""Of the experience model: a third of the requests of a step are repeats."""
_BATCH = 50
"""Trajectories stored in one transaction."""
_HORIZON = 50
"""Actions of an imagined episode where neither the settings nor the environment state a number."""
OnRow = Callable[[int, int], None]
"""Receives how many of how many trajectories are in the buffer."""


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
    spec: EnvironmentSpec | None,
    folder: RunDir,
    offline: Sequence[Trajectory],
    given: Overrides,
    on_row: OnRow,
) -> EpisodeSource:
    """
    Raises:
        ConfigError: there are no tasks, or no experience model to imagine them with.
    """
    chosen, real = config.train, given.real
    buffer = await _open_buffer(stack, config, folder, offline, given, on_row)
    if chosen.tasks_from == "environment" and real is not None:
        tasks = list(await real.tasks(chosen.split, chosen.num_tasks, seed=config.seed))
        return EpisodeSource(factory=StepCounter(real), tasks=tasks, buffer=buffer)
    name = real.name if real is not None and chosen.mode == "real" else config.environment.name
    recorded = [t for t in offline if (t.task.environment, t.task.split) == (name, chosen.split)]
    if not recorded:
        raise ConfigError(
            f"expected trajectories of environment {name!r}, split {chosen.split!r} to take tasks from, "
            f"train.data={chosen.data} has none; set environment.name, train.split or train.data"
        )
    if chosen.mode == "real":
        assert real is not None
        tasks = list({each.task.id: each.task for each in recorded}.values())[: chosen.num_tasks]
        return EpisodeSource(factory=StepCounter(real), tasks=tasks, buffer=buffer)
    starts = RecordedStarts(recorded, recombine=_can_succeed(config, spec))
    tasks = starts.tasks[: chosen.num_tasks]
    model, refusal_ends = _experience_model(config, given, buffer, recorded)

    def start_for(task: Task, seed: int) -> EpisodeStart | None:
        found = starts(task, seed)
        return found if found is not None or given.start_for is None else given.start_for(task, seed)

    refuses = chosen.on_unreadable_reply == "refuse" and spec is not None and spec.refusals
    dream = SyntheticFactory(
        model,
        tasks,
        start_for,
        horizon=chosen.horizon or environment_horizon(spec, config.environment.options) or _HORIZON,
        refusal_ends=refusal_ends,
        unreadable=spec.refusals[0] if spec is not None and refuses else None,
    )
    return EpisodeSource(factory=StepCounter(dream), tasks=tasks, buffer=buffer, experience_model=model)


def _can_succeed(config: Config, spec: EnvironmentSpec | None) -> TaskCheck | None:
    if config.train.start_states == "recorded":
        return None
    if spec is None or spec.can_succeed is None:
        raise ConfigError(
            f"train.start_states=recombined: environment {config.environment.name!r} has no check that "
            "a task can succeed from other facts (can_succeed); use recorded"
        )
    known = spec.can_succeed

    def can_succeed(task: Task, sheet: WorldSheet) -> bool:
        return known(task, sheet)

    return can_succeed


def _experience_model(
    config: Config,
    given: Overrides,
    buffer: ReplayBuffer | None,
    recorded: Sequence[Trajectory],
) -> tuple[ExperienceModel, bool]:
    """The experience model, and whether a refusal ends an episode."""
    if given.experience_model is not None:
        return given.experience_model, False
    name = config.train.experience
    if name is None:
        raise ConfigError("expected train.experience to name the run of an experience model")
    loaded = load_experience_model(
        name,
        config,
        reward=config.train.reward,
        retriever=buffer,
        models=given.models,
        starts=known_starts(recorded),
        cached_replies=_CACHED_REPLIES,
    )
    return loaded.model, loaded.run.experience.refusal_ends


def _shown(config: Config, given: Overrides) -> int:
    """The number of demonstrations in the experience model's prompt."""
    name = config.train.experience
    if config.train.mode != "dream" or given.experience_model is not None or name is None:
        return 0
    return demonstrations_shown(name, config)


async def _open_buffer(
    stack: AsyncExitStack,
    config: Config,
    folder: RunDir,
    offline: Sequence[Trajectory],
    given: Overrides,
    on_row: OnRow,
) -> ReplayBuffer | None:
    """The run's own replay buffer: other runs with the same experience model must not see its rows.

    It starts with the offline trajectories if the experience model uses demonstrations.
    """
    settings, shown = config.replay, _shown(config, given)
    if not config.train.update_replay_buffer and not shown:
        return None
    path = folder.path / BUFFER
    if shown and config.train.experience is not None and not path.exists():
        copy_store(
            Path(config.train.experience) / OWN_BUFFER,
            path,
            embedder=make_embedder(settings.embedder).identity,
            trajectories={each.id for each in offline if each.transitions},
        )
    buffer = stack.enter_context(ReplayBuffer.open_configured(path, settings))
    if shown:
        known = await buffer.known([each.id for each in offline])
        missing = [each for each in offline if len(known.get(each.id, ())) < len(each)]
        for start in range(0, len(missing), _BATCH):
            some = missing[start : start + _BATCH]
            await buffer.add([row for each in some for row in records(each)])
            on_row(start + len(some), len(missing))
    return buffer
