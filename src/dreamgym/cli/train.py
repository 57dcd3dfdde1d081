"""`dreamgym train`: warm-start an agent, then let it practise in the dream or in the real environment."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.progress import TaskID

from dreamgym.cli import console
from dreamgym.cli.experience_models import need_models
from dreamgym.cli.options import ConfigFile, DryRun, Json, Overrides, resolve
from dreamgym.config import Config
from dreamgym.errors import ConfigError

if TYPE_CHECKING:
    from dreamgym.training.trainer import Told


@console.command
def train_command(
    out: Annotated[
        Path | None, typer.Option(help="Folder of the run; a run that was begun is gone on with.")
    ] = None,
    env: Annotated[str | None, typer.Option(help="Environment, see `dreamgym envs list`.")] = None,
    experience: Annotated[
        str | None,
        typer.Option(
            metavar="RUN|MODEL",
            help="Who dreams: the run of an experience model, or endpoint:NAME, endpoint:MODEL@URL or "
            "hf:NAME_OR_PATH.",
        ),
    ] = None,
    reward: Annotated[
        str | None, typer.Option(help="Who grades in the dream: model, sheet, or a judge (endpoint:NAME).")
    ] = None,
    data: Annotated[
        list[str] | None,
        typer.Option(help="Offline trajectories: warm start, tasks and world sheets. May be repeated."),
    ] = None,
    mode: Annotated[str | None, typer.Option(help="Train in the dream or in the real environment.")] = None,
    algorithm: Annotated[
        str | None, typer.Option(help="grpo, ppo, or dpo (on recorded pairs alone).")
    ] = None,
    model: Annotated[str | None, typer.Option(help="nano, tiny or small, or hf:NAME_OR_PATH.")] = None,
    steps: Annotated[int | None, typer.Option(help="Passes of the loop.")] = None,
    start_from: Annotated[
        str | None,
        typer.Option(
            "--sim-to-real",
            metavar="RUN[@STEP]",
            help="Carry on from this run's policy in the real environment, with its settings.",
        ),
    ] = None,
    real_steps: Annotated[int | None, typer.Option(help="Stop when so many real steps are used.")] = None,
    seed: Annotated[int | None, typer.Option(help="Fixes every draw of the run.")] = None,
    config: ConfigFile = None,
    overrides: Overrides = None,
    dry_run: DryRun = False,
    as_json: Json = False,
) -> None:
    """Train an agent: imitate recorded successes, then practise by GRPO or PPO. Run it again to go on.

    In the dream no real step is taken, unless train.evaluate_every asks for evaluations on a validation
    split to choose among policies; those are counted apart. Leaves a folder with metrics.jsonl, policies,
    trajectories and summary.json; what each setting means stands in docs/guides/training.md.

    Examples:

      dreamgym train --experience runs/experience --out runs/agent --steps 100

      dreamgym train --config dream.toml --algorithm ppo --seed 1 --out runs/ppo-1

      dreamgym train --env textworld --mode real --data cooking --real-steps 80000 --out runs/real

      dreamgym train --config shop.toml --env shop --data shop --experience endpoint:strong --out runs/shop

      dreamgym train --sim-to-real runs/agent --real-steps 5000 --out runs/sim-to-real
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
    resolved = _settings(start_from, config, overrides, flags)
    from dreamgym.training.trainer import check

    check(resolved)
    if dry_run:
        console.show_config(resolved)
        return
    summary = run_training(resolved)
    console.show(summary, _table(summary), as_json=as_json)


def _settings(
    start_from: str | None, config: Path | None, overrides: list[str] | None, flags: dict[str, Any]
) -> Config:
    """Of a run of its own, or those of the run that is carried on in reality."""
    if start_from is None:
        return resolve(config, overrides, flags)
    from dreamgym.training.run_dir import named_policy
    from dreamgym.training.sim_to_real import sim_to_real

    real_steps, out = flags["train.real_steps"], flags["train.out"]
    if real_steps is None:
        raise ConfigError("--sim-to-real needs --real-steps: how many real steps may be used")
    begun, _ = named_policy(start_from)
    return sim_to_real(
        start_from,
        config,
        [*(overrides or [])],
        real_steps=real_steps,
        out=out or begun.with_name(f"{begun.name}-real-{real_steps}"),
        steps=flags["train.steps"],
        seed=flags["seed"],
    )


def run_training(config: Config) -> dict[str, Any]:
    """Train with a progress bar; Ctrl-C keeps what was reached and says how to go on."""
    from dreamgym.training.trainer import train

    with console.progress() as bar:
        jobs: dict[str, TaskID] = {}

        def tell(told: Told) -> None:
            for warning in told.warnings:
                where = f"step {told.row['step']}: " if "step" in told.row else ""
                console.err.print(f"warning: {where}{warning}", markup=False, soft_wrap=True)
            if told.stage not in jobs:
                jobs[told.stage] = bar.add_task(told.stage, total=told.total, note="")
            note = ", ".join(filter(None, (_note(told.row), told.endpoints)))
            bar.update(jobs[told.stage], completed=told.done, note=note)

        try:
            return asyncio.run(train(config, on_progress=tell))
        except (KeyboardInterrupt, asyncio.CancelledError):
            console.err.print(
                f"stopped; everything up to the last step is in {config.train.out}", markup=False
            )
            raise KeyboardInterrupt from None


def _note(row: dict[str, Any]) -> str:
    kind = row.get("kind")
    if kind == "practice":
        return f"success {row['success']:.0%}, return {row['return_mean']:.2f}"
    if kind == "evaluation":
        value = row["success"]["value"]
        return "" if value is None else f"real success {value:.0%} on {row['split']}"
    return f"loss {row['loss']:.3f}" if "loss" in row else ""


def _table(summary: dict[str, Any]) -> Any:
    rows = [(name.replace("_", " "), f"{amount:,.1f}") for name, amount in summary["spent"].items()]
    for row in summary.get("endpoints", {}).get("rows", ()):
        asked = f"{row['requests']:,} requests, {row['prompt_tokens'] + row['reply_tokens']:,} tokens"
        rows.append(
            (
                f"{row['role']}, {row['endpoint']}",
                f"{asked}, money {row['money'] + row['unconfirmed_money']:.4f}",
            )
        )
    title = f"{summary['out']}: {summary['ended']}; policy of step {summary['policy']}"
    return console.table(title, "spent", "amount", rows=rows)
