"""A run that `train` made itself, as the report reads it: no format stands between the two but the files."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from dreamgym.report.page import page
from dreamgym.report.run_reader import find_runs, read_run
from dreamgym.report.tables import cost_sheet
from dreamgym.training.trainer import train
from tests.training.training_run import CorridorDream, record, settings

torch.set_num_threads(1)


@pytest.mark.slow
async def test_a_run_in_the_dream_is_read_with_what_was_behind_its_steps(tmp_path: Path) -> None:
    await record(tmp_path / "offline")
    config = settings(tmp_path / "here", "train.mode=dream", "train.warm_start_steps=5", "train.steps=3")
    await train(config, experience_model=CorridorDream())
    ((name, folder),) = find_runs([config.train.out])
    run = read_run(name, folder, episodes=50)
    assert run.problems.messages == []
    assert (run.world, len(run.series("success")), len(run.series("reward_entropy"))) == ("dream", 3, 3)
    played = {(each.id, place) for each in run.kept.episodes for place in range(len(each))}
    assert len(run.kept.episodes) == 3 * config.train.group_size
    assert set(run.kept.shown) == played
    costs = {row[1]: row[2:] for row in cost_sheet([run]).rows}
    assert costs["rollout"][0] == "–"  # not a single real step
    assert int(costs["rollout"][1].replace(",", "")) >= len(played)
    assert run.kept.episodes[0].id in page([run])
