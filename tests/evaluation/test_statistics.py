"""Intervals that mean what they say, and the paper's theorem with numbers in it."""

from __future__ import annotations

import math
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dreamgym.evaluation.statistics import (
    NOTHING,
    auroc,
    calibration_error,
    mean_of_steps,
    share_of_episodes,
    share_of_steps,
    theorem1,
    wilson,
)


@given(st.integers(1, 500), st.data())
def test_a_wilson_interval_lies_within_0_and_1_around_the_share(total: int, data: st.DataObject) -> None:
    right = data.draw(st.integers(0, total))
    low, high = wilson(right, total)
    assert 0 <= low <= right / total + 1e-12
    assert right / total - 1e-12 <= high <= 1
    assert low < high


def test_wilson_intervals_hold_the_true_share_as_often_as_they_promise() -> None:
    rng = Random(0)
    held = 0
    for _ in range(2000):
        low, high = wilson(sum(rng.random() < 0.9 for _ in range(80)), 80)
        held += low <= 0.9 <= high
    assert 0.93 < held / 2000 < 0.97


def test_rows_of_one_trajectory_do_not_pass_for_independent_ones() -> None:
    alike = share_of_steps((str(number), number % 4 != 0) for number in range(40) for _ in range(25))
    loose = share_of_steps((str(place % 40), place % 4 != 0) for place in range(1000))
    alone = share_of_episodes(number % 4 != 0 for number in range(40))
    assert alike.value == alone.value == 0.75
    assert alike.count == 1000
    assert alike.low is not None
    assert alone.low is not None
    assert abs(alike.low - alone.low) < 0.01
    assert loose.low == pytest.approx(alike.low)  # the same trajectories are all right or all wrong
    spread = share_of_steps((str(place // 25), place % 4 != 0) for place in range(1000))
    assert spread.low is not None
    assert spread.low > alike.low + 0.05


def test_where_all_steps_agree_each_trajectory_counts_once() -> None:
    assert share_of_steps((str(place // 10), True) for place in range(100)).low == wilson(10, 10)[0]


def test_bootstrapped_means_are_the_same_every_time_and_hold_the_mean() -> None:
    rows = [(str(place // 7), math.sin(place) ** 2) for place in range(700)]
    first, second = mean_of_steps(rows), mean_of_steps(rows)
    assert first == second
    assert first.low is not None
    assert first.high is not None
    assert first.value is not None
    assert first.low < first.value < first.high


def test_nothing_measured_is_said_so() -> None:
    assert share_of_steps([]) == mean_of_steps([]) == share_of_episodes([]) == NOTHING
    assert str(NOTHING) == "–"
    assert auroc([(0.5, True)]) is None
    assert calibration_error([]) is None


def test_calibration_error_is_zero_for_a_model_that_knows_how_often_it_is_right() -> None:
    rows = [(0.8, place % 5 != 0) for place in range(1000)]
    assert calibration_error(rows) == pytest.approx(0.0, abs=1e-9)
    assert calibration_error([(1.0, False)] * 3) == 1.0
    assert auroc(rows) == 0.5


def test_theorem_1_guarantees_everything_without_errors_and_nothing_with_large_ones() -> None:
    perfect = theorem1(0.0, 0.0, gamma=0.99)
    assert (perfect.return_gap, perfect.needed_advantage, perfect.vacuous) == (0.0, 0.0, False)
    assert theorem1(0.0, 0.05, gamma=0.99).vacuous
    assert theorem1(0.0, 0.0, gamma=0.5, trust_region=0.01).needed_advantage == pytest.approx(0.16)
    with pytest.raises(ValueError, match="below 1, got 1"):
        theorem1(0.0, 0.0, gamma=1.0)
