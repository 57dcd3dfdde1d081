"""Success in the dream compared with success in the real environment."""

from __future__ import annotations

from pathlib import Path

from dreamgym.evaluation.sim_real_gap import dream_success, gap_warning
from dreamgym.training.metrics import MetricsLog


def test_success_in_the_dream_is_that_of_the_first_and_the_last_few_steps(tmp_path: Path) -> None:
    with MetricsLog(tmp_path / "metrics.jsonl") as log:
        log.append({"kind": "warm start", "step": 10})
        for step, success in enumerate([0.1, 0.2, 0.3, 0.5, 0.6, 0.7, 0.8]):
            log.append({"kind": "train", "step": step, "success": success, "spent": {"synthetic_steps": 1}})
    assert dream_success(tmp_path / "metrics.jsonl") == {"first": 0.2, "last": 0.7}


def test_a_run_that_did_not_practise_has_none(tmp_path: Path) -> None:
    with MetricsLog(tmp_path / "metrics.jsonl") as log:
        log.append({"kind": "warm start", "step": 10})
    assert dream_success(tmp_path / "metrics.jsonl") == {}


def test_a_dream_far_from_reality_is_reported_in_both_directions() -> None:
    assert "50 points above" in str(gap_warning(0.5))
    assert "40 points below" in str(gap_warning(-0.4))
    assert gap_warning(0.24) is None
