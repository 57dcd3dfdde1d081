"""`dreamgym train`: warm-start an agent, then train it in the dream or in the real environment."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.progress import TaskID
from rich.table import Table

from dreamgym.cli import console
from dreamgym.cli.experience_models import need_models
from dreamgym.cli.options import ENVIRONMENT, ConfigFile, DryRun, Json, Overrides, resolve
from dreamgym.cli.track import Track, mirrored
from dreamgym.config import Config
from dreamgym.errors import ConfigError

if TYPE_CHECKING:
    from dreamgym.integrations.trackers import Mirror
    from dreamgym.training.progress import OnProgress, Progress


def train_command(
    out: Annotated[
        Path | None, typer.Option(help="Run directory; an interrupted run in it is resumed.")
    ] = None,
    env: Annotated[
        str | None,
        typer.Option(help=f"{ENVIRONMENT}; by default the experience run's own."),
    ] = None,
    experience: Annotated[
        str | None,
        typer.Option(
            metavar="RUN|MODEL",
            help="Experience model: its run directory, or endpoint:NAME, endpoint:MODEL@URL or "
            "hf:NAME_OR_PATH.",
        ),
    ] = None,
    reward: Annotated[
        str | None, typer.Option(help="Reward in the dream: model, sheet, or a judge (endpoint:NAME).")
    ] = None,
    data: Annotated[
        list[str] | None,
        typer.Option(
            help="Offline trajectories for warm start, tasks and world sheets; by default the experience "
            "run's own. May be repeated."
        ),
    ] = None,
    mode: Annotated[str | None, typer.Option(help="Where to train: dream, or real.")] = None,
    algorithm: Annotated[
        str | None, typer.Option(help="grpo, ppo, expert_iteration, or dpo (on recorded pairs only).")
    ] = None,
    model: Annotated[str | None, typer.Option(help="nano, tiny or small, or hf:NAME_OR_PATH.")] = None,
    steps: Annotated[int | None, typer.Option(help="Training steps.")] = None,
    sim_to_real: Annotated[
        str | None,
        typer.Option(
            "--sim-to-real",
            metavar="RUN[@STEP]",
            help="Continue with this run's policy and settings in the real environment.",
        ),
    ] = None,
    real_steps: Annotated[
        int | None,
        typer.Option(help="Budget of real environment steps, never exceeded; in the dream, of its audits."),
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of every random draw.")] = None,
    track: Track = None,
    config: ConfigFile = None,
    overrides: Overrides = None,
    dry_run: DryRun = False,
    as_json: Json = False,
) -> None:
    """Train an agent: SFT on recorded successes, then GRPO or PPO. Run the command again to resume.

    Environment, options and data come from the experience run; a mismatch is refused. The dream is measured
    on held-out recordings first, and refused if it is too wrong (train.gate). In the dream no real step is
    taken, unless train.audit_every asks for audits or train.evaluate_every for evaluations on a validation
    split; both are counted. The run directory holds metrics.jsonl, policies, trajectories and summary.json;
    all settings are in docs/guides/training.md.

    Examples:

    - dreamgym train --experience runs/experience --out runs/agent --steps 100
    - dreamgym train --config dream.toml --algorithm ppo --seed 1 --out runs/ppo-1
    - dreamgym train --env textworld --mode real --data cooking --real-steps 80000 --out runs/real
    - dreamgym train --config shop.toml --env shop --data shop --experience endpoint:strong --out runs/shop
    - dreamgym train --sim-to-real runs/agent --real-steps 5000 --out runs/sim-to-real
    """
    need_models()
    flags = {
        "train.out": out,
        "environment.name": env,
        "train.experience": experience,
        "train.reward": reward,
        "train.mode": mode,
        "learner.algorithm": algorithm,
        "agent.model": model,
        "train.steps": steps,
        "train.real_steps": real_steps,
        "seed": seed,
    }
    if data:
        overrides = [*(overrides or []), f"train.data={json.dumps(data)}"]
    resolved = _settings(sim_to_real, config, overrides, flags)
    from dreamgym.training.settings_check import check, resolve_settings
    from dreamgym.training.trainer import train

    resolved = resolve_settings(resolved)
    check(resolved)
    if dry_run:
        console.show_config(resolved)
        return
    with console.progress() as bar, mirrored(resolved.train.out, track) as mirror:
        summary = asyncio.run(train(resolved, on_progress=on_progress(bar, mirror)))
    console.show(summary, summary_table(summary), as_json=as_json)
    if summary["steps"]:
        run = summary["out"]
        console.say(f"evaluate it in the real environment: dreamgym evaluate {run} --against {run}@0")


def _settings(
    start: str | None, config: Path | None, overrides: list[str] | None, flags: dict[str, Any]
) -> Config:
    """Of an ordinary run, or of a sim-to-real run."""
    if start is None:
        return resolve(config, overrides, flags)
    from dreamgym.training.run_dir import parse_policy_name
    from dreamgym.training.sim_to_real import sim_to_real

    real_steps, out = flags["train.real_steps"], flags["train.out"]
    if real_steps is None:
        raise ConfigError("--sim-to-real needs --real-steps: the budget of real environment steps")
    run, _ = parse_policy_name(start)
    return sim_to_real(
        start,
        config,
        [*(overrides or [])],
        real_steps=real_steps,
        out=out or run.with_name(f"{run.name}-real-{real_steps}"),
        steps=flags["train.steps"],
        seed=flags["seed"],
    )


def on_progress(bar: console.ProgressBar, mirror: Mirror | None = None) -> OnProgress:
    """Shows the stages of a run as jobs of a progress bar, and mirrors its metrics."""
    jobs: dict[str, TaskID] = {}

    def show(progress: Progress) -> None:
        for warning in progress.warnings:
            where = f"step {progress.row['step']}: " if "step" in progress.row else ""
            console.say(f"warning: {where}{warning}")
        if progress.stage not in jobs:
            jobs[progress.stage] = bar.add_task(progress.stage, total=progress.total)
        note = ", ".join(filter(None, (progress.note, progress.endpoints)))
        bar.update(jobs[progress.stage], completed=progress.done, **({"note": note} if note else {}))
        if mirror is not None:
            mirror.sync()

    return show


def summary_table(summary: dict[str, Any]) -> Table:
    rows = [("success in training, last steps", f"{summary['success']:.1%}")] if "success" in summary else []
    rows += [(name.replace("_", " "), f"{amount:,.10g}") for name, amount in summary["spent"].items()]
    for row in summary.get("endpoints", {}).get("rows", ()):
        tokens = row["prompt_tokens"] + row["reply_tokens"]
        money = f"money {row['money'] + row['unconfirmed_money']:.4f}"
        rows.append(
            (
                f"{row['role']}, {row['endpoint']}",
                f"{row['requests']:,} requests, {tokens:,} tokens, {money}",
            )
        )
    title = f"{summary['out']}: {summary['ended']}; policy of step {summary['policy']}"
    return console.table(title, "result", "amount", rows=rows)
