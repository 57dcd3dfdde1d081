"""Fine-tuning an experience model end to end, on a very small one: its run directory predicts afterwards."""

from __future__ import annotations

import contextlib
import json
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from dreamgym.config import Config, ExperienceConfig, ReplayConfig
from dreamgym.data.datasets import builtin_dataset
from dreamgym.data.trajectories import TrajectoryWriter, read_trajectories
from dreamgym.envs.alfworld.annotator import AGENT, HouseholdAnnotator
from dreamgym.errors import ConfigError, DataError, EpisodeFailedError, StoreError
from dreamgym.experience.annotate import PlainAnnotator
from dreamgym.files import lock_directory
from dreamgym.protocols import Annotator
from dreamgym.replay.buffer import ReplayBuffer
from dreamgym.training.experience import fine_tune
from dreamgym.training.experience_loading import OWN_BUFFER, load_experience_model
from dreamgym.training.experience_run import ExperienceRun
from dreamgym.types import Prediction

RULES = HouseholdAnnotator()


def small(*, k: Any = None, **changes: object) -> Config:
    settings = {"model": "nano", "steps": 6, "batch": 4, "vocabulary": 600, "validation": 0.2, **changes}
    return Config(experience=ExperienceConfig.model_validate(settings), replay=ReplayConfig(k=k))


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trajectories")
    with TrajectoryWriter(folder) as writer:
        writer.append(islice(read_trajectories(builtin_dataset()), 12))
    return folder


async def test_a_run_folder_holds_all_that_playing_needs(data: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    progress = await fine_tune(small(), read_trajectories(data), HouseholdAnnotator(), run, actor=AGENT)
    assert progress.step == 6
    assert json.loads((run / "run.json").read_text(encoding="utf-8"))["experience"]["model"] == "nano"
    assert json.loads((run / "curve.json").read_text(encoding="utf-8"))[-1]["step"] == 6
    with ReplayBuffer.open(run / OWN_BUFFER) as buffer:
        experience = load_experience_model(run, retriever=buffer).model
        trajectory = next(iter(read_trajectories(data)))
        assert trajectory.sheet is not None
        first = trajectory.transitions[0]
        with contextlib.suppress(EpisodeFailedError):  # after six updates a typed failure is fine too
            predicted = await experience.predict(
                trajectory.task, trajectory.sheet, [], first.state, first.action
            )
            assert isinstance(predicted, Prediction)


async def test_what_a_run_was_begun_with_is_kept_and_something_else_is_refused(
    data: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"

    async def run_again(annotator: Annotator = RULES, **changes: object) -> None:
        config = small(steps=2, **{"precision": "fp32", **changes})
        await fine_tune(config, read_trajectories(data), annotator, run, data=[data], actor=AGENT)

    await run_again()
    kept = {path.name: path.read_bytes() for path in run.iterdir() if path.is_file()}
    written = json.loads(kept["run.json"])
    assert (written["environment"]["name"], written["annotator"]) == ("alfworld", "alfworld-rules")
    with pytest.raises(ConfigError, match=r"was started with experience\.history=1, not 0"):
        await run_again(history=0)
    with pytest.raises(ConfigError, match="was started with annotator='alfworld-rules', not 'plain'"):
        await run_again(PlainAnnotator())
    assert {path.name: path.read_bytes() for path in run.iterdir() if path.is_file()} == kept
    with pytest.raises(ConfigError, match="was made with precision='fp32'"):  # by the checkpoint itself
        await run_again(precision="bf16")
    assert (run / "run.json").read_bytes() == kept["run.json"]
    await run_again(attempts=5)  # changes no weight
    assert ExperienceRun.read(run).experience.attempts == 5


async def test_two_processes_cannot_fine_tune_in_one_directory(data: Path, tmp_path: Path) -> None:
    with lock_directory(tmp_path), pytest.raises(StoreError, match="another process"):
        await fine_tune(small(), read_trajectories(data), HouseholdAnnotator(), tmp_path, actor=AGENT)
    assert [path.name for path in tmp_path.iterdir()] == [".lock"]


async def test_without_a_buffer_of_yours_demonstrations_come_from_the_very_trajectories(
    data: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    await fine_tune(small(k=2), read_trajectories(data), HouseholdAnnotator(), run, actor=AGENT)
    with ReplayBuffer.open(run / OWN_BUFFER) as buffer:
        stored = buffer.stats().rows
    assert stored == sum(len(trajectory) for trajectory in read_trajectories(data))
    with pytest.raises(ConfigError, match="was fine-tuned with 2 demonstrations"):
        load_experience_model(run)


def test_a_folder_that_is_no_run_says_what_was_expected(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"experience model, found no readable run\.json \(No such file"):
        load_experience_model(tmp_path)
