"""Fidelity of a fine-tuned experience model: seeds, ablations and architectures, in one table.

    python benchmarks/fidelity.py [--cells default-0 default-1 …] [--runs FOLDER] [--results FOLDER] [--table]

A cell is one `dreamgym experience train` on the shipped trajectories and one `dreamgym experience eval` on
240 recorded real episodes in unseen rooms, or 80 of them. No setting was chosen by this recording. Run the
command again to resume; each result is a file of its own, and the table has the cells that are there
(`--table`: only the table). The goal is checked on the world sheet; `own-word` cells use the model's own
verdict. A default cell takes about twenty minutes of one core, and its measurement five more.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

SHORT = ("--steps", "300")
OWN_WORD = "own-word"
CELLS: dict[str, tuple[str, ...]] = {
    **{f"default-{seed}": ("--seed", str(seed)) for seed in range(3)},
    **{f"{OWN_WORD}-{seed}": ("--seed", str(seed)) for seed in range(3)},
    "short-full": SHORT,
    "short-no-history": (*SHORT, "--without", "history"),
    "short-no-demonstrations": (*SHORT, "--without", "demonstrations"),
    "short-no-reasoning": (*SHORT, "--without", "reasoning"),
    "short-no-sheet": (*SHORT, "--without", "sheet"),
    "short-llama": (*SHORT, "--set", "experience.family=llama"),
}
EPISODES, FEWER = 240, 80
COLUMNS = (
    ("next state exact", ("steps", "next_state_exact")),
    ("success agrees", ("steps", "success", "agreement")),
    ("success precision", ("steps", "success", "precision")),
    ("end agrees", ("steps", "terminated", "agreement")),
    ("real → dream", ("real_to_dream", "share")),
    ("dream → real", ("dream_to_real", "share")),
    ("– near misses", ("near_misses", "share")),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--cells", nargs="*", choices=list(CELLS), default=list(CELLS))
    parser.add_argument("--runs", type=Path, default=Path("runs/fidelity"))
    parser.add_argument("--results", type=Path, default=Path("results/fidelity"))
    parser.add_argument("--table", action="store_true", help="only print what is there")
    chosen = parser.parse_args()
    chosen.results.mkdir(parents=True, exist_ok=True)
    if not chosen.table:
        for cell in chosen.cells:
            measure(cell, chosen.runs, chosen.results / f"{cell}.json")
    print(table(chosen.results))


def measure(cell: str, runs: Path, result: Path) -> None:
    """Fine-tune and measure one cell, unless its result is there."""
    if result.exists():
        return
    run_name = cell.replace(OWN_WORD, "default")
    unseen, run = runs / "unseen", runs / run_name
    recorded = ("--policy", "mix", "--episodes", str(EPISODES), "--split", "valid_unseen", "--seed", "21")
    dreamgym("collect", "--env", "alfworld", *recorded, "--out", str(unseen))
    options = (*CELLS[cell], "--out", str(run))
    times = runs / f"{run_name}.times.json"
    code = subprocess.run(
        ["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False
    ).stdout.strip()
    if not times.exists():
        spent = dreamgym("experience", "train", *options)
        times.write_text(json.dumps(spent), encoding="utf-8")
    asked = ("--episodes", str(EPISODES if cell.startswith("default") else FEWER))
    grader = ("--reward", "model") if cell.startswith(OWN_WORD) else ()
    dreamgym("experience", "eval", str(run), "--data", str(unseen), *asked, *grader)
    found = {
        "cell": cell,
        "commit": code or None,
        "train": f"dreamgym experience train {' '.join(options[:-2])}",
        "fine_tuning": json.loads(times.read_text(encoding="utf-8")),
        "curve": json.loads((run / "curve.json").read_text(encoding="utf-8")),
        "fidelity": json.loads((run / "fidelity.json").read_text(encoding="utf-8")),
    }
    result.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


def dreamgym(*arguments: str) -> dict[str, Any]:
    """Run a command to its end; its time, and the machine."""
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    subprocess.run([sys.executable, "-m", "dreamgym", *arguments], check=True, stdout=sys.stderr)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return {
        "seconds": round(time.monotonic() - began),
        "cpu_seconds": round(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime),
        "threads": os.environ.get("OMP_NUM_THREADS", "all"),
        "cores": os.cpu_count(),
        "machine": platform.machine(),
    }


def table(results: Path) -> str:
    """Markdown, a row per cell."""
    rows = [["cell", *(name for name, _ in COLUMNS), "replay spread", "CPU-minutes of fine-tuning"]]
    for cell in CELLS:
        path = results / f"{cell}.json"
        if path.exists():
            rows.append(row(json.loads(path.read_text(encoding="utf-8"))))
    lines = ["| " + " | ".join(cells) + " |" for cells in rows]
    return "\n".join([lines[0], "|" + "---|" * len(rows[0]), *lines[1:]])


def row(found: dict[str, Any]) -> list[str]:
    spread = found["fidelity"]["replay_spread"]["mean_deviation"]
    spent = found["fine_tuning"]["cpu_seconds"]
    minutes = "–" if spent is None else f"{spent / 60:.0f}"
    cells = [interval(found["fidelity"], path) for _, path in COLUMNS]
    return [found["cell"], *cells, f"{spread:.3f}", minutes]


def interval(fidelity: dict[str, Any], path: Sequence[str]) -> str:
    value: Any = fidelity
    for key in path:
        value = value.get(key) if value else None
    return "–" if value is None else f"{value['value']:.1%} [{value['low']:.1%}, {value['high']:.1%}]"


if __name__ == "__main__":
    main()
