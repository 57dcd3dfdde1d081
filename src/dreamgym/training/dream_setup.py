"""Where a run practises: the real environment, or an experience model's dream with a buffer of its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

from dreamgym.config import Config
from dreamgym.envs.registry import EnvironmentSpec
from dreamgym.errors import ConfigError
from dreamgym.experience.sheet_sampler import CanSucceed
from dreamgym.models.registry import LanguageModels, names_language_model
from dreamgym.protocols import EnvironmentFactory, ExperienceModel
from dreamgym.replay.buffer import ReplayBuffer
from dreamgym.replay.embedders import make_embedder
from dreamgym.replay.store import records
from dreamgym.training.dream import (
    Beginning,
    CappedRetriever,
    DreamFactory,
    ForgivingModel,
    RecordedStarts,
    WorldFor,
)
from dreamgym.training.experience_loading import choose_grader, known_starts, make_grader, open_prompted_model
from dreamgym.training.prediction_log import WatchedModel
from dreamgym.training.run_dir import BUFFER, RunDir
from dreamgym.training.step_counter import StepCounter
from dreamgym.types import Task, Trajectory, WorldSheet

_REMEMBERED = 20_000
"""Replies of the experience model that are kept: a third of the questions of a step are asked twice."""
_AT_ONCE = 50
"""Trajectories that are stored with one sync."""
OnRow = Callable[[int, int], None]
"""Told how many of how many trajectories are in the buffer."""


@dataclass(slots=True, kw_only=True)
class World:
    """A place to practise."""

    factory: StepCounter
    tasks: list[Task]
    buffer: ReplayBuffer | None
    """Where fresh transitions go."""
    experience_model: ExperienceModel | None = None
    """Who dreams it, if it is a dream."""
    watched: WatchedModel | None = None
    """The same model, which remembers what it was shown."""


@dataclass(slots=True, kw_only=True)
class Given:
    """What a caller brings along instead of having it opened by name."""

    real: EnvironmentFactory | None = None
    experience_model: ExperienceModel | None = None
    world_for: WorldFor | None = None
    """The worlds of tasks that no trajectory holds: generated ones."""
    models: LanguageModels | None = None
    """Where language models are opened by their names; not needed where none is named."""


async def open_world(
    stack: AsyncExitStack,
    config: Config,
    spec: EnvironmentSpec | None,
    folder: RunDir,
    offline: Sequence[Trajectory],
    given: Given,
    on_row: OnRow,
) -> World:
    """
    Raises:
        ConfigError: there are no tasks to practise, or no world to dream them in.
    """
    chosen, real = config.train, given.real
    buffer = await _open_buffer(stack, config, folder, offline, given, on_row)
    if chosen.tasks_from == "environment" and real is not None:
        tasks = list(await real.tasks(chosen.split, chosen.num_tasks, seed=config.seed))
        return World(factory=StepCounter(real), tasks=tasks, buffer=buffer)
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
        return World(factory=StepCounter(real), tasks=tasks, buffer=buffer)
    worlds = RecordedStarts(recorded, recombine=_can_succeed(config, spec))
    tasks = worlds.tasks[: chosen.num_tasks]
    model, refusal_ends = _experience_model(config, spec, given, buffer, recorded)

    def world_for(task: Task, seed: int) -> Beginning | None:
        known = worlds(task, seed)
        return known if known is not None or given.world_for is None else given.world_for(task, seed)

    forgiving = chosen.on_unreadable_reply == "refuse" and spec is not None and spec.refusals
    watched = WatchedModel(ForgivingModel(model, spec.refusals[0]) if spec and forgiving else model)
    dream = DreamFactory(watched, tasks, world_for, horizon=chosen.horizon, refusal_ends=refusal_ends)
    return World(
        factory=StepCounter(dream), tasks=tasks, buffer=buffer, experience_model=model, watched=watched
    )


def _can_succeed(config: Config, spec: EnvironmentSpec | None) -> CanSucceed | None:
    if config.train.start_states == "recorded":
        return None
    if spec is None or spec.can_succeed is None:
        raise ConfigError(
            f"train.start_states=recombined: environment {config.environment.name!r} cannot tell whether "
            "a task can succeed in a new world; use recorded"
        )
    known = spec.can_succeed

    def can_succeed(task: Task, sheet: WorldSheet) -> bool:
        return known(task, sheet)

    return can_succeed


def _experience_model(
    config: Config,
    spec: EnvironmentSpec | None,
    given: Given,
    buffer: ReplayBuffer | None,
    recorded: Sequence[Trajectory],
) -> tuple[ExperienceModel, bool]:
    """The model to dream with, and whether a refusal ends an episode."""
    if given.experience_model is not None:
        return given.experience_model, False
    name = config.train.experience
    if name is None:
        raise ConfigError("expected train.experience to name the run of an experience model to dream with")
    models = given.models or LanguageModels(config)
    grader = make_grader(choose_grader(config.train.reward, spec, setting="train.reward"), spec, models)
    memory = None
    if buffer is not None:
        capped = CappedRetriever(buffer, config.replay.max_synthetic)
        memory = (make_embedder(config.replay.embedder), capped)
    if names_language_model(name):
        starts = known_starts(recorded)
        dreamer = open_prompted_model(name, models, config, spec, grader=grader, memory=memory, starts=starts)
        return dreamer, config.experience.refusal_ends
    from dreamgym.training.experience import ExperienceRun, load_experience_model

    model = load_experience_model(
        Path(name),
        grader=grader,
        memory=memory,
        refusals=spec.refusals if spec is not None else (),
        remembered=_REMEMBERED,
    )
    return model, ExperienceRun.read(Path(name)).experience.refusal_ends


def _shown(config: Config, given: Given) -> int:
    """How many demonstrations the experience model is shown."""
    name = config.train.experience
    if config.train.mode != "dream" or given.experience_model is not None or name is None:
        return 0
    if names_language_model(name):
        return config.prompted.demonstrations
    from dreamgym.training.experience import ExperienceRun

    return ExperienceRun.read(Path(name)).experience.demonstrations


async def _open_buffer(
    stack: AsyncExitStack,
    config: Config,
    folder: RunDir,
    offline: Sequence[Trajectory],
    given: Given,
    on_row: OnRow,
) -> ReplayBuffer | None:
    """The run's own replay buffer: other runs that dream with the same model must not see its rows.

    The offline trajectories are put into it where the experience model is shown demonstrations.
    """
    settings, shown = config.replay, _shown(config, given)
    if not config.train.update_replay_buffer and not shown:
        return None
    buffer = stack.enter_context(
        ReplayBuffer.open(
            folder.path / BUFFER,
            embedder=make_embedder(settings.embedder),
            index=settings.index,
            exact_limit=settings.exact_limit,
            capacity=settings.capacity,
        )
    )
    if shown:
        known = await buffer.known([each.id for each in offline])
        missing = [each for each in offline if len(known.get(each.id, ())) < len(each)]
        for start in range(0, len(missing), _AT_ONCE):
            some = missing[start : start + _AT_ONCE]
            await buffer.add([row for each in some for row in records(each)])
            on_row(start + len(some), len(missing))
    return buffer
