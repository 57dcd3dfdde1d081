"""`dreamgym experience`: teach an experience model from trajectories, and measure it against reality."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Annotated, Any

import typer
from rich.markdown import Markdown
from rich.progress import TaskID

from dreamgym.cli import screen
from dreamgym.cli.collect import run_collect
from dreamgym.cli.dream import (
    Buffer,
    NoDemonstrations,
    NoHistory,
    NoReasoning,
    NoSheet,
    Reward,
    environment_of,
    known_environment,
    left_out,
    need_models,
    open_experience_model,
    who_grades,
)
from dreamgym.cli.options import ConfigFile, DryRun, Json, Overrides, resolve
from dreamgym.config import WITHOUT, CollectConfig, Config, nearest_name
from dreamgym.envs.registry import EnvironmentSpec, environment_names, open_environment
from dreamgym.errors import ConfigError, MissingExtraError
from dreamgym.experience.annotate import AnnotateReport
from dreamgym.experience.dataset import held_out
from dreamgym.protocols import EnvironmentFactory, ExperienceModel, Teacher
from dreamgym.replay.buffer import ReplayBuffer
from dreamgym.replay.builtin import dataset_path
from dreamgym.replay.embed import make_embedder
from dreamgym.replay.offline import read_trajectories
from dreamgym.training.fidelity import (
    Fidelity,
    FidelitySettings,
    drift_svg,
    markdown_table,
    measure_fidelity,
)
from dreamgym.training.teachers import PLAIN, choose_teacher, explained, same_teacher
from dreamgym.types import Trajectory

app = typer.Typer(
    no_args_is_help=True, help="Teach an experience model: the model that plays the environment."
)


SHIPPED = ("builtin:alfworld", "builtin:alfworld-mistakes")


@app.command("train")
@screen.command
def train(
    *,
    data: Annotated[
        list[str] | None,
        typer.Option(
            help="Trajectories to learn from; may be given several times. By default all that are shipped: "
            "builtin:alfworld and builtin:alfworld-mistakes."
        ),
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="nano, tiny or small from scratch, or hf:NAME_OR_PATH.")
    ] = None,
    lora: Annotated[
        bool, typer.Option("--lora", help="Teach adapters of hf:NAME_OR_PATH instead of all its weights.")
    ] = False,
    teacher: Annotated[
        str | None,
        typer.Option(
            help="Who explains the trajectories: rules (the environment's own; the default if it has some), "
            "plain (what can be seen), hf:NAME_OR_PATH, or a name in --annotations."
        ),
    ] = None,
    annotations: Annotated[
        Path | None,
        typer.Option(
            help="Folder of explanations: used, and added to by --teacher. By default OUT/annotations."
        ),
    ] = None,
    out: Annotated[Path, typer.Option(help="The run's folder; gone on with if it was begun.")] = Path(
        "experience"
    ),
    env: Annotated[str | None, typer.Option(help="Environment that the trajectories come from.")] = None,
    steps: Annotated[int | None, typer.Option(help="Weight updates.", min=1)] = None,
    seed: Annotated[int | None, typer.Option(help="Fixes weights, order and validation.")] = None,
    buffer: Annotated[
        Path | None, typer.Option(help="Replay buffer for demonstrations (experience.demonstrations).")
    ] = None,
    no_history: NoHistory = False,
    no_reasoning: NoReasoning = False,
    no_demonstrations: NoDemonstrations = False,
    no_sheet: NoSheet = False,
    config: ConfigFile = None,
    overrides: Overrides = None,
    dry_run: DryRun = False,
    as_json: Json = False,
) -> None:
    """Teach an experience model. Killed at any moment, it goes on from its last checkpoint.

    Examples:

      dreamgym experience train --model tiny --out runs/experience

      dreamgym experience train --data trajectories --steps 4000 --set experience.history=2 --out runs/second

      dreamgym experience train --data trajectories --no-reasoning --out runs/thoughtless

      dreamgym experience train --data shop --env shop --model hf:models/base --lora --out runs/shop

      dreamgym experience train --data shop --env shop --teacher hf:models/chat --out runs/explained
    """
    without = left_out(
        history=no_history, reasoning=no_reasoning, demonstrations=no_demonstrations, sheet=no_sheet
    )
    flags = {"environment.name": env, "experience.model": model, "experience.steps": steps, "seed": seed}
    flags["experience.adapter"] = "lora" if lora else None
    resolved = resolve(
        config, overrides, {**flags, **{f"experience.{part}": WITHOUT[part] for part in without}}
    )
    if dry_run:
        screen.show_config(resolved)
        return
    need_models()
    sources = [dataset_path(path) for path in data or SHIPPED]
    result = asyncio.run(_train(resolved, sources, out, buffer, teacher, annotations))
    screen.show(result, screen.table(f"taught {out}", *result, rows=[list(result.values())]), as_json=as_json)


@app.command("eval")
@screen.command
def evaluate(
    run: Annotated[Path, typer.Argument(help="The folder of a taught experience model.")],
    *,
    data: Annotated[
        list[str] | None,
        typer.Option(help="Real trajectories of tasks it never learnt from; recorded now if none are given."),
    ] = None,
    only_held_out: Annotated[
        bool,
        typer.Option(
            "--held-out", help="Of --data, only the tasks that teaching held out (experience.validation)."
        ),
    ] = False,
    episodes: Annotated[int, typer.Option(help="How many episodes to measure on.", min=1)] = 60,
    split: Annotated[str, typer.Option(help="Which tasks to record, if none are given.")] = "valid_unseen",
    reward: Reward = None,
    env: Annotated[
        str | None, typer.Option(help="Environment that it plays; by default the one it was taught.")
    ] = None,
    annotations: Annotated[
        Path | None,
        typer.Option(help="Folder of its teacher's explanations. By default RUN/annotations."),
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

    Leaves fidelity.json, fidelity.md and drift.svg in the run's folder. What each number means stands in
    docs/guides/fidelity.md. With --no-PART the taught model is asked without that part, and the files are
    named so: fidelity-no-history.json. The experience.* settings are those that the run was taught with.
    Where the environment is not installed, trajectories tell all but dream → real, which is left out then.

    Examples:

      dreamgym experience eval runs/experience --episodes 200

      dreamgym experience eval runs/experience --data trajectories --reward model --json

      dreamgym experience eval runs/experience --no-sheet

      dreamgym experience eval runs/shop --data shop --held-out
    """
    need_models()
    flags = {"environment.name": environment_of(run, env, overrides), "seed": seed}
    resolved = resolve(config, overrides, flags)
    spec = known_environment(resolved.environment.name)
    without = left_out(
        history=no_history, reasoning=no_reasoning, demonstrations=no_demonstrations, sheet=no_sheet
    )
    with open_experience_model(
        run, spec, resolved, reward=reward, buffer=buffer, without=without
    ) as experience_model:
        if not data and (spec is None or only_held_out):
            raise ConfigError(_unrecorded(resolved.environment.name))
        sources = [dataset_path(path) for path in data or ()] or [_record(run, resolved, episodes, split)]
        found = [trajectory for source in sources for trajectory in read_trajectories(source)]
        _origin(resolved.environment.name, found)
        if only_held_out:
            found = _held_out(run, found)
        if len(found) > episodes:
            found = Random(resolved.seed).sample(found, episodes)
        teacher = _sheet_keeper(run, spec, annotations)
        fidelity = asyncio.run(_evaluate(experience_model, teacher, found, resolved))
    asked = {
        "reward": who_grades(reward, spec),
        "without": list(without),
        "seed": resolved.seed,
        "data": list(map(str, sources)),
        "held_out": only_held_out,
        "tasks": len({trajectory.task.id for trajectory in found}),
        "teacher": teacher.name,
    }
    result, table = keep_fidelity(fidelity, run, asked)
    if as_json:
        screen.show(result, [], as_json=True)
    else:
        screen.out.print(Markdown(table.read_text(encoding="utf-8")))


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


def _held_out(run: Path, found: Sequence[Trajectory]) -> list[Trajectory]:
    """Those of the tasks that teaching held out, by the run's own settings."""
    from dreamgym.training.teach import TaughtRun

    share = TaughtRun.read(run).experience.validation
    tasks = {trajectory.task.id for trajectory in found}
    kept = {task for task in tasks if held_out(task, share)}
    if not kept:
        raise ConfigError(
            f"{run} was taught with experience.validation={share:g}, which holds out none of these "
            f"{len(tasks)} tasks; give trajectories of other tasks, or teach again with a larger share"
        )
    screen.err.print(f"{len(kept)} of {len(tasks)} tasks were held out from teaching: measured on those only")
    return [trajectory for trajectory in found if trajectory.task.id in kept]


def _sheet_keeper(run: Path, spec: EnvironmentSpec | None, annotations: Path | None) -> Teacher:
    from dreamgym.training.teach import TaughtRun

    taught_by = TaughtRun.read(run).teacher
    folder = annotations or run / "annotations"
    teacher = same_teacher(taught_by, spec, folder)
    if taught_by not in (None, teacher.name):
        screen.err.print(
            f"{run} was taught by {taught_by!r}, of whom {folder} holds nothing: world sheets are kept true "
            "by what can be seen; name the folder of its explanations (--annotations) for the same as then",
            markup=False,
            soft_wrap=True,
        )
    return teacher


def _reality(config: Config) -> EnvironmentFactory | None:
    """The real environment; None, with the reason told, where it cannot be had."""
    name = config.environment.name
    told = f"environment {name!r} is not installed here"
    if name in environment_names():
        try:
            return open_environment(name, config.environment.options)
        except MissingExtraError as error:
            told = str(error)
    screen.err.print(f"{told}: dream → real is left out", markup=False, soft_wrap=True)
    return None


async def _evaluate(
    experience_model: ExperienceModel, teacher: Teacher, trajectories: Sequence[Trajectory], config: Config
) -> Fidelity:
    factory = _reality(config)
    try:
        with screen.progress() as bar:
            jobs: dict[str, TaskID] = {}

            def tell(stage: str, done: int, total: int) -> None:
                if stage not in jobs:
                    jobs[stage] = bar.add_task(stage, total=total, note="")
                bar.update(jobs[stage], completed=done)

            return await measure_fidelity(
                experience_model,
                teacher,
                trajectories,
                factory=factory,
                settings=FidelitySettings(seed=config.seed),
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
    told = json.dumps(result, indent=2, default=str) + "\n"
    (run / f"fidelity{suffix}.json").write_text(told, encoding="utf-8")
    (run / f"drift{suffix}.svg").write_text(drift_svg(fidelity.drift), encoding="utf-8")
    table = run / f"fidelity{suffix}.md"
    table.write_text(markdown_table(fidelity), encoding="utf-8")
    return result, table


def _origin(name: str, recorded: Sequence[Trajectory]) -> EnvironmentSpec | None:
    """The environment that all trajectories come from; None if only they know it."""
    found = sorted({trajectory.task.environment for trajectory in recorded})
    if found != [name]:
        raise ConfigError(
            f"expected trajectories of the environment {name!r}, "
            f"got {', '.join(map(repr, found)) or 'none'}; "
            "name theirs (--env), one experience model for each"
        )
    return known_environment(name)


async def _explained(
    config: Config, sources: list[Path], out: Path, wanted: str | None, annotations: Path | None
) -> tuple[Teacher, str | None, int]:
    """Who explains, what the agent is called, and of how many trajectories there is no explanation."""
    recorded = [trajectory for source in sources for trajectory in read_trajectories(source)]
    spec = _origin(config.environment.name, recorded)
    with screen.progress() as bar:
        job = bar.add_task("explaining", total=len(recorded), note="", visible=False)

        def tell(report: AnnotateReport) -> None:
            done = report.already_there + report.annotated + report.failures.total()
            note = f"{report.failures.total()} failed, {report.cost.reply_tokens} tokens written"
            bar.update(job, completed=done, note=note, visible=True)

        teacher = await choose_teacher(
            wanted,
            spec,
            recorded,
            annotations=annotations,
            default_annotations=out / "annotations",
            on_progress=tell,
        )
    if wanted is None and teacher.name == PLAIN:
        screen.err.print(
            f"{config.environment.name}: no rules to explain its trajectories by, so they are explained by "
            "what can be seen; --teacher hf:NAME_OR_PATH has a language model explain them",
            markup=False,
            soft_wrap=True,
        )
    missing = len(recorded) - len(explained(recorded, teacher))
    if missing:
        screen.err.print(f"{missing} of {len(recorded)} trajectories have no explanation and are left out")
    return teacher, spec.actor if spec else None, missing


async def _train(
    config: Config,
    sources: list[Path],
    out: Path,
    buffer: Path | None,
    wanted: str | None,
    annotations: Path | None,
) -> dict[str, Any]:
    from dreamgym.experience.finetune import Progress
    from dreamgym.training.teach import teach

    teacher, actor, missing = await _explained(config, sources, out, wanted, annotations)
    embedder = make_embedder(config.replay.embedder)
    store = None if buffer is None else ReplayBuffer.open(buffer, embedder=embedder, create=False)
    try:
        with screen.progress() as bar:
            job = bar.add_task("teaching", total=config.experience.steps, note="reading trajectories")

            def tell(progress: Progress) -> None:
                note = f"loss {progress.loss:.3f}, agreement {progress.agreement:.1%}"
                bar.update(job, completed=progress.step, note=note)

            progress = await teach(
                config,
                sources,
                teacher,
                out,
                actor=actor,
                memory=None if store is None else (embedder, store),
                on_progress=tell,
            )
    finally:
        if store is not None:
            store.close()
    return {
        "out": str(out),
        "steps": progress.step,
        "loss": round(progress.loss, 4),
        "agreement": round(progress.agreement, 4),
        "left_out": progress.left_out,
        "teacher": teacher.name,
        "unexplained": missing,
    }
