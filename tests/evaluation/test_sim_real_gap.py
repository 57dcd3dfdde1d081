"""Success in the dream beside success in reality."""

from __future__ import annotations

from pathlib import Path

from dreamgym.evaluation.sim_real_gap import gap_between, success_in_dream
from dreamgym.training.metrics import MetricsLog


def test_success_in_the_dream_is_that_of_the_first_and_the_last_few_steps(tmp_path: Path) -> None:
    with MetricsLog(tmp_path / "metrics.jsonl") as log:
        log.append({"kind": "warm start", "step": 10})
        for step, success in enumerate([0.1, 0.2, 0.3, 0.5, 0.6, 0.7, 0.8]):
            log.append({"kind": "practice", "step": step, "success": success})
    assert success_in_dream(tmp_path / "metrics.jsonl") == {"first": 0.2, "last": 0.7}


def test_a_run_that_did_not_practise_has_none(tmp_path: Path) -> None:
    with MetricsLog(tmp_path / "metrics.jsonl") as log:
        log.append({"kind": "warm start", "step": 10})
    assert success_in_dream(tmp_path / "metrics.jsonl") == {}


def test_a_dream_far_from_reality_is_told_in_both_directions() -> None:
    assert "too easy" in str(gap_between(0.9, 0.4))
    assert "too hard" in str(gap_between(0.1, 0.5))
    assert gap_between(0.5, 0.26) is None
