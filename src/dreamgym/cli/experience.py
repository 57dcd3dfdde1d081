"""`dreamgym experience`: teach an experience model from recorded trajectories."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Annotated, Any

import typer

from dreamgym.cli import screen
from dreamgym.cli.options import ConfigFile, DryRun, Json, Overrides, resolve
from dreamgym.config import Config
from dreamgym.envs.registry import EnvironmentSpec, find_environment
from dreamgym.errors import ConfigError
from dreamgym.replay.buffer import ReplayBuffer
from dreamgym.replay.builtin import dataset_path
from dreamgym.replay.embed import make_embedder

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
    """
    flags = {"environment.name": env, "experience.model": model, "experience.steps": steps, "seed": seed}
    resolved = resolve(config, overrides, flags)
    if dry_run:
        screen.show_config(resolved)
        return
    spec = find_environment(resolved.environment.name)
    sources = [dataset_path(path) for path in data or ["builtin:alfworld"]]
    result = asyncio.run(_train(resolved, spec, sources, out, buffer))
    screen.show(result, screen.table(f"taught {out}", *result, rows=[list(result.values())]), as_json=as_json)


async def _train(
    config: Config, spec: EnvironmentSpec, sources: list[Path], out: Path, buffer: Path | None
) -> dict[str, Any]:
    from dreamgym.experience.finetune import Progress
    from dreamgym.training.teach import teach

    if spec.teacher is None:
        raise ConfigError(f"environment {spec.name!r} has no teacher of its own to explain trajectories")
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
                spec.teacher(),
                out,
                actor=spec.actor,
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
    }
