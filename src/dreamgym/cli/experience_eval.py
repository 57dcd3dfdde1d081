"""`dreamgym experience eval`: the fidelity of an experience model, fine-tuned or prompted."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import typer
from rich.markdown import Markdown
from rich.progress import TaskID

from dreamgym.cli import console
from dreamgym.cli.collect import run_collect
from dreamgym.cli.experience_models import (
    Buffer,
    NoDemonstrations,
    NoHistory,
    NoReasoning,
    NoSheet,
    Reward,
    experience_model,
    parts_without,
    settings_of_run,
)
from dreamgym.cli.options import ConfigFile, Json, Overrides, resolve
from dreamgym.config import CollectConfig, Config, Part, nearest_name
from dreamgym.data.datasets import dataset_path
from dreamgym.data.trajectories import read_trajectories
from dreamgym.envs.registry import EnvironmentSpec, environment_names, find_environment, open_environment
from dreamgym.errors import ConfigError, MissingExtraError
from dreamgym.evaluation.evaluate import evaluation_split
from dreamgym.evaluation.fidelity import Fidelity, measure_fidelity, save_fidelity
from dreamgym.experience.dataset import held_out
from dreamgym.experience.rubric_judge import RubricJudge
from dreamgym.models.registry import check_language_model, names_language_model
from dreamgym.models.usage import stage
from dreamgym.protocols import Annotator, EnvironmentFactory
from dreamgym.replay.buffer import ReplayBuffer
from dreamgym.training.annotators import same_annotator
from dreamgym.training.experience_loading import (
    LoadedExperienceModel,
    demonstrations_shown,
    experience_run,
)
from dreamgym.training.experience_run import ExperienceRun, known_environment
from dreamgym.types import Trajectory


@console.command
def evaluate(
    run: Annotated[
        str,
        typer.Argument(
            metavar="RUN|MODEL",
            help="The run directory of a fine-tuned experience model, or a language model that is prompted "
            "(endpoint:NAME, endpoint:MODEL@URL, hf:NAME_OR_PATH).",
        ),
    ],
    *,
    data: Annotated[
        list[str] | None,
        typer.Option(help="Real trajectories of tasks outside of fine-tuning; by default recorded now."),
    ] = None,
    only_held_out: Annotated[
        bool,
        typer.Option(
            "--held-out",
            help="Of --data, only the held-out tasks (experience.validation): held out from fine-tuning, or "
            "from a language model's demonstrations, which then come from the other tasks.",
        ),
    ] = False,
    episodes: Annotated[int, typer.Option(help="Number of episodes.", min=1)] = 60,
    split: Annotated[
        str | None,
        typer.Option(help="Split to record, without --data; by default the environment's evaluation split."),
    ] = None,
    reward: Reward = None,
    judge: Annotated[
        str | None,
        typer.Option(
            metavar="MODEL", help="A language model that scores every imagined transition by four rubrics."
        ),
    ] = None,
    env: Annotated[str | None, typer.Option(help="Environment; by default the run's own.")] = None,
    annotations: Annotated[
        Path | None,
        typer.Option(help="Folder of its annotator's explanations. By default RUN/annotations."),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(help="Directory of results; by default RUN, or fidelity/MODEL for a language model."),
    ] = None,
    seed: Annotated[
        int | None, typer.Option(help="Chooses the episodes, and the action that each near miss leaves out.")
    ] = None,
    buffer: Buffer = None,
    no_history: NoHistory = False,
    no_reasoning: NoReasoning = False,
    no_demonstrations: NoDemonstrations = False,
    no_sheet: NoSheet = False,
    config: ConfigFile = None,
    overrides: Overrides = None,
    as_json: Json = False,
) -> None:
    """Measure fidelity: single predictions, closed loop, and successes in the dream replayed in reality.

    Writes fidelity.json, fidelity.md and drift.svg into the directory of the results;
    docs/guides/fidelity.md explains each number. With --no-PART prompts leave that part out, and so do the
    file names: fidelity-no-history.json. The experience.* settings are those of the run; the prompted.*
    settings are those of a language model. Without an installed environment dream → real is skipped.

    Examples:

      dreamgym experience eval runs/experience --episodes 200

      dreamgym experience eval runs/experience --data trajectories --reward model --json

      dreamgym experience eval runs/experience --no-sheet

      dreamgym experience eval runs/shop --data shop --held-out

      dreamgym experience eval endpoint:MODEL@http://localhost:8000 --env shop --data shop --held-out
    """
    resolved = settings_of_run(run, resolve(config, overrides, {"environment.name": env, "seed": seed}))
    spec = known_environment(resolved.environment.name)
    without = parts_without(
        history=no_history, reasoning=no_reasoning, demonstrations=no_demonstrations, sheet=no_sheet
    )
    prompted = names_language_model(run)
    if judge is not None:
        check_language_model(judge, resolved)
    if not data and (spec is None or only_held_out):
        raise ConfigError(_no_data(resolved.environment.name))
    folder = out or (Path("fidelity") / re.sub(r"[^\w.-]+", "-", run) if prompted else Path(run))
    sources = [dataset_path(path) for path in data or ()] or [_record(folder, resolved, episodes, split)]
    found = [trajectory for source in sources for trajectory in read_trajectories(source)]
    origin(resolved.environment.name, found)
    others: list[Trajectory] = []
    if only_held_out:
        found, others = _held_out(run, found, resolved)
    if len(found) > episodes:
        found = Random(resolved.seed).sample(found, episodes)
    result = run_fidelity(
        *(run, resolved, found),
        folder=folder,
        others=others,
        annotations=annotations,
        reward=reward,
        judge=judge,
        buffer=buffer,
        without=without,
        details={"data": list(map(str, sources)), "held_out": only_held_out},
    )
    if as_json:
        console.show(result, [], as_json=True)
    else:
        console.out.print(Markdown((folder / result["files"]["table"]).read_text(encoding="utf-8")))


def run_fidelity(
    name: str,
    config: Config,
    trajectories: Sequence[Trajectory],
    *,
    folder: Path,
    others: Sequence[Trajectory] = (),
    annotations: Path | None = None,
    reward: str | None = None,
    judge: str | None = None,
    buffer: str | None = None,
    without: Collection[Part] = (),
    details: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Measure and save the fidelity of an experience model, with progress bars.

    Args:
        others: trajectories for the demonstrations of a prompted model.
        details: more about the measurement, for fidelity.json.
    """
    annotator = _annotator(name, known_environment(config.environment.name), annotations)
    with (
        asyncio.Runner() as runner,
        _buffer_of(others, name, buffer, config, without, runner) as store,
        experience_model(
            *(name, config),
            runner=runner,
            reward=reward,
            buffer=store,
            folder=folder,
            known=trajectories,
            without=without,
        ) as loaded,
    ):
        fidelity = runner.run(_measure(loaded, annotator, trajectories, config, judge))
        how: dict[str, Any] = {"reward": loaded.grader, "without": list(without), "seed": config.seed}
    how |= {"tasks": len({each.task.id for each in trajectories}), "annotator": annotator.name}
    if names_language_model(name):
        how["prompted"] = config.prompted.model_dump(mode="json")
    return save_fidelity(fidelity, folder, how | (details or {}))


@contextmanager
def _buffer_of(
    others: Sequence[Trajectory],
    name: str,
    buffer: str | None,
    config: Config,
    without: Collection[Part],
    runner: asyncio.Runner,
) -> Iterator[str | None]:
    """The given replay buffer, or for a prompted model one of the trajectories that are not measured."""
    if not names_language_model(name) or not demonstrations_shown(name, config, without) or buffer:
        yield buffer
        return
    if not others:
        console.err.print(
            "prompts show no demonstrations: name a replay buffer (--buffer), or measure a part (--held-out)"
        )
        yield None
        return
    with TemporaryDirectory() as place:
        store = str(Path(place) / "replay.sqlite")
        with ReplayBuffer.open(store, embedder=config.replay.embedder) as own:
            for trajectory in others:
                runner.run(own.add(trajectory))
        yield store


def _record(run: Path, config: Config, episodes: int, split: str | None) -> Path:
    """Record real episodes into the run directory, unless they are there."""
    if split is None:
        split = evaluation_split(find_environment(config.environment.name).splits or ("train",))
    out = run / "real" / f"{split}-{config.seed}"
    wanted = CollectConfig(episodes=episodes, split=split, out=out, policy="mix")
    run_collect(config.model_copy(update={"collect": wanted}))
    return out


def _no_data(name: str) -> str:
    if name in environment_names():
        return "--held-out selects from given trajectories: add --data"
    missing = f"environment {name!r} is not installed{nearest_name(name, environment_names())}"
    return f"{missing}; or give real trajectories of it (--data)"


def _held_out(
    name: str, found: Sequence[Trajectory], config: Config
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
    console.say(f"measured on the {len(kept)} of {len(tasks)} tasks that were held out from {source}")
    return (
        [trajectory for trajectory in found if trajectory.task.id in kept],
        [trajectory for trajectory in found if trajectory.task.id not in kept],
    )


def _annotator(name: str, spec: EnvironmentSpec | None, annotations: Path | None) -> Annotator:
    if names_language_model(name):
        return same_annotator(None, spec, annotations or Path())
    run = Path(name)
    used = ExperienceRun.read(run).annotator
    folder = annotations or run / "annotations"
    annotator = same_annotator(used, spec, folder)
    if used != annotator.name:
        console.err.print(
            f"{folder} has no annotations by {used!r}, the annotator of {run}: world sheets are updated "
            "from the texts of states; name the directory of its annotations (--annotations)",
            markup=False,
            soft_wrap=True,
        )
    return annotator


def _reality(config: Config) -> EnvironmentFactory | None:
    """The real environment; None, with a message, where it is not installed."""
    name = config.environment.name
    problem = f"environment {name!r} is not installed"
    if name in environment_names():
        try:
            return open_environment(name, config.environment.options)
        except MissingExtraError as error:
            problem = str(error)
    console.say(f"{problem}: dream → real is skipped")
    return None


async def _measure(
    loaded: LoadedExperienceModel,
    annotator: Annotator,
    trajectories: Sequence[Trajectory],
    config: Config,
    judge: str | None,
) -> Fidelity:
    factory = _reality(config)
    judging = None if judge is None else RubricJudge(loaded.models.open(judge, role="judge"), name=judge)
    try:
        with console.progress() as bar:
            jobs: dict[str, TaskID] = {}

            def on_stage(stage: str, done: int, total: int) -> None:
                if stage not in jobs:
                    jobs[stage] = bar.add_task(stage, total=total)
                bar.update(jobs[stage], completed=done)

            with stage("fidelity"):
                return await measure_fidelity(
                    loaded.model,
                    annotator,
                    trajectories,
                    factory=factory,
                    judge=judging,
                    seed=config.seed,
                    on_stage=on_stage,
                )
    finally:
        if factory is not None:
            await factory.aclose()


def origin(name: str, recorded: Sequence[Trajectory]) -> EnvironmentSpec | None:
    """The environment of all trajectories; None if it is not installed."""
    found = sorted({trajectory.task.environment for trajectory in recorded})
    if found != [name]:
        raise ConfigError(
            f"expected trajectories of the environment {name!r}, "
            f"got {', '.join(map(repr, found)) or 'none'}; "
            "name theirs (--env), one experience model for each"
        )
    return known_environment(name)
