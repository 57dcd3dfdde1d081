"""The fidelity of a named experience model: a fine-tuned run, or a language model that is prompted."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any, TypeAlias

from dreamgym.config import Config, Part
from dreamgym.data.datasets import dataset_path
from dreamgym.data.trajectories import read_trajectories
from dreamgym.envs.registry import is_known, open_environment
from dreamgym.errors import ConfigError, DataError, MissingExtraError
from dreamgym.evaluation.fidelity import Fidelity, OnStage, measure_fidelity, save_fidelity
from dreamgym.evaluation.worst import AdviceSettings
from dreamgym.experience.dataset import held_out
from dreamgym.experience.known_replies import with_known_replies
from dreamgym.experience.rubric_judge import RubricJudge
from dreamgym.models.registry import names_language_model
from dreamgym.models.usage import stage
from dreamgym.protocols import Annotator, EnvironmentFactory
from dreamgym.replay.buffer import ReplayBuffer
from dreamgym.training.annotators import same_annotator
from dreamgym.training.experience_loading import (
    LoadedExperienceModel,
    demonstrations_shown,
    experience_run,
    open_experience_model,
)
from dreamgym.training.experience_run import ExperienceRun, environment_of_data, known_environment
from dreamgym.types import Trajectory

Log: TypeAlias = Callable[[str], None]
_OF_EXPERT = ("expert", "noisy", "clumsy", "careless")
"""Policies of an environment that has an expert."""


def evaluate_experience(
    name: str,
    config: Config,
    data: Sequence[Path],
    *,
    folder: Path,
    episodes: int | None = None,
    only_held_out: bool = False,
    annotations: Path | None = None,
    reward: str | None = None,
    judge: str | None = None,
    buffer: str | None = None,
    without: Collection[Part] = (),
    on_stage: OnStage | None = None,
    log: Log,
) -> dict[str, Any]:
    """Measure an experience model on real trajectories, and save the results in `folder`.

    Args:
        episodes: the number of trajectories, sampled by the seed; by default all.
        only_held_out: only held-out tasks; a prompted model takes its demonstrations from the others.
        annotations: directory of the annotations of its annotator; by default that of its run.
        judge: a language model that scores synthetic episodes by rubrics.
        without: parts that its prompts leave out.
    """
    found = [trajectory for source in data for trajectory in read_trajectories(source)]
    environment_of_data(config.environment.name, found)
    found = as_asked(found, experience_run(name, config))
    others: list[Trajectory] = []
    if only_held_out:
        found, others = _held_out(name, found, config, log)
    if episodes is not None and len(found) > episodes:
        found = Random(config.seed).sample(found, episodes)
    annotator = _annotator(name, config, annotations, log)
    with (
        asyncio.Runner() as runner,
        _buffer_of(others, name, buffer, config, without, runner, log) as store,
        open_experience_model(
            *(name, config),
            run_async=runner.run,
            reward=reward,
            buffer=store,
            folder=folder,
            known=found,
            without=without,
            log=log,
        ) as loaded,
    ):
        advice = advice_settings(loaded.run, config, others or _learnt_from(name), prompted=loaded.prompted)
        fidelity = runner.run(_measure(loaded, annotator, found, config, judge, on_stage, advice, log))
        how: dict[str, Any] = {"reward": loaded.grader, "without": list(without), "seed": config.seed}
    how |= {"tasks": len({each.task.id for each in found}), "annotator": annotator.name}
    how |= {"data": list(map(str, data)), "held_out": only_held_out}
    if names_language_model(name):
        how["prompted"] = config.prompted.model_dump(mode="json")
    return save_fidelity(fidelity, folder, how)


def as_asked(trajectories: Sequence[Trajectory], run: ExperienceRun) -> list[Trajectory]:
    """The trajectories with the sheets that an experience model of this kind is asked with."""
    return with_known_replies(trajectories) if run.experience.facts == "replies" else list(trajectories)


def advice_settings(
    run: ExperienceRun, config: Config, recorded: Sequence[Trajectory], *, prompted: bool
) -> AdviceSettings:
    """What the advice about worst actions depends on; `recorded` is what the model learnt from."""
    settings = config.prompted if prompted else run.experience
    name = run.environment.name
    by_expert = any(each.provenance.policy.startswith(_OF_EXPERT) for each in recorded)
    return AdviceSettings(
        environment=name,
        options=run.environment.options,
        prompted=prompted,
        exchange_numbers=not prompted and run.experience.exchange_numbers,
        history=settings.history,
        text_limit=settings.text_limit,
        sheet=settings.sheet,
        steps=run.experience.steps,
        recorded=[(each.id, turn.action) for each in recorded for turn in each.transitions],
        refusals=run.refusals,
        policies=None
        if known_environment(name) is None
        else ("noisy:0.5", "clumsy:0.5")
        if by_expert
        else ("explore", "explore"),
    )


def _learnt_from(name: str) -> list[Trajectory]:
    """The trajectories that a fine-tuned run learnt from; none where they have been moved."""
    if names_language_model(name):
        return []
    run = ExperienceRun.read(Path(name))
    try:
        found = [
            each
            for source in run.data_sources(Path(name))
            for each in read_trajectories(dataset_path(source))
        ]
    except (ConfigError, DataError):
        return []
    return [each for each in found if not held_out(each.task.id, run.experience.validation)]


def _held_out(
    name: str, found: Sequence[Trajectory], config: Config, log: Log
) -> tuple[list[Trajectory], list[Trajectory]]:
    """The trajectories of held-out tasks, by the settings of a fine-tuned run, and the others."""
    prompted = names_language_model(name)
    share = experience_run(name, config).experience.validation
    tasks = {trajectory.task.id for trajectory in found}
    kept = {task for task in tasks if held_out(task, share)}
    if not kept:
        done = "measure with" if prompted else "give trajectories of other tasks, or fine-tune again with"
        raise ConfigError(
            f"{name} has experience.validation={share:g}, which holds out none of these "
            f"{len(tasks)} tasks; {done} a larger share"
        )
    source = "demonstrations" if prompted else "fine-tuning"
    log(f"measured on the {len(kept)} of {len(tasks)} tasks that were held out from {source}")
    return (
        [trajectory for trajectory in found if trajectory.task.id in kept],
        [trajectory for trajectory in found if trajectory.task.id not in kept],
    )


def _annotator(name: str, config: Config, annotations: Path | None, log: Log) -> Annotator:
    spec = known_environment(config.environment.name)
    if names_language_model(name):
        return same_annotator(None, spec, annotations or Path())
    used = ExperienceRun.read(Path(name)).annotator
    folder = annotations or Path(name) / "annotations"
    annotator = same_annotator(used, spec, folder)
    if used != annotator.name:
        log(
            f"{folder} has no annotations by {used!r}, the annotator of {name}: world sheets are updated "
            "from the texts of states; name the directory of its annotations (--annotations)"
        )
    return annotator


@contextmanager
def _buffer_of(
    others: Sequence[Trajectory],
    name: str,
    buffer: str | None,
    config: Config,
    without: Collection[Part],
    runner: asyncio.Runner,
    log: Log,
) -> Iterator[str | None]:
    """The given replay buffer, or for a prompted model one of the trajectories that are not measured."""
    if not names_language_model(name) or not demonstrations_shown(name, config, without) or buffer:
        yield buffer
    elif not others:
        log("prompts show no demonstrations: name a replay buffer (--buffer), or measure a part (--held-out)")
        yield None
    else:
        with TemporaryDirectory() as place:
            store = str(Path(place) / "replay.sqlite")
            with ReplayBuffer.open(store, embedder=config.replay.embedder) as own:
                for trajectory in others:
                    runner.run(own.add(trajectory))
            yield store


async def _measure(
    loaded: LoadedExperienceModel,
    annotator: Annotator,
    trajectories: Sequence[Trajectory],
    config: Config,
    judge: str | None,
    on_stage: OnStage | None,
    advice: AdviceSettings,
    log: Log,
) -> Fidelity:
    factory = real_environment(config, log)
    judging = None if judge is None else RubricJudge(loaded.models.open(judge, role="judge"), name=judge)
    try:
        with stage("fidelity"):
            return await measure_fidelity(
                *(loaded.model, annotator, trajectories),
                factory=factory,
                judge=judging,
                seed=config.seed,
                advice=advice,
                on_stage=on_stage,
            )
    finally:
        if factory is not None:
            await factory.aclose()


def real_environment(config: Config, log: Log) -> EnvironmentFactory | None:
    """None, with a message, where it is not installed."""
    name = config.environment.name
    problem = f"environment {name!r} is not installed"
    if is_known(name):
        try:
            return open_environment(name, config.environment.options)
        except MissingExtraError as error:
            problem = str(error)
    log(f"{problem}: dream → real is skipped")
    return None
