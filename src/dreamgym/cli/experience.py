"""`dreamgym experience`: fine-tune an experience model on trajectories, and measure its fidelity."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Annotated, Any

import typer

from dreamgym.cli import console
from dreamgym.cli.attack import attack_command
from dreamgym.cli.audit import audit_command
from dreamgym.cli.experience_eval import evaluate
from dreamgym.cli.experience_models import Without, need_models, parts
from dreamgym.cli.options import ConfigFile, DryRun, Json, Overrides, resolve
from dreamgym.config import WITHOUT, Config
from dreamgym.data.datasets import dataset_path
from dreamgym.data.trajectories import read_trajectories
from dreamgym.experience.annotate import AnnotateReport
from dreamgym.models.registry import LanguageModels
from dreamgym.protocols import Annotator
from dreamgym.replay.buffer import ReplayBuffer
from dreamgym.training.annotators import PLAIN, annotated, choose_annotator
from dreamgym.training.experience_run import environment_of_data, with_environment_of_data
from dreamgym.types import Trajectory

app = console.group(help="Experience models, which predict the environment: train, measure, attack, audit.")
console.command(app, "eval")(evaluate)
console.command(app, "audit")(audit_command)
console.command(app, "attack")(attack_command)

SHIPPED = ("builtin:alfworld", "builtin:alfworld-mistakes")
GOOD_AGREEMENT, LOW_AGREEMENT = 0.9, 0.75


@console.command(app, "train")
def train(
    *,
    data: Annotated[
        list[str] | None,
        typer.Option(
            help="Trajectories to fine-tune on; may be repeated. By default the shipped ones: "
            "builtin:alfworld and builtin:alfworld-mistakes."
        ),
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="nano, tiny or small from scratch, or hf:NAME_OR_PATH.")
    ] = None,
    lora: Annotated[
        bool,
        typer.Option("--lora", help="Fine-tune LoRA adapters of hf:NAME_OR_PATH instead of all weights."),
    ] = False,
    annotator: Annotated[
        str | None,
        typer.Option(
            help="Annotator of the trajectories: rules (the environment's own; the default if it has any), "
            "plain (from the texts of states), hf:NAME_OR_PATH, endpoint:NAME, endpoint:MODEL@URL, or a name "
            "in --annotations."
        ),
    ] = None,
    annotations: Annotated[
        Path | None,
        typer.Option(
            help="Directory of annotations: read, and extended by --annotator; by default OUT/annotations."
        ),
    ] = None,
    out: Annotated[Path, typer.Option(help="Run directory; an interrupted run in it is resumed.")] = Path(
        "experience"
    ),
    env: Annotated[
        str | None, typer.Option(help="Environment of the trajectories; by default the one that they name.")
    ] = None,
    steps: Annotated[int | None, typer.Option(help="Weight updates.", min=1)] = None,
    seed: Annotated[int | None, typer.Option(help="Fixes weights, order and validation.")] = None,
    buffer: Annotated[Path | None, typer.Option(help="Replay buffer for demonstrations (replay.k).")] = None,
    without: Without = None,
    config: ConfigFile = None,
    overrides: Overrides = None,
    dry_run: DryRun = False,
    as_json: Json = False,
) -> None:
    """Fine-tune an experience model. Run the command again after a stop: it resumes from the last checkpoint.

    Examples:

    - dreamgym experience train --model tiny --out runs/experience
    - dreamgym experience train --data trajectories --steps 4000 --set experience.history=2 --out runs/second
    - dreamgym experience train --data trajectories --without reasoning --out runs/no-reasoning
    - dreamgym experience train --data shop --model hf:models/base --lora --out runs/shop
    - dreamgym experience train --data shop --annotator hf:models/chat --out runs/annotated
    """
    flags = {"environment.name": env, "experience.model": model, "experience.steps": steps, "seed": seed}
    flags["experience.adapter"] = "lora" if lora else None
    flags |= {f"experience.{part}": WITHOUT[part] for part in parts(without) if part in WITHOUT}
    flags["replay.k"] = 0 if "demonstrations" in parts(without) else None
    resolved = resolve(config, overrides, flags)
    if dry_run:
        console.show_config(resolved)
        return
    need_models()
    sources = [dataset_path(path) for path in data or SHIPPED]
    result = asyncio.run(
        run_fine_tuning(resolved, sources, out, buffer=buffer, annotator=annotator, annotations=annotations)
    )
    console.show_row(f"fine-tuned {out}", result, as_json=as_json)
    console.say(next_steps(out, result["agreement"]))


def next_steps(run: Path, agreement: float | None) -> str:
    """What the agreement means, and the commands that follow."""
    if agreement is None:
        meaning = "no agreement was measured: no task is held out (experience.validation)"
    else:
        meaning = f"agreement {agreement:.0%} (held-out replies predicted word for word) "
        if agreement >= GOOD_AGREEMENT:
            meaning += "is good"
        elif agreement >= LOW_AGREEMENT:
            meaning += "is usable; more updates (--steps) or a better --annotator may raise it"
        else:
            meaning += (
                "is low, and a policy learns what the model gets wrong: use more trajectories, more updates "
                "(--steps), a better --annotator, or select_facts (docs/guides/experience-model.md)"
            )
    return (
        f"{meaning}\nmeasure it: dreamgym experience eval {run}; play in it: dreamgym play --dream {run}; "
        f"train in it: dreamgym train --experience {run}"
    )


async def _annotated(
    config: Config, recorded: list[Trajectory], out: Path, wanted: str | None, annotations: Path | None
) -> tuple[Annotator, str | None, int]:
    """The annotator, the agent's name among the facts, and the number of trajectories without annotation."""
    spec = environment_of_data(config.environment.name, recorded)
    with console.progress() as bar:
        job = bar.add_task("annotating", total=len(recorded), visible=False)

        def on_report(report: AnnotateReport) -> None:
            done = report.already_there + report.annotated + report.failures.total()
            note = f"{report.failures.total()} failed, {report.counts.reply_characters:,} characters written"
            bar.update(job, completed=done, note=note, visible=True)

        async with LanguageModels(config, folder=out) as models:
            annotator = await choose_annotator(
                *(wanted, spec, recorded),
                annotations=annotations,
                default_annotations=out / "annotations",
                models=models,
                on_progress=on_report,
            )
    if wanted is None and annotator.name == PLAIN:
        console.say(
            f"{config.environment.name} has no annotator of its own: annotations come from its texts; "
            "--annotator endpoint:NAME or hf:NAME_OR_PATH uses a language model"
        )
    missing = len(recorded) - len(annotated(recorded, annotator))
    if missing:
        console.say(f"{missing} of {len(recorded)} trajectories have no annotation and are left out")
    return annotator, spec.actor if spec else None, missing


async def run_fine_tuning(
    config: Config,
    sources: list[Path],
    out: Path,
    *,
    buffer: Path | None = None,
    annotator: str | None = None,
    annotations: Path | None = None,
) -> dict[str, Any]:
    """Annotate trajectories and fine-tune an experience model on them, with progress bars."""
    from dreamgym.training.experience import fine_tune
    from dreamgym.training.fine_tuning import Progress

    recorded = [trajectory for source in sources for trajectory in read_trajectories(source)]
    config = with_environment_of_data(config, recorded)
    chosen, actor, missing = await _annotated(config, recorded, out, annotator, annotations)
    store = None if buffer is None else ReplayBuffer.open_configured(buffer, config.replay, read_only=True)
    try:
        with console.progress() as bar:
            console.say(f"preparing examples of {len(recorded):,} trajectories")
            job = bar.add_task("fine-tuning", total=config.experience.steps, note="preparing examples")

            def on_progress(progress: Progress) -> None:
                measured = "" if progress.agreement is None else f", agreement {progress.agreement:.1%}"
                note = f"loss {progress.loss:.3f}{measured}"
                bar.update(job, completed=progress.step, note=note)

            progress = await fine_tune(
                config,
                recorded,
                chosen,
                out,
                data=sources,
                actor=actor,
                retriever=store,
                on_progress=on_progress,
            )
    finally:
        if store is not None:
            store.close()
    return {
        "out": str(out),
        "steps": progress.step,
        "loss": None if progress.loss is None else round(progress.loss, 4),
        "agreement": None if progress.agreement is None else round(progress.agreement, 4),
        "skipped": progress.skipped,
        "annotator": chosen.name,
        "unannotated": missing,
    }
