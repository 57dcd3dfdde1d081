"""`dreamgym bench`: a fixed panel of benchmark tasks, played by any policy."""

from __future__ import annotations

import asyncio
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dreamgym.cli import console
from dreamgym.cli.options import ConfigFile, Json, Overrides, resolve

if TYPE_CHECKING:
    from dreamgym.evaluation.bench import Bench
    from dreamgym.evaluation.panels import OpenPanel


class Benchmark(StrEnum):
    ALFWORLD = "alfworld"
    TEXTWORLD = "textworld"
    WEBSHOP = "webshop"


class Wording(StrEnum):
    CURRENT = "current"
    OLDER = "older"
    BOTH = "both"


_POLICY = "RUN[@STEP]|MODEL|SCRIPTED"


def bench_command(
    name: Annotated[Benchmark, typer.Argument(help="Environment and panel.")],
    policy: Annotated[
        str | None,
        typer.Argument(
            metavar=f"[{_POLICY}]",
            help="A training run, a language model (endpoint:NAME, endpoint:MODEL@URL, hf:NAME_OR_PATH) or a "
            "scripted policy (expert, random, noisy:0.3 …). Without one the tasks are listed.",
        ),
    ] = None,
    against: Annotated[
        str | None,
        typer.Option(
            metavar=f"{_POLICY}|FILE.json", help="Another policy, or a result file of this command."
        ),
    ] = None,
    wording: Annotated[
        Wording | None,
        typer.Option(
            help="ALFWorld: current (move X to Y), older (put X in/on Y), or both. Default: current."
        ),
    ] = None,
    split: Annotated[str | None, typer.Option(help="Another split than the panel's.")] = None,
    episodes: Annotated[int | None, typer.Option(help="Only the first tasks of the panel.", min=1)] = None,
    data: Annotated[Path | None, typer.Option(help="Official games or products instead of ours.")] = None,
    temperature: Annotated[
        float | None, typer.Option(help="Of the replies; by default agent.evaluation_temperature.", min=0)
    ] = None,
    concurrency: Annotated[int, typer.Option(help="Concurrent episodes.", min=1)] = 64,
    out: Annotated[
        Path | None, typer.Option(help="Directory of results; by default RUN/bench, or bench.")
    ] = None,
    config: ConfigFile = None,
    overrides: Overrides = None,
    as_json: Json = False,
) -> None:
    """Play a fixed panel of benchmark tasks with a policy: same tasks, horizon and texts on every machine.

    Prints success with 95% Wilson intervals, the mean reward, and the hash of the tasks: only results with
    the same hash can be compared. With --against the difference is paired. Each policy's result is a file
    that --against reads, also from another machine. An interrupted command resumes. A reply without an action
    costs a turn; an episode that could not be played makes the result incomplete (exit code 1).

    Examples:

    - dreamgym bench textworld
    - dreamgym bench textworld runs/agent --against runs/agent@0
    - dreamgym bench alfworld endpoint:MODEL@http://localhost:8000 --wording both --set agent.show_actions=now
    - dreamgym bench webshop hf:Qwen/Qwen3-0.6B --against bench/webshop-test-random-1b2c3d4e.json
    """
    from dreamgym.evaluation.bench import bench
    from dreamgym.evaluation.panels import PANELS

    resolved = resolve(config, overrides, {"environment.options.data": data})
    policies = [each for each in (policy, against) if each is not None]
    wordings = {None: (), Wording.BOTH: PANELS[name].wordings}.get(wording, (str(wording),))
    if policy is None and against is not None:
        raise typer.BadParameter("name a policy before --against")
    if wording is not None and not PANELS[name].wordings:
        raise typer.BadParameter(f"--wording: {name} has only one")
    with console.progress() as bar:
        job = bar.add_task("real episodes", total=None, note="preparing tasks")
        to_play = sum(not each.endswith(".json") for each in policies) * max(1, len(wordings))

        def on_panel(panel: OpenPanel) -> None:
            bar.update(job, total=to_play * len(panel.tasks), note=f"tasks {panel.digest}")

        found = asyncio.run(
            bench(
                name,
                policies,
                resolved,
                wordings=wordings,
                split=split,
                episodes=episodes,
                temperature=temperature,
                concurrency=concurrency,
                out=out,
                on_panel=on_panel,
                on_episode=lambda policy: bar.advance(job, note=policy),
            )
        )
    console.show(found.to_dict(), tables(found), as_json=as_json)
    for each in found.results:
        if each.file is not None:
            console.say(f"{each.label}: {each.file}")
    for note in found.notes:
        console.say(note)
    if not found.complete:
        console.say("incomplete: some episodes could not be played; run the same command again for them")
        raise typer.Exit(1)


def tables(found: Bench) -> list[Any]:
    """The tasks if no policy played; else conditions, results by family, and paired differences."""
    made = [_conditions(found)]
    if not found.results:
        tasks = [(number, task.family, task.id) for number, task in enumerate(found.panels[0].tasks)]
        return [*made, console.table("tasks", "number", "family", "id", rows=tasks)]
    rows: list[tuple[object, ...]] = []
    for each in found.results:
        evaluation = each.evaluation
        steps = sum(e.steps for e in evaluation.episodes) / max(1, len(evaluation.episodes))
        whole = (each.label, "all", len(evaluation.episodes), evaluation.success.percent())
        rows.append((*whole, evaluation.mean_reward, f"{steps:.1f}"))
        for family, share in evaluation.by_family().items():
            rows.append(("", family, share.count, share.percent(), "", ""))
    heads = ("policy", "family", "episodes", "success [95%]", "mean reward [95%]", "steps")
    made.append(console.table("results", *heads, rows=rows))
    differences = [
        (f"{first} − {second}", each.difference.percent(signed=True), each.first_only, each.second_only,
         f"{each.p_value:.4f}")
        for first, second, each in found.comparisons
    ]  # fmt: skip
    if differences:
        names = ("policies", "difference [95%]", "only the first", "only the second", "p (McNemar)")
        made.append(console.table("paired differences in success", *names, rows=differences))
    return made


def _conditions(found: Bench) -> Any:
    rows: list[tuple[str, object]] = []
    for panel in found.panels:
        rows += [
            ("environment", f"{panel.name}/{panel.split}"),
            ("tasks", len(panel.tasks)),
            ("hash of the tasks", panel.digest),
            ("options", ", ".join(f"{name}={value}" for name, value in panel.options.items())),
            ("versions", ", ".join(f"{name} {number}" for name, number in panel.versions.items())),
        ]
    return console.table("panel", "condition", "value", rows=rows)
