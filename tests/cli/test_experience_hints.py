"""What `dreamgym experience train` says at its end."""

from __future__ import annotations

from pathlib import Path

import pytest

from dreamgym.cli.experience import next_steps


@pytest.mark.parametrize(
    ("agreement", "meaning"),
    [
        (0.97, "agreement 97% (held-out replies predicted word for word) is good"),
        (0.8, "is usable"),
        (0.633, "is low, and a policy learns what the model gets wrong"),
        (None, "no agreement was measured"),
    ],
)
def test_the_result_says_whether_the_agreement_is_good_and_what_to_do_next(
    agreement: float | None, meaning: str
) -> None:
    shown = next_steps(Path("runs/experience"), agreement)
    assert meaning in shown
    for command in ("experience eval runs/experience", "play --dream", "train --experience runs/experience"):
        assert f"dreamgym {command}" in shown
