"""Experience models that ship with the package: a run directory without its replay buffer, which is made anew
from the trajectories that ship with it."""

from __future__ import annotations

import shutil
import sys
from importlib.resources import files
from pathlib import Path

from dreamgym.data import ingest
from dreamgym.data.datasets import PREFIX as BUILTIN
from dreamgym.data.datasets import dataset_path
from dreamgym.data.trajectories import read_trajectories
from dreamgym.experience.recorded_rules import RULES_FILE
from dreamgym.files import atomic_directory
from dreamgym.replay.buffer import ReplayBuffer
from dreamgym.training.experience_loading import OWN_BUFFER
from dreamgym.training.experience_run import ExperienceRun
from dreamgym.training.fine_tuning import CURVE, MODEL


async def install_experience(source: Path, folder: Path) -> None:
    """Copy a shipped run to `folder` and build its replay buffer; nothing is done if it is there."""
    if folder.exists():
        return
    run = ExperienceRun.read(source)
    with atomic_directory(folder) as fresh:
        shutil.copytree(source, fresh, dirs_exist_ok=True)
        if run.k:
            with ReplayBuffer.open(fresh / OWN_BUFFER, embedder=run.embedder) as buffer:
                for name in run.data_sources(source):
                    for trajectory in read_trajectories(dataset_path(name)):
                        await buffer.add(trajectory)


def ship(run: Path, folder: Path, name: str) -> None:
    """Write a run and its trajectories as they ship: weights in half precision, no checkpoint, no buffer."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    stored, out = ExperienceRun.read(run), folder / "experience" / name
    sources = stored.data_sources(run)
    rows = (each for source in sources for each in read_trajectories(dataset_path(source)))
    ingest.export(rows, folder / f"{name}.jsonl.xz", format="trajectories")
    with atomic_directory(out) as fresh:
        model = AutoModelForCausalLM.from_pretrained(run / MODEL, dtype=torch.float16)
        model.save_pretrained(fresh / MODEL)
        AutoTokenizer.from_pretrained(run / MODEL).save_pretrained(fresh / MODEL)
        for file in (RULES_FILE, CURVE):
            if (run / file).exists():
                shutil.copy(run / file, fresh)
        stored.with_data(out, [f"{BUILTIN}{name}"]).write(fresh)


if __name__ == "__main__":
    ship(Path(sys.argv[1]), Path(str(files("dreamgym"))) / "datasets", sys.argv[2])
