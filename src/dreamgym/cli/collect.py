"""`dreamgym collect`: record trajectories from a real environment."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from pathlib import Path
from typing import Annotated, Any

import typer

from dreamgym.cli import console
from dreamgym.cli.options import ENVIRONMENT, ConfigFile, DryRun, Json, Overrides, resolve
from dreamgym.collection import CollectReport, collect
from dreamgym.config import Config
from dreamgym.envs.coverage import FEW
from dreamgym.envs.registry import open_environment


def collect_command(
    env: Annotated[str | None, typer.Option(help=ENVIRONMENT)] = None,
    policy: Annotated[
        str | None,
        typer.Option(
            help="expert | expert:NAME | random | explore | noisy:SHARE | clumsy:SHARE | careless:SHARE | "
            "mix, or a language model: endpoint:NAME | endpoint:MODEL@URL | hf:NAME_OR_PATH"
        ),
    ] = None,
    episodes: Annotated[int | None, typer.Option(help="number of episodes in all")] = None,
    episodes_per_task: Annotated[int | None, typer.Option(help="episodes of one task")] = None,
    split: Annotated[str | None, typer.Option(help="which tasks, see `dreamgym envs describe NAME`")] = None,
    out: Annotated[
        Path | None, typer.Option(help="directory of trajectory shards; resumed if it exists")
    ] = None,
    workers: Annotated[
        int | None, typer.Option(help="processes, or Ray actors, that play them; 0: this process", min=0)
    ] = None,
    seed: Annotated[int | None, typer.Option(help="seed of tasks and policies")] = None,
    data: Annotated[Path | None, typer.Option(help="the environment's own data, e.g. official games")] = None,
    admissible_actions: Annotated[
        bool | None, typer.Option("--admissible/--no-admissible", help="record the admissible actions")
    ] = None,
    world_sheet: Annotated[
        bool | None, typer.Option("--sheet/--no-sheet", help="record hidden facts")
    ] = None,
    config: ConfigFile = None,
    overrides: Overrides = None,
    dry_run: DryRun = False,
    as_json: Json = False,
) -> None:
    """Play real episodes and record them. Run it again to resume; no episode is recorded twice.

    Examples:

    - dreamgym collect --env alfworld --policy mix --episodes 200 --out trajectories
    - dreamgym collect --env alfworld --data ~/alfworld_data --split valid_seen --policy expert --out official
    - dreamgym collect --env textworld --policy noisy:0.3 --episodes 500 --out cooking --json
    - dreamgym collect --env shop/vending.py:Vending --policy explore --episodes 800 --episodes-per-task 8
    """
    resolved = resolve(
        config,
        overrides,
        {
            "environment.name": env,
            "environment.options.data": data,
            "collect.policy": policy,
            "collect.episodes": episodes,
            "collect.episodes_per_task": episodes_per_task,
            "collect.split": split,
            "collect.out": out,
            "collect.workers": workers,
            "collect.admissible_actions": admissible_actions,
            "collect.world_sheet": world_sheet,
            "seed": seed,
        },
    )
    if dry_run:
        console.show_config(resolved)
        return
    report = run_collect(resolved)
    console.show(
        summary(report, resolved), [report_table(report, resolved), coverage_table(report)], as_json=as_json
    )
    if rare := report.coverage.rare():
        console.say(
            f"{', '.join(rare)}: tried less than {FEW} times, so no model learns what they do; "
            "record more episodes (--episodes), or use --policy explore"
        )
    if report.failures:
        raise typer.Exit(1)


def run_collect(config: Config) -> CollectReport:
    """Collect with a progress bar."""

    async def run() -> CollectReport:
        environment = config.environment
        with console.progress() as bar:
            job = bar.add_task("collecting", total=config.collect.episodes, note="preparing games")

            def on_episode(report: CollectReport) -> None:
                rate = report.steps / max(report.seconds, 1e-9)
                done = report.already_there + report.episodes
                bar.update(job, completed=done, note=f"{rate:.0f} states/s")

            async with aclosing(open_environment(environment.name, environment.options)) as factory:
                report = await collect(config, factory, on_episode=on_episode)
            on_episode(report)
            return report

    return asyncio.run(run())


def summary(report: CollectReport, config: Config) -> dict[str, Any]:
    return {
        "out": str(config.collect.out),
        "environment": config.environment.name,
        "split": config.collect.split,
        "already_there": report.already_there,
        "episodes": report.episodes,
        "successes": report.successes,
        "steps": report.steps,
        "seconds": round(report.seconds, 2),
        "states_per_second": round(report.steps / report.seconds, 1) if report.seconds else 0.0,
        "failures": dict(report.failures),
        "by_policy": {
            name: {"episodes": row[0], "successes": row[1], "steps": row[2]}
            for name, row in sorted(report.by_policy.items())
        },
        "coverage": report.coverage.to_dict(),
    }


def report_table(report: CollectReport, config: Config) -> Any:
    rows: list[tuple[object, ...]] = [
        (name, episodes, f"{successes / episodes:.1%}", f"{steps / episodes:.1f}", "")
        for name, (episodes, successes, steps) in sorted(report.by_policy.items())
    ]
    count = max(report.episodes, 1)
    rate = f"{report.steps / report.seconds:.0f}" if report.seconds else "–"
    rows.append(
        ("all", report.episodes, f"{report.successes / count:.1%}", f"{report.steps / count:.1f}", rate)
    )
    title = f"{config.environment.name}/{config.collect.split} → {config.collect.out}"
    if report.already_there:
        title += f" ({report.already_there} more were there before)"
    if report.failures:
        title += f"; failed: {', '.join(f'{n} {kind}' for kind, n in report.failures.items())}"
    return console.table(title, "policy", "episodes", "success", "steps per episode", "states/s", rows=rows)


def coverage_table(report: CollectReport) -> Any:
    """Each kind of action: how often it was tried, and how often nothing came of it."""
    rows = [
        (row.kind, row.tried, row.different, f"{row.in_vain / max(row.tried, 1):.0%}")
        for row in report.coverage.kinds()
    ]
    share = report.coverage.admissible_tried()
    title = "actions" if share is None else f"actions: {share:.0%} of the admissible ones were tried"
    return console.table(title, "kind", "tried", "different", "refused or no effect", rows=rows)
