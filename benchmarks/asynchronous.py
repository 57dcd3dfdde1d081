"""Practice whose rollouts overlap with updates (`train.max_staleness=1`) against practice step by step, where
every reply of the experience model takes 0.5 to 2 seconds: real success, and seconds of practice.

    python benchmarks/asynchronous.py --quick
    python benchmarks/asynchronous.py                # an hour
    python benchmarks/asynchronous.py --table

Each seed has one start: the quickstart's, in the dream of its shipped experience model, without waiting. Both
arms resume copies of it, with two workers each and `learner.old_logprobs=recorded`, at the same time on the
same cores: other load slows both, and the slower arm has the cores to itself at the end. Then start and arms
play the same real, unseen games. Run it again to resume; an interrupted practice begins again with both arms.

Seeds 61, 62 and 63 confirm: they were named before their first run. Seed 60 was for trying out.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import shutil
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from operator import methodcaller
from pathlib import Path
from typing import Any

from cells import commit, machine
from dreamgym.config import Config
from dreamgym.evaluation.evaluate import Evaluation, compare
from dreamgym.evaluation.runs import evaluate_runs
from dreamgym.evaluation.statistics import Estimate, paired_difference
from dreamgym.files import write_text
from dreamgym.learning.plan import Plan, experience_folder
from dreamgym.learning.shipped import install_experience
from dreamgym.training import trainer
from dreamgym.training.metrics import read_metrics
from dreamgym.training.progress import Progress
from dreamgym.training.run_dir import METRICS
from scaling_dreams import Delayed
from scaling_practice import cpu_seconds

ARMS = {"step by step": 0, "overlapping": 1}
"""Their `train.max_staleness`."""
EXPERIENCE = "builtin:textworld"
STEPS = 30
WORKERS = 2
RECENT = 5
"""Last steps whose mean success in the dream is shown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One seed."""

    seed: int
    folder: Path
    quick: bool

    def stage(self, name: str) -> dict[str, Any]:
        """What this stage found, now or when the command ran before."""
        path = self.folder / f"{name}.json"
        if not path.exists():
            load, work = os.getloadavg()[0], getattr(self, name)
            row = work() | {"load": [round(load, 1), round(os.getloadavg()[0], 1)], "commit": commit()}
            write_text(path, json.dumps(row, indent=1) + "\n")
            shown = {key: value for key, value in row.items() if key != "outcomes"}
            print(f"seed {self.seed}, {name}: {json.dumps(shown)}", flush=True)
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return found

    def config(self, run: str, **train: Any) -> Config:
        """The quickstart's settings, for the run of this name."""
        values: dict[str, Any] = {"seed": self.seed, "learner": {"old_logprobs": "recorded"}}
        if not self.quick:
            values["train"] = {"steps": STEPS}
        plan = Plan.load(
            None, self.folder, values=values, experience=EXPERIENCE, scale=0.05 if self.quick else 1.0
        )
        chosen = plan.config.train.model_copy(update={"out": self.folder / run, **train})
        return plan.config.model_copy(update={"train": chosen})

    def start(self) -> dict[str, Any]:
        async def started() -> dict[str, Any]:
            await install_experience(experience_folder(EXPERIENCE), self.folder / "experience")
            return await trainer.train(self.config("start", steps=0))

        self.folder.mkdir(parents=True, exist_ok=True)
        summary = asyncio.run(started())
        return {"gate": summary["gate"]["verdict"], "spent": summary["spent"]}

    def practice(self) -> dict[str, Any]:
        for arm in ARMS:
            shutil.rmtree(self.folder / arm, ignore_errors=True)
            shutil.copytree(self.folder / "start", self.folder / arm)
        return dict(zip(ARMS, in_processes(self.practise, ARMS), strict=True))

    def practise(self, arm: str) -> dict[str, Any]:
        """One arm, in a process of its own."""
        config = self.config(arm, workers=WORKERS, max_staleness=ARMS[arm])
        clock: list[tuple[float, float]] = []

        def on_progress(progress: Progress) -> None:
            if progress.stage == "train":
                clock.append((time.perf_counter(), cpu_seconds()))
                print(f"seed {self.seed}, {arm}: {progress.done}, {progress.note}", flush=True)

        summary = asyncio.run(
            trainer.train(config, experience_model=Delayed(config), on_progress=on_progress)
        )
        rows = read_metrics(config.train.out / METRICS, "train")
        return {
            "steps": len(rows),
            "ended": summary["ended"],
            "seconds": round(clock[-1][0] - clock[0][0], 1),
            "cpu_seconds": round(clock[-1][1] - clock[0][1], 1),
            "spent": summary["spent"],
            "staleness": statistics.mean(row.get("staleness", 0.0) for row in rows),
            "dream_success": statistics.mean(row["success"] for row in rows[-RECENT:]),
        }

    def test(self) -> dict[str, Any]:
        """Real success of start and arms."""
        runs = {name: f"{self.folder / name}" for name in ("start", *ARMS)}
        episodes = 4 if self.quick else 150
        config = self.config("start")
        found = asyncio.run(
            evaluate_runs(config, list(runs.values()), episodes=episodes, seed=self.seed)
        ).evaluations
        played = dict(zip(runs, found, strict=True))
        start, one, two = found
        return {
            **{name: each.success.to_dict() for name, each in played.items()},
            "gained": {arm: _difference(played[arm], start) for arm in ARMS},
            "difference": _difference(two, one),
            "real_steps": sum(each.real_steps for each in found),
            "outcomes": {name: [each.success for each in one.episodes] for name, one in played.items()},
        }


def in_processes(work: Callable[[Any], Any], items: Iterable[Any]) -> list[Any]:
    """All items at the same time, each in a process of its own."""
    items = list(items)
    with ProcessPoolExecutor(len(items), mp_context=multiprocessing.get_context("spawn")) as pool:
        return list(pool.map(work, items))


def _difference(first: Evaluation, second: Evaluation) -> dict[str, Any]:
    return compare(first, second).difference.to_dict()


def together(cells: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Over all seeds: the paired difference of their episodes, and the ratios of seconds."""
    one, two = ARMS
    pairs = [
        pair
        for cell in cells
        for pair in zip(cell["test"]["outcomes"][two], cell["test"]["outcomes"][one], strict=True)
    ]
    ratios = [cell["practice"][one]["seconds"] / cell["practice"][two]["seconds"] for cell in cells]
    return {
        "difference": paired_difference(pairs).to_dict(),
        "ratios": [round(ratio, 3) for ratio in ratios],
        "ratio": round(statistics.geometric_mean(ratios), 3),
    }


def table(found: dict[str, Any]) -> str:
    lines = [
        f"| seed | start | {' | '.join(ARMS)} | difference | seconds, {' | seconds, '.join(ARMS)} | ratio |",
        "|" + "---|" * 8,
    ]
    for cell, ratio in zip(found["cells"], found["together"]["ratios"], strict=True):
        test, practice = cell["test"], cell["practice"]
        shares = [_shown(test[name]) for name in ("start", *ARMS)]
        seconds = [f"{practice[arm]['seconds']:.0f}" for arm in ARMS]
        columns = [str(cell["seed"]), *shares, _shown(test["difference"], signed=True), *seconds]
        lines.append(f"| {' | '.join(columns)} | {ratio:.2f} |")
    both = found["together"]
    spread = f"**{both['ratio']:.2f}** ({min(both['ratios']):.2f} to {max(both['ratios']):.2f})"
    lines.append(f"| all | | | | {_shown(both['difference'], signed=True)} | | | {spread} |")
    return "\n".join(lines)


def _shown(share: dict[str, Any], *, signed: bool = False) -> str:
    known = {name: share[name] for name in ("value", "low", "high", "count")}
    return Estimate(**known).percent(signed=signed)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[61, 62, 63])
    parser.add_argument("--runs", type=Path, default=Path("runs/asynchronous"))
    parser.add_argument("--out", type=Path, default=Path("results/asynchronous.json"))
    parser.add_argument("--quick", action="store_true", help="minutes; writes no result")
    parser.add_argument("--table", action="store_true", help="only print what is there")
    given = parser.parse_args()
    if given.table:
        print(table(json.loads(given.out.read_text(encoding="utf-8"))))
        return
    cells = []
    for seed in given.seeds:
        folder = (given.runs / f"{'quick-' if given.quick else ''}{seed}").absolute()
        cells.append(Cell(seed=seed, folder=folder, quick=given.quick))
    in_processes(methodcaller("stage", "start"), cells)
    for cell in cells:  # one after the other: clocks run
        cell.stage("practice")
    in_processes(methodcaller("stage", "test"), cells)
    rows = [
        {"seed": cell.seed, **{name: cell.stage(name) for name in ("start", "practice", "test")}}
        for cell in cells
    ]
    found = {"machine": machine(), "steps": STEPS, "cells": rows, "together": together(rows)}
    if not given.quick:
        given.out.parent.mkdir(parents=True, exist_ok=True)
        write_text(given.out, json.dumps(found, indent=1) + "\n")
    print(table(found))


if __name__ == "__main__":
    main()
