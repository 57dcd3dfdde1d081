"""`dreamgym experience`: teach an experience model from trajectories, and measure it against reality."""

from __future__ import annotations

import asyncio
import importlib.util
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from dreamgym.cli.collect import run_collect
from dreamgym.cli.options import ConfigFile, DryRun, Json, Overrides, resolve
from dreamgym.envs.registry import EnvironmentSpec, environment_names, find_environment, open_environment
from dreamgym.errors import ConfigError, MissingExtraError
from dreamgym.experience.annotate import AnnotateReport
from dreamgym.protocols import Teacher
from dreamgym.replay.buffer import ReplayBuffer
from dreamgym.replay.builtin import dataset_path
from dreamgym.replay.embed import make_embedder
from dreamgym.replay.offline import read_trajectories
from dreamgym.training.fidelity import Fidelity
from dreamgym.training.teachers import PLAIN, choose_teacher, explained
from dreamgym.types import Trajectory
from rich.markdown import Markdown

from dreamgym.cli import screen
from dreamgym.config import CollectConfig, Config

app = typer.Typer(
    no_args_is_help=True, help="Teach an experience model: the model that plays the environment."
)


@app.command("train")
@screen.command
def train(
    *,
    data: Annotated[
        list[str] | None, typer.Option(help="Trajectories to learn from; may be given several times.")
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
    config: ConfigFile = None,
    overrides: Overrides = None,
    dry_run: DryRun = False,
    as_json: Json = False,
) -> None:
    """Teach an experience model. Killed at any moment, it goes on from its last checkpoint.

    Examples:

      dreamgym experience train --data builtin:alfworld --model tiny --out runs/experience

      dreamgym experience train --data trajectories --steps 4000 --set experience.history=2 --out runs/second

      dreamgym experience train --data shop --env shop --model hf:models/base --lora --out runs/shop

      dreamgym experience train --data shop --env shop --teacher hf:models/chat --out runs/explained
    """
    flags = {"environment.name": env, "experience.model": model, "experience.steps": steps, "seed": seed}
    flags["experience.adapter"] = "lora" if lora else None
    resolved = resolve(config, overrides, flags)
    if dry_run:
        screen.show_config(resolved)
        return
    _need_models()
    sources = [dataset_path(path) for path in data or ["builtin:alfworld"]]
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
    episodes: Annotated[int, typer.Option(help="How many episodes to measure on.", min=1)] = 60,
    split: Annotated[str, typer.Option(help="Which tasks to record, if none are given.")] = "valid_unseen",
    reward: Annotated[str, typer.Option(help="Who grades: model (its own word) or sheet.")] = "model",
    env: Annotated[str | None, typer.Option(help="Environment that it plays.")] = None,
    seed: Annotated[int | None, typer.Option(help="Chooses the episodes to record.")] = None,
    as_json: Json = False,
) -> None:
    """Measure fidelity: one step, closed loop, and dreamt successes tried in the real environment.

    Leaves fidelity.json, fidelity.md and drift.svg in the run's folder. What each number means stands in
    docs/guides/fidelity.md.

    Examples:

      dreamgym experience eval runs/experience --episodes 200

      dreamgym experience eval runs/experience --data trajectories --reward sheet --json
    """
    _need_models()
    config = resolve(None, None, {"environment.name": env, "seed": seed})
    spec = find_environment(config.environment.name)
    if reward not in ("model", "sheet") or (reward == "sheet" and spec.goal_met is None):
        raise ConfigError(
            f"expected --reward model, or sheet where the environment can check one, got {reward!r}"
        )
    if data:
        sources = [dataset_path(path) for path in data]
    else:
        recorded = CollectConfig(episodes=episodes, split=split, out=run / "real", policy="mix")
        run_collect(config.model_copy(update={"collect": recorded}))
        sources = [recorded.out]
    found = [trajectory for source in sources for trajectory in read_trajectories(source)][:episodes]
    fidelity = asyncio.run(_evaluate(run, spec, found, config, reward))
    result = keep_fidelity(fidelity, run)
    if as_json:
        screen.show(result, [], as_json=True)
    else:
        screen.out.print(Markdown((run / "fidelity.md").read_text(encoding="utf-8")))


def _need_models() -> None:
    for name in ("torch", "transformers"):
        if importlib.util.find_spec(name) is None:
            raise MissingExtraError("an experience model of your own", "models")


async def _evaluate(
    run: Path, spec: EnvironmentSpec, trajectories: list[Trajectory], config: Config, reward: str
) -> Fidelity:
    from dreamgym.experience.reward import SheetCheck
    from dreamgym.training.fidelity import measure_fidelity

    from dreamgym.training.teach import load_experience_model

    if spec.teacher is None:
        raise ConfigError(f"environment {spec.name!r} has no teacher of its own to keep a world sheet true")
    grader = SheetCheck(spec.goal_met) if reward == "sheet" and spec.goal_met else None
    model = load_experience_model(run, rewarder=grader)
    factory = open_environment(config.environment.name, config.environment.options)
    try:
        with screen.err.status(f"measuring on {len(trajectories)} real episodes"):
            return await measure_fidelity(model, spec.teacher(), trajectories, factory=factory)
    finally:
        await factory.aclose()


def keep_fidelity(fidelity: Fidelity, run: Path) -> dict[str, Any]:
    """Write what was measured into the run's folder: JSON, table and plot."""
    from dreamgym.training.fidelity import drift_svg, markdown_table

    result = fidelity.to_dict()
    (run / "fidelity.json").write_text(json.dumps(result, indent=2, default=str) + "\n", encoding="utf-8")
    (run / "fidelity.md").write_text(markdown_table(fidelity), encoding="utf-8")
    (run / "drift.svg").write_text(drift_svg(fidelity.drift), encoding="utf-8")
    return result


def _origin(name: str, recorded: Sequence[Trajectory]) -> EnvironmentSpec | None:
    """The environment that all trajectories come from; None if only they know it."""
    found = sorted({trajectory.task.environment for trajectory in recorded})
    if found != [name]:
        raise ConfigError(
            f"expected trajectories of the environment {name!r}, "
            f"got {', '.join(map(repr, found)) or 'none'}; "
            "name theirs (--env), one experience model for each"
        )
    return find_environment(name) if name in environment_names() else None


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
    store = None if buffer is None else ReplayBuffer.open(buffer, create=False)
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
                memory=None if store is None else (make_embedder(config.replay.embedder), store),
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
