"""Fine-tunes an experience model: trajectories in, a run directory with `run.json`, `rules.json` (what the
recordings prove about actions), `checkpoint.pt`, `curve.json`, `model/` in the Hugging Face format and the
replay buffer of its demonstrations out."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from functools import partial
from pathlib import Path

from dreamgym.config import Config
from dreamgym.data.trajectories import TrajectoryWriter
from dreamgym.experience.black_box import BlackBoxKnowledge
from dreamgym.experience.black_box_examples import black_box_examples
from dreamgym.experience.dataset import Example, examples, held_out, limit_repeats, oversample, variations
from dreamgym.experience.exchangeable import exchangeable_words
from dreamgym.experience.known_replies import with_known_replies
from dreamgym.experience.near_misses import near_misses
from dreamgym.experience.recorded_rules import RULES_FILE
from dreamgym.experience.rule_mining import mine_rules, recorded_steps
from dreamgym.experience.world_sheet import with_sheet
from dreamgym.files import lock_directory
from dreamgym.protocols import Annotator, Retriever
from dreamgym.replay.buffer import ReplayBuffer
from dreamgym.training.annotators import PLAIN, annotated
from dreamgym.training.black_box import mine_knowledge, resolve_facts, save_knowledge, write_knowledge
from dreamgym.training.experience_loading import OWN_BUFFER, prompt_settings
from dreamgym.training.experience_run import ExperienceRun, known_environment
from dreamgym.training.fine_tuning import FineTuning, OnProgress, Progress
from dreamgym.training.model_setup import load_model
from dreamgym.types import Trajectory

TRAJECTORIES = "trajectories"
"""In a run directory: the trajectories, if they were not read from files."""


async def fine_tune(
    config: Config,
    trajectories: Iterable[Trajectory],
    annotator: Annotator,
    folder: Path,
    *,
    data: Sequence[Path | str] | None = None,
    actor: str | None = None,
    retriever: Retriever | None = None,
    on_progress: OnProgress | None = None,
) -> Progress:
    """Fine-tunes an experience model on recorded trajectories; resumes a run that was stopped.

    Args:
        data: the files that the trajectories were read from, for `run.json`; None writes the trajectories
            into the run directory.
        actor: the agent's name among the facts, if the environment gives it one.
        retriever: of demonstrations; by default a replay buffer of these trajectories, made in `folder`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    recorded = list(trajectories)
    with lock_directory(folder):
        spec = known_environment(config.environment.name)
        config = resolve_facts(config, spec, recorded)
        splits = {trajectory.task.split for trajectory in recorded}
        run = ExperienceRun.of(config, spec, annotator=annotator.name, splits=splits)
        run = run.model_copy(update={"actor": actor})
        run.check_resumes(folder)
        training, validation = await _make_examples(config, recorded, annotator, actor, retriever, folder)
        names = exchangeable_names(config, recorded)
        fine_tuning = _fine_tuning(config, training, validation, folder, names)
        fine_tuning.resume()  # before writing: a run that is refused stays as it was
        run.with_data(folder, _written(recorded, folder) if data is None else data).write(folder)
        if config.experience.facts == "sheet":
            await _write_rules(run, recorded, annotator, folder)
        if config.experience.facts == "replies":  # a run that is stopped can be used as well
            save_knowledge(mine_knowledge(recorded), folder)
        progress = await fine_tuning.run(on_progress)
        if config.experience.facts == "replies":
            await write_knowledge(config, recorded, folder, retriever=retriever)
        return progress


def exchangeable_names(config: Config, recorded: Sequence[Trajectory]) -> list[Collection[str]]:
    """Groups of names that can replace one another, as the environment or the recordings tell."""
    if config.experience.facts == "replies":
        return [*exchangeable_words(recorded)] if config.experience.exchange_names else []
    spec = known_environment(config.environment.name)
    return list(spec.exchangeable) if spec is not None else []


async def _write_rules(
    run: ExperienceRun, recorded: Sequence[Trajectory], annotator: Annotator, folder: Path
) -> None:
    """What the recordings prove about actions, where the environment discloses its facts."""
    known = recorded_steps(annotated(recorded, annotator), annotator, run.refusals)
    steps = [step async for step in known]
    if steps:
        mine_rules(steps, actor=run.actor).write(folder / RULES_FILE)


def _written(trajectories: Sequence[Trajectory], folder: Path) -> list[Path]:
    path = folder / TRAJECTORIES
    if not path.exists():
        with TrajectoryWriter(path) as writer:
            writer.append(trajectories)
    return [path]


def _fine_tuning(
    config: Config,
    training: Sequence[Example],
    validation: Sequence[Example],
    folder: Path,
    names: Sequence[Collection[str]],
) -> FineTuning:
    from dreamgym.models.local.tokens import TextCodec

    settings = config.experience
    loaded = load_model(settings, [*training, *validation], config.seed, names=names)
    return FineTuning(
        loaded,
        TextCodec(loaded.tokenizer),
        training,
        validation,
        folder=folder,
        steps=settings.steps,
        batch_size=settings.batch,
        seed=config.seed,
        processes=config.learner.processes,
    )


async def _make_examples(
    config: Config,
    recorded: Sequence[Trajectory],
    annotator: Annotator,
    actor: str | None,
    retriever: Retriever | None,
    folder: Path,
) -> tuple[list[Example], list[Example]]:
    """Training and validation examples."""
    if not config.replay.demonstrations(prompted=False) or retriever is not None:
        return await split_examples(config, recorded, annotator, actor, retriever)
    with ReplayBuffer.open(folder / OWN_BUFFER, embedder=config.replay.embedder) as buffer:
        for trajectory in recorded:
            await buffer.add(trajectory)
        return await split_examples(config, recorded, annotator, actor, buffer)


async def split_examples(
    config: Config,
    recorded: Sequence[Trajectory],
    annotator: Annotator,
    actor: str | None,
    retriever: Retriever | None,
    *,
    knowledge: BlackBoxKnowledge | None = None,
) -> tuple[list[Example], list[Example]]:
    """Examples of tasks to fine-tune on, and of held-out ones; `knowledge` of a black box is by default
    mined from these recordings."""
    k = config.replay.demonstrations(prompted=False)
    settings = prompt_settings(config.experience, k, actor, config.environment.name)
    found, black_box = annotated(recorded, annotator), config.experience.facts == "replies"
    recorded = with_known_replies(found) if black_box else [with_sheet(each) for each in found]
    make = None
    if black_box:
        plain = annotator.name == PLAIN
        knowledge = knowledge or mine_knowledge(found)
        make = partial(black_box_examples, knowledge=knowledge, plain=plain)
        recorded += near_misses(recorded, exchangeable_words(found), refusal=knowledge.refusal)
    validating = {t.id for t in recorded if held_out(t.task.id, config.experience.validation)}
    parts: tuple[list[Example], list[Example]] = ([], [])
    async for example in examples(recorded, annotator, settings=settings, retriever=retriever, make=make):
        parts[example.trajectory_id in validating].append(example)
    if black_box:
        return [*oversample(limit_repeats(parts[0]))], parts[1]
    known = [each for each in recorded if each.id not in validating]
    return [*oversample(limit_repeats(parts[0])), *variations(known, seed=config.seed)], parts[1]
