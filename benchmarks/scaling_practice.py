"""Practice of the quickstart on workers against one process: a part of `scaling.py`."""

from __future__ import annotations

import shutil
import statistics
import time
from pathlib import Path
from typing import Any

import psutil
import torch

from dreamgym.config import Config
from dreamgym.learning.plan import Plan, experience_folder
from dreamgym.learning.shipped import install_experience
from dreamgym.training import trainer
from dreamgym.training.progress import Progress
from dreamgym.training.run_dir import RunDir

EXPERIENCE = "builtin:textworld"
WORKERS = (0, 2)
STEPS = 8
WARM_START = 60
"""Updates; the quickstart measures when to stop."""


async def practice(home: Path, quick: bool, rounds: int) -> list[dict[str, Any]]:
    """Medians of rounds in alternation, each from the same start; the first row is one process."""
    train = {"steps": STEPS, "warm_start_steps": WARM_START, "warm_start_success": None, "gate": "off"}
    scale = 0.1 if quick else 1.0
    plan = Plan.load(None, home, values={"seed": 1, "train": train}, experience=EXPERIENCE, scale=scale)
    await install_experience(experience_folder(EXPERIENCE), home / "experience")
    await trainer.train(run(plan.config, home / "start", steps=0))
    made: list[list[dict[str, Any]]] = []
    for number in range(rounds):
        made.append([await measured(plan.config, home, number, workers) for workers in WORKERS])
        shutil.rmtree(home / f"round-{number}")
    rows = []
    for place in range(len(WORKERS)):
        same = [each[place] for each in made]
        row = {name: statistics.median(each[name] for each in same) for name in same[0]}
        ratios = [each[0]["seconds_per_step"] / each[place]["seconds_per_step"] for each in made]
        rows.append(row | {"ratio": statistics.median(ratios), "ratios": [round(r, 3) for r in ratios]})
    return rows


def run(config: Config, out: Path, **train: Any) -> Config:
    return config.model_copy(update={"train": config.train.model_copy(update={"out": out, **train})})


async def measured(config: Config, home: Path, number: int, workers: int) -> dict[str, Any]:
    out = home / f"round-{number}" / f"{workers}"
    shutil.copytree(home / "start", out)
    began, clock = time.perf_counter(), list[tuple[float, float]]()

    def on_progress(progress: Progress) -> None:
        if progress.stage == "train":
            clock.append((time.perf_counter(), cpu_seconds()))

    summary = await trainer.train(run(config, out, workers=workers), on_progress=on_progress)
    seconds, used = (last - first for first, last in zip(clock[0], clock[-1], strict=True))
    steps = int(summary["steps"])
    check_equal(out, out.parent / f"{WORKERS[0]}", steps)
    return {
        "workers": workers,
        "seconds_per_step": seconds / steps,
        "rollout_seconds_per_step": summary["spent"]["rollout_seconds"] / steps,
        "cpu_seconds_per_step": used / steps,
        "other_seconds": time.perf_counter() - began - seconds,
    }


def cpu_seconds() -> float:
    """Of this process and those below it."""
    me = psutil.Process()
    return sum(sum(each.cpu_times()[:2]) for each in (me, *me.children(recursive=True)))


def check_equal(one: Path, other: Path, step: int) -> None:
    mine, theirs = RunDir(one).policy_weights(step), RunDir(other).policy_weights(step)
    assert all(torch.equal(mine[name], theirs[name]) for name in theirs), f"{one} differs from {other}"
