"""The quickstart at several seeds, each run as a user runs it: real success before and after, and minutes.

    python benchmarks/quickstart.py                            # seeds 1 to 5, about an hour on 2 cores
    taskset -c 0 python benchmarks/quickstart.py --seeds 1     # on one core

Writes results/quickstart/seeds.json after every seed; finished seeds are read from their directories.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

START, GOAL = 0.6, 0.85
"""The start must be below the first, the result at least the second."""


def run(seed: int, folder: Path, scale: float) -> dict[str, Any]:
    out = folder / f"seed-{seed}"
    words = ["quickstart", "--seed", str(seed), "--out", str(out), "--scale", str(scale), "--json"]
    load, began = os.getloadavg()[0], time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-m", "dreamgym", *words], stdout=subprocess.PIPE, text=True, check=True
    )
    found = json.loads(done.stdout)
    return {
        "seed": seed,
        "before": found["before"]["success"],
        "after": found["after"]["success"],
        "difference": found["comparison"]["difference"],
        "synthetic_steps": found["synthetic_steps"],
        "minutes": round(sum(found["seconds"].values()) / 60, 1),
        "wall_minutes": round((time.perf_counter() - began) / 60, 1),
        "load": [round(load, 1), round(os.getloadavg()[0], 1)],
        "cores": len(os.sched_getaffinity(0)),
        "reached": found["before"]["success"]["value"] < START and found["after"]["success"]["value"] >= GOAL,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3, 4, 5])
    parser.add_argument("--runs", type=Path, default=Path("runs/quickstart-seeds"))
    parser.add_argument("--out", type=Path, default=Path("results/quickstart/seeds.json"))
    parser.add_argument("--scale", type=float, default=1.0)
    given = parser.parse_args()
    commit = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False).stdout
    rows: list[dict[str, Any]] = []
    for seed in given.seeds:
        rows.append(run(seed, given.runs, given.scale))
        given.out.parent.mkdir(parents=True, exist_ok=True)
        table = {"command": " ".join(sys.argv), "commit": commit.strip(), "runs": rows}
        given.out.write_text(json.dumps(table, indent=2) + "\n", encoding="utf-8")
        row = rows[-1]
        print(
            f"seed {seed}: {row['before']['value']:.1%} to {row['after']['value']:.1%} "
            f"in {row['minutes']} min on {row['cores']} cores, load {row['load']}",
            flush=True,
        )


if __name__ == "__main__":
    main()
