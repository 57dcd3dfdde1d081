"""Our objectives against values that verl's `core_algos` gave for the same inputs (`benchmarks/peers.py`)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import peers

STORED = json.loads(Path(__file__).with_name("verl_values.json").read_text(encoding="utf-8"))
OURS = peers.our_values(STORED["inputs"])
CLOSE = 1e-8
"""verl adds 1e-8 to the length of a trajectory; its values were stored to 9 digits."""


def test_the_inputs_meet_both_sides_of_every_bound() -> None:
    assert 0.2 < STORED["values"]["clip_fraction"] < 0.8
    _, value_gradient = STORED["values"]["value_loss"]
    trained = [
        grad
        for row, mask in zip(value_gradient, STORED["inputs"]["mask"], strict=True)
        for grad, on in zip(row, mask, strict=True)
        if on
    ]
    assert 0 < trained.count(0.0) < len(trained)


@pytest.mark.parametrize("name", STORED["values"])
def test_a_formula_has_the_value_and_the_gradient_that_verl_gives_it(name: str) -> None:
    difference = peers.differences(OURS[name], STORED["values"][name])
    assert max(map(abs, difference)) < CLOSE
    assert peers.differences(OURS[name], OURS[name]), "something was compared"


def test_no_formula_of_ours_is_left_out() -> None:
    assert OURS.keys() == STORED["values"].keys()
