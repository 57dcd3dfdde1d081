"""What a run is given and what it has spent, in seconds."""

from __future__ import annotations

from pathlib import Path

import pytest

from dreamgym.training.run_dir import WARM_START, RunDir
from dreamgym.training.trainer import train
from tests.training.training_run import FACTORY, record, settings


@pytest.fixture
async def folder(tmp_path: Path) -> Path:
    await record(tmp_path / "offline")
    return tmp_path / "runs"


async def test_training_ends_when_its_seconds_are_used_and_resumes_when_it_is_given_more(
    folder: Path,
) -> None:
    short = ("train.warm_start_steps=2", "train.steps=3")
    first = await train(settings(folder, *short, "train.seconds=0.000001"), real=FACTORY)
    assert first["steps"] == 1, "a step that was begun is brought to its end"
    assert first["ended"] == "1e-06 seconds of training are used"
    more = await train(settings(folder, *short, "train.seconds=1000"), real=FACTORY)
    assert (more["steps"], more["ended"]) == (3, "3 steps are done")


async def test_what_the_warm_start_took_is_spent_once_however_often_the_run_resumes(folder: Path) -> None:
    short = ("train.warm_start_steps=3", "train.monitors=off")
    first = await train(settings(folder, *short, "train.steps=0"), real=FACTORY)
    taken = first["spent"]["warm_start_seconds"]
    assert taken > 0
    again = await train(settings(folder, *short, "train.steps=1"), real=FACTORY)
    assert again["spent"]["warm_start_seconds"] == taken
    kept = RunDir(folder / "run").load(WARM_START)
    assert kept is not None
    assert kept["steps"] == 3
