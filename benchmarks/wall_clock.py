"""Practice for the same seconds in the dream and in the real browser (MiniWoB++), by the same learner from
the same start.

    python benchmarks/wall_clock.py
    python benchmarks/wall_clock.py --table

Recordings and experience model are those of the cell `miniwob-sheet` of `fidelity.py`. The start imitates
recorded successes until it succeeds now and then in the dream. The seconds are those of rollouts and
updates; a step that has begun is finished. Then both arms play the same real instances, with seeds that no
practice has used; the start is measured in the dream. The result also has what the dream needs before it can
be used: the real actions of recordings and explorations, and the seconds of fine-tuning. Run it again to
resume.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import dreamgym as dg
import fidelity
from cells import commit, machine
from claim import ALGORITHMS, DREAMGYM, RL_SETTINGS, Stage, carry_out, settings, spent
from dreamgym.evaluation.statistics import Estimate, paired_difference
from dreamgym.files import write_text
from fidelity import MINIWOB

CELL, FIDELITY = "miniwob-sheet", Path("runs/fidelity")
DATA, EXPERIENCE = FIDELITY / "miniwob-train", FIDELITY / CELL
ARMS = {"dream": ("--mode", "dream"), "reality": ("--mode", "real")}
AGENT = (
    *("agent.history=1", "agent.max_tokens=32", "train.tasks_per_step=4", "train.group_size=8"),
    *("train.concurrency=8", "curriculum.generator=none", "train.monitors=warn"),
    *("train.checkpoint_every=5", "train.update_replay_buffer=false"),
    *("train.warm_start_steps=300", "train.warm_start_batch_size=8", "train.warm_start_successes=80"),
    *("train.warm_start_lr=1e-3", "train.warm_start_muon_lr=0.02", "train.warm_start_success=0.35"),
)


def stages(runs: Path, seconds: float, seed: int) -> dict[str, Stage]:
    common = (
        *("train", "--env", "miniwob", "--data", str(DATA.absolute()), "--seed", str(seed)),
        *(*MINIWOB[:2], *settings(AGENT)),
    )
    dream = ("--experience", str(EXPERIENCE.absolute()))
    start = runs / f"start-{seed}"
    found = {"start": Stage(folder=start, command=(*common, *dream, "--steps", "0", "--out", str(start)))}
    practice = (f"train.init_from={start}", f"train.seconds={seconds:g}", *RL_SETTINGS, *ALGORITHMS["grpo"])
    for arm, mode in ARMS.items():
        out = runs / f"{arm}-{seed}"
        where = (*mode, *(dream if arm == "dream" else ()), "--steps", "100000", "--out", str(out))
        found[arm] = Stage(folder=out, command=(*common, *settings(practice), *where))
    return found


def evaluated(run: Path, episodes: int) -> dict[str, Any]:
    """Real success of the last policy of a run, kept next to it."""
    path = run.with_name(f"{run.name}.evaluation.json")
    if not path.exists():
        asked = ("evaluate", str(run), "--split", "test", "--episodes", str(episodes), "--seed", "7")
        output = subprocess.run(
            [*DREAMGYM, *asked, "--concurrency", "8", "--json"], check=True, stdout=subprocess.PIPE, text=True
        ).stdout
        write_text(path, output)
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found


def wins(evaluation: dict[str, Any]) -> dict[int, bool]:
    return {each["number"]: bool(each["success"]) for each in evaluation["outcomes"]}


def gain(first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
    """The first against the second, on the episodes of both."""
    one, two = wins(first), wins(second)
    return paired_difference([(one[number], two[number]) for number in one if number in two]).to_dict()


def prepared() -> dict[str, Any]:
    """What the dream needs before it can be used."""
    recorded = list(dg.read_trajectories(DATA))
    explored = {
        each.task.id: int(fact[1])
        for each in recorded
        if each.sheet is not None
        for fact in each.sheet.facts
        if fact[0] == "explored"
    }
    return {
        "episodes": len(recorded),
        "recorded_actions": sum(map(len, recorded)),
        "explored_actions": sum(explored.values()),
        "fine_tuning": json.loads(Path(f"{EXPERIENCE}.times.json").read_text(encoding="utf-8")),
    }


def measure(runs: Path, seconds: float, seed: int, episodes: int) -> dict[str, Any]:
    fidelity.measure(CELL, FIDELITY, Path("results/fidelity") / f"{CELL}.json")
    found = stages(runs, seconds, seed)
    load = [os.getloadavg()[0]]
    for stage in found.values():
        carry_out(stage)
        load.append(os.getloadavg()[0])
    with ThreadPoolExecutor() as pool:  # a browser mostly waits
        each = pool.map(lambda arm: evaluated(found[arm].folder, episodes), ARMS)
        played = dict(zip(ARMS, each, strict=True))
    return {
        "seed": seed,
        "seconds": seconds,
        "commands": [f"dreamgym {' '.join(stage.command)}" for stage in found.values()],
        "prepared": prepared(),
        "spent": {arm: spent(found[arm].folder) for arm in ARMS},
        "stages": {name: json.loads(stage.marker.read_text()) for name, stage in found.items()},
        "start_in_dream": json.loads((found["start"].folder / "gate.json").read_text())["policy"]["success"],
        "evaluations": played,
        "difference": gain(played["dream"], played["reality"]),
        "load": [round(one, 1) for one in load],
        "commit": commit(),
        "machine": machine(),
    }


def table(found: dict[str, Any]) -> str:
    lines = ["| practice | real success | steps of the environment | updates |", "|" + "---|" * 4]
    for arm in ARMS:
        used, success = found["spent"][arm], Estimate(**found["evaluations"][arm]["success"]).percent()
        taken = used.get("synthetic_steps", 0) + used.get("real_steps", 0)
        lines.append(f"| {arm} | {success} | {taken:,.0f} | {used['steps'] + 1:.0f} |")
    difference = Estimate(**found["difference"]).percent(signed=True)
    return "\n".join([*lines, f"| dream against reality | {difference} | | |"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--seconds", type=float, default=180.0, help="of practice, for each arm")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--episodes", type=int, default=100, help="of each evaluation")
    parser.add_argument("--runs", type=Path, default=Path("runs/wall-clock"))
    parser.add_argument("--out", type=Path, default=Path("results/browser/wall-clock.json"))
    parser.add_argument("--table", action="store_true", help="only print what is there")
    given = parser.parse_args()
    if not given.table:
        found = measure(given.runs.absolute(), given.seconds, given.seed, given.episodes)
        given.out.parent.mkdir(parents=True, exist_ok=True)
        write_text(given.out, json.dumps(found, indent=1) + "\n")
    print(table(json.loads(given.out.read_text(encoding="utf-8"))), file=sys.stdout)


if __name__ == "__main__":
    main()
