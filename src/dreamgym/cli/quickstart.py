"""`dreamgym quickstart`: collect, experience train, train, evaluate and report in a row, with a preset."""

from __future__ import annotations

import asyncio
import json
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from dreamgym.cli import console
from dreamgym.cli.collect import run_collect, summary
from dreamgym.cli.experience_models import need_models
from dreamgym.cli.options import Json
from dreamgym.cli.report import write_report
from dreamgym.data.datasets import dataset_path
from dreamgym.data.trajectories import read_trajectories
from dreamgym.errors import ConfigError, DreamGymError
from dreamgym.files import lock_directory, write_text
from dreamgym.quickstart.plan import (
    MAX_STARTS,
    MIN_SUCCESS,
    MORE_UPDATES,
    USUAL_MINUTES,
    Plan,
    Stages,
)

_STAGES = {
    "collect": "record real episodes",
    "experience": "fine-tune the experience model",
    "fidelity": "measure its fidelity on unseen tasks",
    "train": "train the agent: SFT on recorded successes, then RL in the dream, without real steps",
    "evaluate": "evaluate the agent in the real environment before and after RL, on unseen tasks",
}


def quickstart(
    out: Annotated[Path, typer.Option(help="Directory; an interrupted quickstart in it is resumed.")] = Path(
        "runs/quickstart"
    ),
    env: Annotated[
        str,
        typer.Option(help="Any of `dreamgym envs list`; textworld and alfworld have presets."),
    ] = "textworld",
    minutes: Annotated[
        float,
        typer.Option(help="Scale the preset to this duration on 2 idle cores; slower machines take longer."),
    ] = USUAL_MINUTES,
    seed: Annotated[int, typer.Option(help="Seed of games, weights and every random draw.", min=0)] = 1,
    as_json: Json = False,
) -> None:
    """Run the whole loop: record real games, fine-tune an experience model, train an agent in its dream,
    evaluate it in reality.

    Everything runs on this machine, without network and GPU. Run it again after a stop to resume. It leaves
    summary.json and report.html; docs/guides/quickstart.md describes the stages.

    Examples:

    - dreamgym quickstart
    - dreamgym quickstart --minutes 5 --seed 3 --out runs/second
    - dreamgym quickstart --env alfworld --out runs/household
    """
    need_models()
    plan = Plan.load(env, minutes, seed, out)
    out.mkdir(parents=True, exist_ok=True)
    with lock_directory(out):
        stages = Stages(plan)
        steps: dict[str, Callable[[Plan, Stages], dict[str, Any]]] = {
            "collect": _collect,
            "experience": _experience,
            "fidelity": _fidelity,
            "train": _train,
            "evaluate": _evaluate,
        }
        for number, (stage, run) in enumerate(steps.items(), 1):
            done = ": done before" if stage in stages.done else ""
            console.say(f"{number}/{len(steps)} {_STAGES[stage]}{done}", "bold")
            if not done:
                began = time.perf_counter()
                result = run(plan, stages)
                stages.finish(stage, time.perf_counter() - began, result)
        result = _finish(plan, stages)
    console.show(result, _tables(result), as_json=as_json)
    _next_steps(plan, result)


def _collect(plan: Plan, stages: Stages) -> dict[str, Any]:
    reports = {}
    for config in plan.recordings():
        policy = config.collect.policy
        try:
            report = run_collect(config)
        except ConfigError as error:
            if "expert" not in str(error):
                raise
            console.say(f"{config.environment.name} has no expert: its episodes are random")
            report = run_collect(
                plan.recording("random", config.collect.episodes, plan.splits[0], config.collect.out)
            )
        if not report.episodes and not report.already_there:
            raise DreamGymError(
                f"no episode could be recorded: {dict(report.failures)}; try dreamgym envs check"
            )
        reports[policy] = summary(report, config)
    return {"policies": reports, "real_steps": sum(map(_steps, plan.data()))}


def _experience(plan: Plan, stages: Stages) -> dict[str, Any]:
    from dreamgym.cli.experience import run_fine_tuning

    sources = [dataset_path(name) for name in plan.data()]
    return asyncio.run(run_fine_tuning(plan.config, sources, plan.out / "experience"))


def _fidelity(plan: Plan, stages: Stages) -> dict[str, Any]:
    from dreamgym.cli.experience_eval import run_fidelity

    run, split = plan.out / "experience", plan.splits[1]
    policy = next(iter(plan.extent.record))
    real = plan.recording(policy, plan.extent.fidelity_episodes, split, run / "real")
    run_collect(real)
    found = run_fidelity(str(run), plan.config, [run / "real"], folder=run)
    return {
        "next_state_exact": found["steps"]["next_state_exact"],
        "real_to_dream": found["real_to_dream"],
        "dream_to_real": found["dream_to_real"],
        "real_steps": _steps(str(run / "real")),
    }


def _train(plan: Plan, stages: Stages) -> dict[str, Any]:
    """Repeats the warm start with more updates while too few episodes succeed in the dream."""
    from dreamgym.cli.train import on_progress
    from dreamgym.training.metrics import read_metrics
    from dreamgym.training.run_dir import METRICS, read_config
    from dreamgym.training.trainer import train

    run, starts = plan.config.train.out, []
    updates = plan.config.train.warm_start_steps
    if (run / "config.json").exists():
        updates = read_config(run).train.warm_start_steps

    with console.progress() as bar:
        while True:
            asyncio.run(train(plan.training(updates=updates, steps=1), on_progress=on_progress(bar)))
            success = read_metrics(run / METRICS, "train")[0]["success"]
            starts.append({"updates": updates, "success": success})
            if success >= MIN_SUCCESS or len(starts) == MAX_STARTS:
                break
            more = round(updates * MORE_UPDATES)
            console.say(
                f"{success:.0%} of the episodes in the dream succeed after {updates} SFT updates, too few to "
                f"learn from: again with {more}"
            )
            updates = more
            shutil.rmtree(run)
        result = asyncio.run(train(plan.training(updates=updates), on_progress=on_progress(bar)))
    return {**result, "starts": starts}


def _evaluate(plan: Plan, stages: Stages) -> dict[str, Any]:
    from dreamgym.evaluation.runs import evaluate_runs

    run, episodes = str(plan.config.train.out), plan.extent.evaluation_episodes
    with console.progress() as bar:
        job = bar.add_task("real episodes", total=2 * episodes)
        found = asyncio.run(
            evaluate_runs(
                plan.config,
                [run, f"{run}@0"],
                split=plan.splits[1],
                episodes=episodes,
                seed=plan.config.seed,
                on_episode=lambda policy: bar.advance(job, note=policy),
            )
        )
    return found.to_dict()


def _finish(plan: Plan, stages: Stages) -> dict[str, Any]:
    page = plan.out / "report.html"
    write_report([plan.config.train.out, plan.out / "experience"], page, plan.data(), 100)
    done = stages.done
    after, train = done["evaluate"], done["train"]
    result = {
        "out": str(plan.out),
        "environment": plan.config.environment.model_dump(mode="json"),
        "seed": plan.config.seed,
        "minutes": plan.minutes,
        "split": after["split"],
        "before": {name: after["other"][name] for name in ("policy", "success")},
        "after": {name: after[name] for name in ("policy", "success")},
        "comparison": after["comparison"],
        "notes": after["notes"],
        "fidelity": done["fidelity"]["next_state_exact"],
        "train": {name: train[name] for name in ("steps", "ended", "starts")},
        "synthetic_steps": train["spent"].get("synthetic_steps", 0),
        "real_steps": {
            "collect": done["collect"]["real_steps"],
            "fidelity": done["fidelity"]["real_steps"],
            "train": train["spent"].get("real_steps", 0),
            "evaluate": after["real_steps"] + after["other"]["real_steps"],
        },
        "seconds": {stage: each["seconds"] for stage, each in done.items()},
        "report": str(page),
    }
    write_text(plan.out / "summary.json", json.dumps(result, indent=2) + "\n")
    return result


def _tables(result: dict[str, Any]) -> list[Any]:
    from dreamgym.evaluation.statistics import Estimate

    before, after = (Estimate(**result[name]["success"]) for name in ("before", "after"))
    difference = Estimate(**result["comparison"]["difference"]).percent(signed=True)
    rows = [
        ("after SFT", before.percent(), ""),
        ("after RL in the dream", after.percent(), difference),
    ]
    title = (
        f"success in real games ({result['environment']['name']}, {result['split']}, {after.count} episodes)"
    )
    seconds = [(_STAGES[stage], f"{used / 60:.1f} min") for stage, used in result["seconds"].items()]
    return [
        console.table(title, "policy", "success [95%]", "difference, paired [95%]", rows=rows),
        console.table("duration", "stage", "time", rows=seconds),
    ]


def _next_steps(plan: Plan, result: dict[str, Any]) -> None:
    out, run = plan.out, plan.config.train.out
    for note in result["notes"]:
        console.say(note)
    console.say(f"report: {result['report']} (open it in a browser); numbers: {out / 'summary.json'}", "bold")
    commands = {
        f"dreamgym play --dream {out}/experience": "play in the dream yourself",
        f"dreamgym data show {run}/trajectories": "read an episode of the agent in the dream",
        f"dreamgym experience audit {run}": "replay its episodes in the real environment",
        f"dreamgym train --sim-to-real {run} --real-steps 2000": "continue in the real environment",
    }
    if (run / "tasks.jsonl").exists():
        commands[f"dreamgym tasks list {run} --generated"] = "tasks that the curriculum wrote"
    for command, meaning in commands.items():
        console.say(f"  {command:<75} {meaning}")


def _steps(source: str) -> int:
    return sum(len(each) for each in read_trajectories(Path(source)))
