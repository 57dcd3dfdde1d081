"""Fidelity of a fine-tuned experience model: seeds, ablations and architectures, in one table.

    python benchmarks/fidelity.py [--cells default-0 default-1 …] [--runs FOLDER] [--results FOLDER] [--table]

A cell is one `dreamgym experience train` and one `dreamgym experience eval` on recorded real episodes of
tasks that it was not fine-tuned on. ALFWorld: the shipped trajectories, and 240 episodes in unseen rooms, or
80 of them. `webshop` and `miniwob` cells: recorded first, 48 or 50 held-out episodes, a small model and few
updates. No setting was chosen by a held-out recording. Run the command again to resume; each result is a file
of its own, and the table has the cells that are there (`--table`: only the table). The goal is checked on the
world sheet; `own-word` cells use the model's own verdict, and so do `replies` cells, whose facts are the
replies that other recordings know. `left-out` cells use the same model with prompts without facts. A
default cell takes about twenty minutes of one core, and its measurement five more.
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
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SHORT = ("--steps", "300")
NO_SHEET = ("--without", "sheet")
OWN_WORD = "own-word"
LEFT_OUT = "-left-out"


@dataclass(frozen=True)
class Source:
    """The real episodes of an environment that its cells use."""

    split: str
    """Of the held-out tasks."""
    held_out: int
    settings: tuple[str, ...] = ()
    recorded: int = 0
    """Episodes that are recorded for fine-tuning; 0: the shipped ones."""
    collected: tuple[str, ...] = ()
    """Settings of the recording alone."""
    environment: str = ""
    """By default the name of the source."""
    grader: str = "auto"
    seed: int = 21
    """Of the held-out episodes."""


WEBSHOP = ("--set", "environment.options.view=elements")
KINDS = '["login-user", "enter-text", "click-checkboxes-large", "click-tab-2-hard"]'
MINIWOB = (
    "--set", f"environment.options.kinds={KINDS}",
    "--set", "collect.episodes_per_task=4", "--set", "collect.concurrency=12",
)  # fmt: skip
"""Four episodes of each task: their pages are the facts of the others."""
NO_FACTS = ("--set", "collect.world_sheet=false")
CONCURRENT = ("--set", "collect.concurrency=12")
KNOWN_REPLIES = ("--set", "collect.episodes_per_task=4", "--set", "collect.world_sheet=false")
"""Pages that recordings know are the only facts."""
SOURCES = {
    "alfworld": Source("valid_unseen", 240),
    "webshop-replies": Source("test", 48, WEBSHOP, 400, KNOWN_REPLIES, "webshop", "model", 22),
    "webshop-site": Source("test", 48, (), 120, CONCURRENT, seed=25),
    "webshop": Source("test", 50, WEBSHOP, 400, seed=22),
    "miniwob-replies": Source("test", 48, MINIWOB, 160, NO_FACTS, "miniwob", "model"),
    "miniwob": Source("test", 48, MINIWOB, 512, seed=29),
}
WEBSHOP_TRAIN = ("--steps", "400", "--set", "experience.batch=16", "--set", "replay.k=0")
REPLIES_TRAIN = (
    "--steps", "150", "--set", "experience.batch=16", "--set", "experience.facts=replies",
    "--annotator", "plain",
)  # fmt: skip
MINIWOB_TRAIN = (
    "--steps", "250", "--set", "experience.batch=16", "--set", "experience.text_limit=1000",
    "--set", "experience.facts=replies", "--annotator", "plain",
)  # fmt: skip
MINIWOB_SHEET = (
    "--steps", "2000", "--set", "experience.batch=16", "--set", "experience.vocabulary=2048",
    "--set", "replay.k=0", "--set", "experience.history=0",
)  # fmt: skip
CELLS: dict[str, tuple[str, ...]] = {
    **{f"default-{seed}": ("--seed", str(seed)) for seed in range(3)},
    **{f"{OWN_WORD}-{seed}": ("--seed", str(seed)) for seed in range(3)},
    "short-full": SHORT,
    "short-no-history": (*SHORT, "--without", "history"),
    "short-no-demonstrations": (*SHORT, "--without", "demonstrations"),
    "short-no-reasoning": (*SHORT, "--without", "reasoning"),
    "short-no-sheet": (*SHORT, *NO_SHEET),
    "short-llama": (*SHORT, "--set", "experience.family=llama"),
    "webshop-sheet": WEBSHOP_TRAIN,
    "webshop-replies": REPLIES_TRAIN,
    "webshop-site-sheet": WEBSHOP_TRAIN,
    "miniwob-sheet": MINIWOB_SHEET,
    "miniwob-replies": MINIWOB_TRAIN,
    f"miniwob-replies{LEFT_OUT}": MINIWOB_TRAIN,
}
FEWER = 80
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
    run_name = cell.replace(OWN_WORD, "default").removesuffix(LEFT_OUT)
    name = next((name for name in SOURCES if cell.startswith(name)), "alfworld")
    source = SOURCES[name]
    environment = source.environment or name
    trained, unseen, run = runs / f"{name}-train", runs / f"{name}-unseen", runs / run_name
    collect = ("collect", "--env", environment, "--policy", "mix", *source.settings, *source.collected)
    held_out = ("--episodes", str(source.held_out), "--split", source.split, "--seed", str(source.seed))
    dreamgym(*collect, *held_out, "--out", str(unseen))
    options = (*CELLS[cell], "--out", str(run))
    if source.recorded:
        dreamgym(*collect, "--episodes", str(source.recorded), "--out", str(trained))
        options = ("--env", environment, "--data", str(trained), *source.settings, *options)
    times = runs / f"{run_name}.times.json"
    code = subprocess.run(
        ["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False
    ).stdout.strip()
    if not times.exists():
        spent = dreamgym("experience", "train", *options)
        times.write_text(json.dumps(spent), encoding="utf-8")
    fewer = FEWER if cell.startswith(("short", OWN_WORD)) else source.held_out
    asked = ("--episodes", str(fewer))
    grader = ("--reward", "model" if cell.startswith(OWN_WORD) else source.grader)
    left_out = NO_SHEET if cell.endswith(LEFT_OUT) else ()
    dreamgym("experience", "eval", str(run), "--data", str(unseen), *asked, *grader, *left_out)
    file = "fidelity-no-sheet.json" if left_out else "fidelity.json"
    found = {
        "cell": cell,
        "commit": code or None,
        "train": f"dreamgym experience train {' '.join(options[:-2])}",
        "fine_tuning": json.loads(times.read_text(encoding="utf-8")),
        "curve": json.loads((run / "curve.json").read_text(encoding="utf-8")),
        "fidelity": json.loads((run / file).read_text(encoding="utf-8")),
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
    if value is None or value["value"] is None:
        return "–"
    return f"{value['value']:.1%} [{value['low']:.1%}, {value['high']:.1%}]"


if __name__ == "__main__":
    main()
