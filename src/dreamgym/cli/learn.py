"""`dreamgym learn`: the whole loop for any environment; `dreamgym quickstart`: for the default one."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.progress import TaskID
from rich.table import Table

from dreamgym import api
from dreamgym.cli import console
from dreamgym.cli.experience_models import need_models
from dreamgym.cli.options import ENVIRONMENT, ConfigFile, Json, Overrides
from dreamgym.cli.track import Track, mirrored
from dreamgym.config import config_values
from dreamgym.data.datasets import PREFIX as BUILTIN
from dreamgym.errors import ConfigError

DEFAULT_ENVIRONMENT = "textworld"
Scale = Annotated[
    float,
    typer.Option(help="Multiplies episodes, updates and steps; 0.02 shows quickly whether all works."),
]


def learn_command(
    env: Annotated[
        str | None,
        typer.Option(help=f"{ENVIRONMENT}; by default that of the data."),
    ] = None,
    data: Annotated[
        list[str] | None,
        typer.Option(help="Recorded trajectories to use instead of recording; may be repeated."),
    ] = None,
    experience: Annotated[
        str | None,
        typer.Option(
            metavar="RUN",
            help="A fine-tuned experience model: its run directory, or builtin:textworld.",
        ),
    ] = None,
    out: Annotated[Path, typer.Option(help="Directory; an interrupted run in it is resumed.")] = Path(
        "runs/learn"
    ),
    model: Annotated[
        str | None,
        typer.Option(help="Of both models: nano, tiny or small from scratch, or hf:NAME_OR_PATH."),
    ] = None,
    lora: Annotated[
        bool, typer.Option("--lora", help="Train LoRA adapters of hf:NAME_OR_PATH instead of all weights.")
    ] = False,
    real_steps: Annotated[
        int | None,
        typer.Option(help="Real steps for audits during practice; by default it takes none.", min=1),
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of every random draw.", min=0)] = 0,
    scale: Scale = 1.0,
    track: Track = None,
    config: ConfigFile = None,
    overrides: Overrides = None,
    as_json: Json = False,
) -> None:
    """Run the whole loop for an environment: record real episodes, fine-tune an experience model, train an
    agent in its dream, evaluate it in reality before and after.

    Nothing is needed but `start` and `step`; without an expert, episodes are recorded by exploring. With
    --data and no installed environment, the evaluation is skipped. Run the command again after a stop to
    resume. It leaves summary.json and report.html; docs/guides/your-own-environment.md explains the stages.

    Examples:

    - dreamgym learn --env examples/environments/vending.py:Vending --out runs/vending
    - dreamgym learn --env shop.py:Shop --model hf:HuggingFaceTB/SmolLM2-135M-Instruct --lora --out runs/shop
    - dreamgym learn --env shop.py:Shop --real-steps 2000 --out runs/audited
    - dreamgym learn --data traces --out runs/traces
    - dreamgym learn --env alfworld --set train.steps=100 --out runs/household
    """
    values = config_values(config, overrides or [])
    environment = values.pop("environment", {})
    fine_tuning = values.pop("experience", None)
    if experience is not None and fine_tuning:
        raise ConfigError(
            f"expected a fine-tuned experience model (--experience) or settings to fine-tune one, got both: "
            f"{experience!r} and experience.{next(iter(fine_tuning))}"
        )
    _run(
        as_json,
        track,
        environment=env or environment.get("name"),
        out=out,
        data=data or (),
        experience=experience or fine_tuning,
        options=environment.get("options"),
        model=model,
        lora=lora,
        real_steps=real_steps,
        scale=scale,
        **{"seed": seed, **values},
    )


def quickstart(
    out: Annotated[Path, typer.Option(help="Directory; an interrupted quickstart in it is resumed.")] = Path(
        "runs/quickstart"
    ),
    seed: Annotated[int, typer.Option(help="Seed of games, weights and every random draw.", min=0)] = 1,
    scale: Scale = 1.0,
    from_scratch: Annotated[
        bool,
        typer.Option("--from-scratch", help="Also record games and fine-tune the experience model."),
    ] = False,
    track: Track = None,
    as_json: Json = False,
) -> None:
    """Train an agent in the dream of cooking games, and evaluate it in real games: `learn` with the default
    environment.

    The experience model is shipped, with the games that it was fine-tuned on. Everything runs on this
    machine, without network and GPU. Run it again after a stop to resume. It leaves summary.json and
    report.html; docs/guides/quickstart.md describes the stages.

    Examples:

    - dreamgym quickstart
    - dreamgym quickstart --seed 3 --out runs/second
    - dreamgym quickstart --from-scratch --out runs/from-scratch
    """
    experience = None if from_scratch else BUILTIN + DEFAULT_ENVIRONMENT
    chosen = {"environment": DEFAULT_ENVIRONMENT, "out": out, "experience": experience}
    _run(as_json, track, **chosen, seed=seed, scale=scale)


def _run(as_json: bool, track: str | None, **arguments: Any) -> None:
    need_models()
    with console.progress() as bar, mirrored(arguments["out"] / "agent", track) as mirror:
        jobs: dict[str, TaskID] = {}

        def on_progress(job: str, done: int, total: int, note: str) -> None:
            if job not in jobs:
                jobs[job] = bar.add_task(job, total=total)
            bar.update(jobs[job], completed=done, **({"note": note} if note else {}))
            if mirror is not None:
                mirror.sync()

        found = asyncio.run(api.learn(log=console.say, on_progress=on_progress, **arguments))
    console.show(found, tables(found), as_json=as_json)
    for note in found.get("notes", ()):
        console.say(note)
    page, numbers = found["report"], f"{found['out']}/summary.json"
    console.say(f"report: {page} (open it in a browser); numbers: {numbers}", "bold")
    for command, meaning in suggestions(found).items():
        console.say(f"  {command:<75} {meaning}")


def tables(found: Mapping[str, Any]) -> list[Table]:
    from dreamgym.evaluation.statistics import Estimate
    from dreamgym.learning.pipeline import STAGES

    used = [(STAGES[stage], f"{seconds / 60:.1f} min") for stage, seconds in found["seconds"].items()]
    duration = console.table("duration", "stage", "time", rows=used)
    if "skipped" in found:
        console.say(f"no evaluation: {found['skipped']}")
        return [duration]
    before, after = (Estimate(**found[name]["success"]) for name in ("before", "after"))
    difference = Estimate(**found["comparison"]["difference"]).percent(signed=True)
    rows = [("before practice", before.percent(), ""), ("after practice", after.percent(), difference)]
    title = f"real success ({found['environment']['name']}, {found['split']}, {after.count} episodes)"
    return [
        console.table(title, "policy", "success [95%]", "difference, paired [95%]", rows=rows),
        duration,
    ]


def suggestions(found: Mapping[str, Any]) -> dict[str, str]:
    """Commands that follow, with what each does."""
    run, experience = f"{found['out']}/agent", found["experience"]
    commands = {
        f"dreamgym play --dream {experience}": "play in the dream yourself",
        f"dreamgym data show {run}/trajectories": "read an episode of the agent in the dream",
    }
    if "skipped" not in found:
        commands |= {
            f"dreamgym experience eval {experience}": "where the dream is wrong",
            f"dreamgym experience audit {run}": "replay its episodes in the real environment",
            f"dreamgym train --sim-to-real {run} --real-steps 2000": "continue in the real environment",
        }
    if (Path(run) / "tasks.jsonl").exists():
        commands[f"dreamgym tasks list {run} --generated"] = "tasks that the curriculum wrote"
    return commands
