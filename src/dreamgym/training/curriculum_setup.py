"""Puts a curriculum together: the pool of a run, who writes variations, and the worlds to dream them in.

`curriculum_of` does it from the settings of a run; the parts serve callers with a generator of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from random import Random

from dreamgym.config import Config, CurriculumConfig, validate
from dreamgym.curriculum.curriculum import Curriculum
from dreamgym.curriculum.generator import LanguageModelTaskGenerator
from dreamgym.curriculum.task_filter import TaskFilter
from dreamgym.curriculum.task_pool import FILE, TaskPool
from dreamgym.curriculum.task_proposers import FineTunedTaskProposer, PromptedTaskProposer, TaskProposer
from dreamgym.envs.registry import EnvironmentSpec
from dreamgym.envs.synthetic import EpisodeStart, StartFor
from dreamgym.errors import ConfigError
from dreamgym.experience.prompted import PromptedExperienceModel
from dreamgym.experience.reply_format import parse_variation, variation_prompt
from dreamgym.experience.world_sheet import SheetSampler, hindsight_sheet, object_kinds
from dreamgym.models.registry import NAMES, LanguageModels, check_language_model, names_language_model
from dreamgym.protocols import Embedder, ExperienceModel, LanguageModel
from dreamgym.replay.embedders import make_embedder
from dreamgym.types import Task, Trajectory, WorldSheet

_SHOWN = 12
"""Instructions that show a language model how tasks are worded."""


class SampledStarts:
    """A world sheet for any task: recombined from known ones until the task can succeed on it."""

    def __init__(self, sheets: Iterable[WorldSheet], can_succeed: Callable[[Task, WorldSheet], bool]) -> None:
        self._worlds = SheetSampler(sheets)
        self._can_succeed = can_succeed

    def __call__(self, task: Task, seed: int = 0) -> WorldSheet | None:
        """The same task and seed, the same sheet; None where none was found."""

        def possible(task: Task, sheet: WorldSheet) -> bool:
            return self._can_succeed(task, sheet)

        return self._worlds.sample(task, Random(f"{task.id}/{seed}"), possible)

    def beginning(self, task: Task, seed: int) -> EpisodeStart | None:
        """A `StartFor` for tasks that no trajectory holds: the experience model imagines how they begin."""
        sheet = self(task, seed)
        if sheet is None:
            # Worlds that a task can succeed in may be rare; the task_filter let it in with the one of seed 0.
            sheet = self(task)
        return None if sheet is None else EpisodeStart(sheet=sheet)


def worlds_for(spec: EnvironmentSpec, sheets: Iterable[WorldSheet]) -> SampledStarts:
    """
    Raises:
        ConfigError: the environment cannot tell whether a task can succeed.
    """
    if spec.can_succeed is None:
        raise ConfigError(f"{_cannot(spec)} a check that a task can succeed")
    return SampledStarts(sheets, spec.can_succeed)


def fine_tuned_proposer(
    model: LanguageModel, worlds: SampledStarts, *, name: str, settings: CurriculumConfig
) -> FineTunedTaskProposer:
    """The experience model, with the prompt that it was fine-tuned to vary tasks with."""

    def prompt(task: Task) -> str | None:
        sheet = worlds(task)
        return None if sheet is None else variation_prompt(task.instruction, sheet)

    return FineTunedTaskProposer(
        model, name=name, prompt=prompt, parse=parse_variation, temperature=settings.temperature
    )


def prompted_proposer(
    model: LanguageModel,
    worlds: SampledStarts,
    seeds: Sequence[Task],
    *,
    name: str,
    settings: CurriculumConfig,
    seed: int = 0,
) -> PromptedTaskProposer:
    """Any language model, shown what there is in a task's world and how tasks are worded."""

    def objects(task: Task) -> str:
        sheet = worlds(task)
        return "" if sheet is None else ", ".join(object_kinds(sheet))

    wordings = sorted({task.instruction for task in seeds})
    shown = Random(seed).sample(wordings, min(_SHOWN, len(wordings)))
    return PromptedTaskProposer(
        model, name=name, objects=objects, examples=shown, temperature=settings.temperature
    )


def open_curriculum(
    folder: Path,
    seeds: Sequence[Task],
    spec: EnvironmentSpec,
    worlds: SampledStarts,
    proposer: TaskProposer | None,
    *,
    settings: CurriculumConfig,
    seed: int = 0,
    embedder: Embedder | None = None,
    reserved: Iterable[str] = (),
) -> Curriculum:
    """The curriculum of a run, its pool in the run's folder; close `pool` when done.

    Args:
        proposer: who writes variations; None for a pool of seed tasks alone.
        embedder: for PPO, see `Curriculum`.
        reserved: instructions of the evaluation's splits, which no generated task may equal.

    Raises:
        ConfigError: the environment cannot read instructions, or the run was begun with other seed tasks.
    """
    if proposer is not None and spec.task_from_instruction is None:
        raise ConfigError(f"{_cannot(spec)} a reader of instructions")
    pool = TaskPool(path=folder / FILE, seed=seed, generated_fraction=settings.generated_fraction)
    try:
        _seed(pool, seeds)
    except BaseException:
        pool.close()
        raise
    generator = None
    if proposer is not None and spec.task_from_instruction is not None:
        task_filter = TaskFilter(spec.task_from_instruction, worlds, reserved=reserved)
        generator = LanguageModelTaskGenerator(
            proposer, task_filter, pool, candidates=settings.candidates, attempts=settings.attempts
        )
    return Curriculum(pool, generator, settings=settings, embedder=embedder)


def generates(config: Config, spec: EnvironmentSpec | None) -> bool:
    """Whether a run has tasks generated: never in reality, where they have no game to be played.

    Raises:
        ConfigError: they are asked for where none can be had.
    """
    wanted = config.curriculum.generator
    able = spec is not None and spec.task_from_instruction is not None and spec.can_succeed is not None
    dreaming = config.train.mode == "dream"
    if wanted in ("auto", "none"):
        return wanted == "auto" and able and dreaming
    if wanted != "experience" and not names_language_model(wanted):
        raise ConfigError(f"expected curriculum.generator auto, none, experience or {NAMES}, got {wanted!r}")
    if wanted != "experience":
        check_language_model(wanted, config)
    if dreaming and not able:
        raise ConfigError(
            f"curriculum.generator={wanted!r}: environment {config.environment.name!r} cannot read and check "
            "new tasks (task_from_instruction and can_succeed of its EnvironmentSpec); set it to none"
        )
    return dreaming


async def curriculum_of(
    config: Config,
    spec: EnvironmentSpec,
    folder: Path,
    offline: Iterable[Trajectory],
    seeds: Sequence[Task],
    experience_model: ExperienceModel,
    models: LanguageModels | None = None,
) -> tuple[Curriculum, StartFor] | None:
    """The curriculum that a run's settings ask for, and the worlds of the tasks it generates.

    Args:
        offline: where world sheets are taken from.
        experience_model: whose weights write the variations, unless the settings name others.
        models: where those are opened, if they name others.

    Returns:
        None where `auto` finds no weights to ask, in an experience model of another kind.
    """
    known = (each for each in offline if each.task.environment == config.environment.name)
    sheets = [each.sheet or hindsight_sheet(each) for each in known if each.task.split == config.train.split]
    worlds = worlds_for(spec, sheets)
    proposer = _proposer(config, worlds, seeds, experience_model, models or LanguageModels(config))
    if proposer is None:
        return None
    reserved: Sequence[str] = ()
    if spec.evaluation_instructions is not None:
        options = validate(spec.options, config.environment.options, prefix="environment.options.")
        reserved = await spec.evaluation_instructions(options)
    curriculum = open_curriculum(
        folder,
        seeds,
        spec,
        worlds,
        proposer,
        settings=config.curriculum,
        seed=config.seed,
        embedder=make_embedder(config.replay.embedder) if config.learner.algorithm == "ppo" else None,
        reserved=reserved,
    )
    return curriculum, worlds.beginning


def _proposer(
    config: Config,
    worlds: SampledStarts,
    seeds: Sequence[Task],
    experience_model: ExperienceModel,
    models: LanguageModels,
) -> TaskProposer | None:
    settings, name = config.curriculum, config.curriculum.generator
    if name == "experience" and isinstance(experience_model, PromptedExperienceModel):
        name = experience_model.name
    if names_language_model(name):
        model = models.open(name, role="task generator")
        return prompted_proposer(model, worlds, seeds, name=name, settings=settings, seed=config.seed)
    own: LanguageModel | None = getattr(experience_model, "language_model", None)
    if own is not None:
        return fine_tuned_proposer(own, worlds, name=experience_model.name, settings=settings)
    if settings.generator == "auto":
        return None
    raise ConfigError(
        f"curriculum.generator={settings.generator!r}: expected an experience model with a language_model, "
        f"{experience_model.name!r} has none; name another one ({NAMES}), or set it to none"
    )


def _seed(pool: TaskPool, seeds: Sequence[Task]) -> None:
    """Add the seed tasks, or what a crash left out of them; a run that has begun keeps those it has."""
    given = {task.id for task in seeds}
    held = {each.task.id for each in pool.records if each.task.origin == "seed"}
    if held - given or (pool.started and given - held):
        raise ConfigError(
            f"{pool.path}: this run was begun with {len(held)} seed tasks, of which {len(held & given)} are "
            f"among the {len(given)} given now; use the same data to resume, or choose another directory"
        )
    pool.add_seeds(seeds)


def _cannot(spec: EnvironmentSpec) -> str:
    return (
        f"environment {spec.name!r} cannot have generated tasks (set curriculum.generator to none): "
        "its EnvironmentSpec lacks"
    )
