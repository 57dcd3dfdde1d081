"""`dreamgym experience eval`: measure an experience model, taught or prompted, against reality."""

from __future__ import annotations

import asyncio
import json
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
from dreamgym.envs.registry import EnvironmentSpec, environment_names, open_environment
from dreamgym.errors import ConfigError, MissingExtraError
from dreamgym.evaluation.fidelity import (
    Fidelity,
    drift_svg,
    markdown_table,
    measure_fidelity,
)
from dreamgym.experience.dataset import held_out
from dreamgym.experience.rubric_judge import RubricJudge
from dreamgym.models.registry import check_language_model, names_language_model
from dreamgym.models.usage import stage
from dreamgym.protocols import Annotator, EnvironmentFactory
from dreamgym.replay.buffer import ReplayBuffer
from dreamgym.training.annotators import same_annotator
from dreamgym.training.experience_loading import (
    LoadedExperienceModel,
    choose_grader,
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
            help="The folder of a taught experience model, or a language model that is asked to be one "
            "(endpoint:NAME, endpoint:MODEL@URL, hf:NAME_OR_PATH).",
        ),
    ],
    *,
    data: Annotated[
        list[str] | None,
        typer.Option(help="Real trajectories of tasks it never learnt from; recorded now if none are given."),
    ] = None,
    only_held_out: Annotated[
        bool,
        typer.Option(
            "--held-out",
            help="Of --data, only the tasks that are held out (experience.validation): from teaching, or "
            "from a language model's demonstrations, which are then taken from the others.",
        ),
    ] = False,
    episodes: Annotated[int, typer.Option(help="How many episodes to measure on.", min=1)] = 60,
    split: Annotated[str, typer.Option(help="Which tasks to record, if none are given.")] = "valid_unseen",
    reward: Reward = None,
    judge: Annotated[
        str | None,
        typer.Option(
            metavar="MODEL", help="A language model that scores every imagined transition by four rubrics."
        ),
    ] = None,
    env: Annotated[
        str | None, typer.Option(help="Environment that it plays; by default the one it was taught.")
    ] = None,
    annotations: Annotated[
        Path | None,
        typer.Option(help="Folder of its annotator's explanations. By default RUN/annotations."),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(help="Where results go; by default RUN, and fidelity/MODEL for a language model."),
    ] = None,
    seed: Annotated[
        int | None, typer.Option(help="Chooses the episodes, and what the near misses leave out.")
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
    """Measure fidelity: one step, closed loop, and dreamt successes tried in the real environment.

    Leaves fidelity.json, fidelity.md and drift.svg in the folder of the results. What each number means
    stands in docs/guides/fidelity.md. With --no-PART the model is asked without that part, and the files are
    named so: fidelity-no-history.json. The experience.* settings are those that a run was taught with; a
    language model is asked by the prompted.* settings.
    Where the environment is not installed, trajectories tell all but dream → real, which is left out then.

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
    grader = choose_grader(reward, spec)
    if judge is not None:
        check_language_model(judge, resolved)
    if not data and (spec is None or only_held_out):
        raise ConfigError(_unrecorded(resolved.environment.name))
    folder = out or (Path("fidelity") / re.sub(r"[^\w.-]+", "-", run) if prompted else Path(run))
    sources = [dataset_path(path) for path in data or ()] or [_record(folder, resolved, episodes, split)]
    found = [trajectory for source in sources for trajectory in read_trajectories(source)]
    origin(resolved.environment.name, found)
    others: list[Trajectory] = []
    if only_held_out:
        found, others = _held_out(run, found, resolved)
    if len(found) > episodes:
        found = Random(resolved.seed).sample(found, episodes)
    annotator = _sheet_keeper(run, spec, annotations)
    with (
        asyncio.Runner() as runner,
        _buffer_of(others, run, buffer, resolved, without, runner) as store,
        experience_model(
            *(run, resolved),
            runner=runner,
            reward=reward,
            buffer=store,
            folder=folder,
            known=found,
            without=without,
        ) as loaded,
    ):
        fidelity = runner.run(_evaluate(loaded, annotator, found, resolved, judge))
    how = {
        "reward": grader,
        "without": list(without),
        "seed": resolved.seed,
        "data": list(map(str, sources)),
        "held_out": only_held_out,
        "tasks": len({trajectory.task.id for trajectory in found}),
        "annotator": annotator.name,
    }
    if prompted:
        how["prompted"] = resolved.prompted.model_dump(mode="json")
    result, table = keep_fidelity(fidelity, folder, how)
    if as_json:
        console.show(result, [], as_json=True)
    else:
        console.out.print(Markdown(table.read_text(encoding="utf-8")))


@contextmanager
def _buffer_of(
    others: Sequence[Trajectory],
    name: str,
    buffer: str | None,
    config: Config,
    without: Collection[Part],
    runner: asyncio.Runner,
) -> Iterator[str | None]:
    """A prompted model is shown demonstrations of what is not measured, unless a replay buffer is named."""
    if not names_language_model(name) or not demonstrations_shown(name, config, without) or buffer:
        yield buffer
        return
    if not others:
        console.err.print(
            "no demonstrations are shown: name a replay buffer (--buffer), or measure on a part (--held-out)"
        )
        yield None
        return
    with TemporaryDirectory() as place:
        store = str(Path(place) / "replay.sqlite")
        with ReplayBuffer.open(store, embedder=config.replay.embedder) as own:
            for trajectory in others:
                runner.run(own.add(trajectory))
        yield store


def _record(run: Path, config: Config, episodes: int, split: str) -> Path:
    """Record real episodes into the run's folder, as far as they are not there already."""
    out = run / "real" / f"{split}-{config.seed}"
    wanted = CollectConfig(episodes=episodes, split=split, out=out, policy="mix")
    run_collect(config.model_copy(update={"collect": wanted}))
    return out


def _unrecorded(name: str) -> str:
    if name in environment_names():
        return "--held-out chooses among trajectories that you give (--data)"
    told = f"environment {name!r} is not installed here{nearest_name(name, environment_names())}"
    return f"{told}; or give real trajectories of it (--data)"


def _held_out(
    name: str, found: Sequence[Trajectory], config: Config
) -> tuple[list[Trajectory], list[Trajectory]]:
    """Those of the tasks that are held out, by a taught run's own settings, and the others."""
    prompted = names_language_model(name)
    share = experience_run(name, config).experience.validation
    tasks = {trajectory.task.id for trajectory in found}
    kept = {task for task in tasks if held_out(task, share)}
    if not kept:
        done = "measure with" if prompted else "give trajectories of other tasks, or teach again with"
        raise ConfigError(
            f"{name} goes by experience.validation={share:g}, which holds out none of these "
            f"{len(tasks)} tasks; {done} a larger share"
        )
    whom = "demonstrations" if prompted else "teaching"
    console.err.print(f"{len(kept)} of {len(tasks)} tasks were held out from {whom}: measured on those only")
    return (
        [trajectory for trajectory in found if trajectory.task.id in kept],
        [trajectory for trajectory in found if trajectory.task.id not in kept],
    )


def _sheet_keeper(name: str, spec: EnvironmentSpec | None, annotations: Path | None) -> Annotator:
    if names_language_model(name):
        return same_annotator(None, spec, annotations or Path())
    run = Path(name)
    taught_by = ExperienceRun.read(run).annotator
    folder = annotations or run / "annotations"
    annotator = same_annotator(taught_by, spec, folder)
    if taught_by != annotator.name:
        console.err.print(
            f"{folder} has no annotations by {taught_by!r}, the annotator of {run}: world sheets are updated "
            "from the texts of states; name the directory of its annotations (--annotations)",
            markup=False,
            soft_wrap=True,
        )
    return annotator


def _reality(config: Config) -> EnvironmentFactory | None:
    """The real environment; None, with the reason told, where it cannot be had."""
    name = config.environment.name
    told = f"environment {name!r} is not installed here"
    if name in environment_names():
        try:
            return open_environment(name, config.environment.options)
        except MissingExtraError as error:
            told = str(error)
    console.err.print(f"{told}: dream → real is left out", markup=False, soft_wrap=True)
    return None


async def _evaluate(
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

            def tell(stage: str, done: int, total: int) -> None:
                if stage not in jobs:
                    jobs[stage] = bar.add_task(stage, total=total, note="")
                bar.update(jobs[stage], completed=done)

            with stage("fidelity"):
                return await measure_fidelity(
                    loaded.model,
                    annotator,
                    trajectories,
                    factory=factory,
                    judge=judging,
                    seed=config.seed,
                    on_stage=tell,
                )
    finally:
        if factory is not None:
            await factory.aclose()


def keep_fidelity(fidelity: Fidelity, run: Path, asked: dict[str, Any]) -> tuple[dict[str, Any], Path]:
    """Write what was measured into the run's folder: JSON, table and plot.

    Args:
        asked: how it was measured; what it was made to do `without` also names the files.

    Returns:
        What the JSON holds, and the file of the table.
    """
    result = {**fidelity.to_dict(), "asked": asked}
    suffix = "".join(f"-no-{part}" for part in asked["without"])
    run.mkdir(parents=True, exist_ok=True)
    told = json.dumps(result, indent=2, default=str) + "\n"
    (run / f"fidelity{suffix}.json").write_text(told, encoding="utf-8")
    (run / f"drift{suffix}.svg").write_text(drift_svg(fidelity.drift), encoding="utf-8")
    table = run / f"fidelity{suffix}.md"
    table.write_text(markdown_table(fidelity), encoding="utf-8")
    return result, table


def origin(name: str, recorded: Sequence[Trajectory]) -> EnvironmentSpec | None:
    """The environment that all trajectories come from; None if only they know it."""
    found = sorted({trajectory.task.environment for trajectory in recorded})
    if found != [name]:
        raise ConfigError(
            f"expected trajectories of the environment {name!r}, "
            f"got {', '.join(map(repr, found)) or 'none'}; "
            "name theirs (--env), one experience model for each"
        )
    return known_environment(name)
