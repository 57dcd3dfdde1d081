"""Puts the curriculum of a run together: task pool, task generator, and starts of generated tasks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from random import Random

from dreamgym.config import Config, CurriculumConfig, validate
from dreamgym.curriculum.curriculum import Curriculum
from dreamgym.curriculum.generator import LanguageModelTaskGenerator
from dreamgym.curriculum.task_filter import ParseInstruction, TaskFilter
from dreamgym.curriculum.task_pool import FILE, TaskPool
from dreamgym.curriculum.task_proposers import FineTunedTaskProposer, PromptedTaskProposer, TaskProposer
from dreamgym.envs.registry import EnvironmentSpec
from dreamgym.envs.synthetic import EpisodeStart, StartFor
from dreamgym.errors import ConfigError
from dreamgym.experience.prompted import PromptedExperienceModel
from dreamgym.experience.reply_format import parse_variation, variation_prompt
from dreamgym.experience.world_sheet import SheetSampler, TaskCheck, hindsight_sheet, object_kinds
from dreamgym.models.registry import NAMES, LanguageModels, check_language_model, names_language_model
from dreamgym.protocols import Embedder, ExperienceModel, LanguageModel
from dreamgym.replay.embedders import make_embedder
from dreamgym.types import Task, Trajectory, WorldSheet

_SHOWN = 12
"""Instructions that show a language model how tasks are worded."""


class SampledStarts:
    """A world sheet for any task: recombined from known ones until the task can succeed on it."""

    def __init__(self, sheets: Iterable[WorldSheet], can_succeed: TaskCheck) -> None:
        self._sampler = SheetSampler(sheets)
        self._can_succeed = can_succeed

    def __call__(self, task: Task, seed: int = 0) -> WorldSheet | None:
        """The same task and seed, the same sheet; None where none was found."""
        return self._sampler.sample(task, Random(f"{task.id}/{seed}"), self._can_succeed)

    def start_for(self, task: Task, seed: int) -> EpisodeStart | None:
        """A `StartFor` for tasks that no trajectory holds: the experience model imagines how they begin."""
        # Where sheets are rare, the one of seed 0, with which the task filter accepted the task.
        sheet = self(task, seed) or self(task)
        return None if sheet is None else EpisodeStart(sheet=sheet)


def fine_tuned_proposer(model: LanguageModel, sheets: SampledStarts, *, name: str) -> FineTunedTaskProposer:
    """The experience model, with the prompt that it was fine-tuned to vary tasks with."""

    def prompt(task: Task) -> str | None:
        sheet = sheets(task)
        return None if sheet is None else variation_prompt(task.instruction, sheet)

    return FineTunedTaskProposer(model, name=name, prompt=prompt, parse=parse_variation)


def prompted_proposer(
    model: LanguageModel, sheets: SampledStarts, seeds: Sequence[Task], *, name: str, seed: int = 0
) -> PromptedTaskProposer:
    """Any language model, shown the objects of a task's sheet and how tasks are worded."""

    def objects(task: Task) -> str:
        sheet = sheets(task)
        return "" if sheet is None else ", ".join(object_kinds(sheet))

    wordings = sorted({task.instruction for task in seeds})
    shown = Random(seed).sample(wordings, min(_SHOWN, len(wordings)))
    return PromptedTaskProposer(model, name=name, objects=objects, examples=shown)


def open_curriculum(
    folder: Path,
    seeds: Sequence[Task],
    parse: ParseInstruction,
    sheets: SampledStarts,
    proposer: TaskProposer,
    *,
    settings: CurriculumConfig,
    seed: int = 0,
    embedder: Embedder | None = None,
    reserved: Iterable[str] = (),
) -> Curriculum:
    """The curriculum of a run, its pool in the run directory; close `pool` when done. No generated task
    equals one of the instructions in `reserved`."""
    pool = TaskPool(path=folder / FILE, seed=seed, generated_fraction=settings.generated_fraction)
    try:
        _seed(pool, seeds)
    except BaseException:
        pool.close()
        raise
    task_filter = TaskFilter(parse, sheets, reserved=reserved)
    generator = LanguageModelTaskGenerator(proposer, task_filter, pool, candidates=settings.candidates)
    return Curriculum(pool, generator, settings=settings, embedder=embedder)


def generates(config: Config, spec: EnvironmentSpec | None) -> bool:
    """Whether a run has tasks generated: never in reality, where they cannot be played."""
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
    """The curriculum of a run and the starts of the tasks it generates; None where `auto` finds an
    experience model without weights that could write variations."""
    assert spec.task_from_instruction is not None  # `generates` has checked it
    assert spec.can_succeed is not None
    known = (each for each in offline if each.task.environment == config.environment.name)
    sheets = [each.sheet or hindsight_sheet(each) for each in known if each.task.split == config.train.split]
    starts = SampledStarts(sheets, spec.can_succeed)
    proposer = _proposer(config, starts, seeds, experience_model, models or LanguageModels(config))
    if proposer is None:
        return None
    reserved: Sequence[str] = ()
    if spec.evaluation_instructions is not None:
        options = validate(spec.options, config.environment.options, prefix="environment.options.")
        reserved = await spec.evaluation_instructions(options)
    curriculum = open_curriculum(
        *(folder, seeds, spec.task_from_instruction, starts, proposer),
        settings=config.curriculum,
        seed=config.seed,
        embedder=make_embedder(config.replay.embedder) if config.learner.algorithm == "ppo" else None,
        reserved=reserved,
    )
    return curriculum, starts.start_for


def _proposer(
    config: Config,
    sheets: SampledStarts,
    seeds: Sequence[Task],
    experience_model: ExperienceModel,
    models: LanguageModels,
) -> TaskProposer | None:
    name = wanted = config.curriculum.generator
    if name == "experience" and isinstance(experience_model, PromptedExperienceModel):
        name = experience_model.name
    if names_language_model(name):
        model = models.open(name, role="task generator")
        return prompted_proposer(model, sheets, seeds, name=name, seed=config.seed)
    own: LanguageModel | None = getattr(experience_model, "language_model", None)
    if own is not None:
        return fine_tuned_proposer(own, sheets, name=experience_model.name)
    if wanted == "auto":
        return None
    raise ConfigError(
        f"curriculum.generator={wanted!r}: expected an experience model with a language_model, "
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
