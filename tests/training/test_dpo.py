"""DPO as a run of its own: it learns from recorded pairs, resumes to the bit, and says what it lacks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from dreamgym.data.trajectories import TrajectoryWriter
from dreamgym.envs.scripted_policies import make_policy
from dreamgym.errors import ConfigError
from dreamgym.rollouts import run_episode
from dreamgym.training.run_dir import RunDir
from dreamgym.training.settings_check import check
from dreamgym.training.trainer import train
from dreamgym.types import Trajectory
from tests.training.training_run import FACTORY, record, settings

DPO = ("learner.algorithm=dpo", "train.mode=dream", "train.steps=4", "train.warm_start_steps=10")


async def record_failures(folder: Path) -> None:
    """What chance does in the same corridors, as far as it does not succeed."""
    with TrajectoryWriter(folder) as writer:
        for number, task in enumerate(await FACTORY.tasks("train")):
            played = await run_episode(
                lambda task=task: FACTORY.make(task),  # type: ignore[misc]
                lambda environment: make_policy("random", environment, seed=3),
                trajectory_id=f"chance-{number}",
                task=task,
                seed=3,
            )
            assert isinstance(played, Trajectory)
            if not played.success:
                writer.append([played])


async def test_pairs_of_one_task_are_trained_on_without_rollouts(tmp_path: Path) -> None:
    await record(tmp_path / "offline")
    await record_failures(tmp_path / "offline")
    config = settings(tmp_path / "whole", *DPO)
    summary = await train(config)
    assert summary["steps"] == summary["policy"] == 4
    assert "real_steps" not in summary["spent"]
    rows = [json.loads(line) for line in (config.train.out / "metrics.jsonl").read_text().splitlines()]
    updates = [row for row in rows if row["kind"] == "dpo"]
    assert [row["step"] for row in updates] == list(range(1, 5))
    assert updates[-1]["loss"] < updates[0]["loss"]
    assert updates[-1]["accuracy"] > 0.5

    stopped = settings(tmp_path / "stopped", *DPO)

    def stop(event: object) -> None:
        if getattr(event, "stage", "") == "dpo" and getattr(event, "done", 0) == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        await train(stopped, on_progress=stop)
    await train(stopped)
    mine, theirs = (RunDir(each.train.out).policy_weights(4) for each in (config, stopped))
    assert all(torch.equal(mine[name], theirs[name]) for name in mine)


async def test_successes_alone_make_no_pair(tmp_path: Path) -> None:
    await record(tmp_path / "offline")
    with pytest.raises(ConfigError, match="collect several episodes of each task"):
        await train(settings(tmp_path / "run", *DPO, "train.warm_start_steps=0"))


def test_there_is_nothing_to_choose_among_by_validation(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="evaluate the run afterwards"):
        check(settings(tmp_path / "run", *DPO, "train.evaluate_every=5"))
