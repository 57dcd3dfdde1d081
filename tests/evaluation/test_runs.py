"""Evaluation by name: warnings and notes that go with a result."""

from __future__ import annotations

from pathlib import Path

from dreamgym.config import Config
from dreamgym.evaluation.evaluate import Episode, Evaluation
from dreamgym.evaluation.runs import _gap, _unfinished
from dreamgym.training.metrics import MetricsLog
from dreamgym.training.run_dir import SUMMARY, RunDir


def evaluated(run: Path, successes: int) -> Evaluation:
    return Evaluation(
        policy=f"{run}@5",
        environment="corridor",
        split="test",
        seed=0,
        episodes=tuple(
            Episode(number=number, task="t", family="f", success=number < successes, steps=1)
            for number in range(8)
        ),
        failures={},
        real_steps=8,
        seconds=1.0,
    )


def test_a_policy_that_succeeds_only_in_the_dream_is_warned_of(tmp_path: Path) -> None:
    with MetricsLog(tmp_path / "metrics.jsonl") as log:
        for step in range(5):
            log.append({"kind": "train", "step": step, "success": 0.875, "spent": {"synthetic_steps": 9}})
    assert "88 points above success in reality" in str(_gap(evaluated(tmp_path, 0)))
    assert _gap(evaluated(tmp_path, 6)) is None


def test_the_step_of_a_run_that_is_under_way_is_named(tmp_path: Path) -> None:
    run = RunDir.open(Config(train=Config().train.model_copy(update={"out": tmp_path})))
    run.save_policy(10, {})
    assert (
        _unfinished(str(tmp_path)) == f"{tmp_path} has not finished training: this is its policy of step 10"
    )
    (tmp_path / SUMMARY).touch()
    assert _unfinished(str(tmp_path)) is None
