"""`dreamgym experience audit`: replay in reality what a policy did in the dream."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from pathlib import Path
from typing import Annotated, Any

import typer

from dreamgym.cli import console
from dreamgym.cli.options import Json
from dreamgym.data.trajectories import read_trajectories
from dreamgym.envs.registry import open_environment
from dreamgym.errors import ConfigError
from dreamgym.evaluation.audit import Audit, audit
from dreamgym.training.run_dir import TRAJECTORIES, read_config


def audit_command(
    run: Annotated[Path, typer.Argument(help="A training run in the dream (`dreamgym train`).")],
    episodes: Annotated[int, typer.Option(help="Synthetic episodes, newest first.", min=1)] = 64,
    concurrency: Annotated[int, typer.Option(help="Concurrent real episodes.", min=1)] = 8,
    as_json: Json = False,
) -> None:
    """Replay a policy's episodes of the dream in the real environment: how many successes are real?

    Fidelity on recorded actions does not cover what a policy discovers. This replays the saved episodes of a
    run (train.save_groups) and prints the first difference between dream and reality by action. Episodes of
    generated tasks and recombined start states are skipped: they do not exist in reality. The real episodes
    are kept in audit/ of the run, where `dreamgym report` shows them beside the synthetic ones.

    Example:

    - dreamgym experience audit runs/agent --episodes 100
    """
    config = read_config(run)
    if config.train.mode != "dream":
        raise ConfigError(f"{run}: expected a run in the dream, this one was trained in the real environment")
    kept = [each for each in read_trajectories(run / TRAJECTORIES) if each.provenance.source == "synthetic"]
    if not kept:
        raise ConfigError(f"{run}: expected synthetic episodes, none were saved; see train.save_groups")

    async def measure() -> Audit:
        environment = config.environment
        with console.progress() as bar:
            job = bar.add_task("real episodes", total=episodes)
            async with aclosing(open_environment(environment.name, environment.options)) as factory:
                return await audit(
                    factory,
                    kept[-episodes:],
                    in_flight=concurrency,
                    on_count=lambda done, total: bar.update(job, completed=done, total=total),
                )

    found = asyncio.run(measure())
    found.save(run)
    rows: list[tuple[Any, ...]] = [
        ("synthetic episodes replayed", found.episodes),
        ("left out: another first state, or failed", found.left_out),
        ("successes in the dream that are real", str(found.successes)),
        ("every state equals the real one", str(found.faithful)),
        *((f"first difference at `{verb}`", count) for verb, count in found.by_verb.items()),
    ]
    tables = [console.table(f"{run}, in reality", "what", "value [95%]", rows=rows)]
    if found.departures:
        shown = [
            (each.action, each.dreamt, each.real, "yes" if each.success else "no")
            for each in found.departures[:10]
        ]
        title = "first differences"
        tables.append(console.table(title, "action", "dream", "real", "success in the dream", rows=shown))
    console.show(found.to_dict(), tables, as_json=as_json)
