"""Reward entropy of groups and of clusters."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dreamgym.curriculum.entropy import cluster, cluster_entropy, group_entropy, reward_entropy
from dreamgym.replay.embedders import LexicalEmbedder
from tests.curriculum.pool_examples import group, seed_task


@settings(deadline=None)
@given(st.integers(0, 20), st.integers(0, 20))
def test_for_returns_of_0_and_1_it_is_p_times_1_minus_p(wins: int, losses: int) -> None:
    number = wins + losses
    share = wins / number if number else 0.0
    assert math.isclose(reward_entropy([1.0] * wins + [0.0] * losses), share * (1 - share), abs_tol=1e-12)


def test_a_unanimous_group_and_a_single_rollout_have_none() -> None:
    assert reward_entropy([0.7, 0.7, 0.7]) == pytest.approx(0.0, abs=1e-15)
    assert reward_entropy([1.0]) == reward_entropy([]) == 0.0


def test_two_groups_of_one_task_are_one_sample() -> None:
    task = seed_task(1)
    found = group_entropy([group(task, [1.0, 1.0]), group(seed_task(2), [0.0, 0.0]), group(task, [0.0, 0.0])])
    assert found == {"seed-1": 0.25, "seed-2": 0.0}


async def test_tasks_that_read_alike_share_the_entropy_of_their_single_rollouts() -> None:
    tasks = [
        seed_task(1, "put a mug in desk"),
        seed_task(2, "look at book under the desklamp"),
        seed_task(3, "put a mug in shelf"),
        seed_task(4, "look at pen under the desklamp"),
    ]
    played = [group(task, [won]) for task, won in zip(tasks, [1.0, 0.0, 0.0, 0.0], strict=True)]
    found = await cluster_entropy(played, LexicalEmbedder(), clusters=2)
    assert found == {"seed-1": 0.25, "seed-2": 0.0, "seed-3": 0.25, "seed-4": 0.0}


def test_there_are_no_more_clusters_than_different_keys() -> None:
    keys = np.array([[1, 0], [0, 1], [1, 0], [0, 1]], np.float32)
    assert cluster(keys, 5) == [0, 1, 0, 1]
    assert cluster(keys, 1) == [0, 0, 0, 0]
    assert cluster(np.zeros((0, 2), np.float32), 3) == []
    with pytest.raises(ValueError, match="at least one cluster"):
        cluster(keys, 0)


@settings(deadline=None)
@given(st.integers(1, 30), st.integers(1, 6), st.integers(0, 1000))
def test_every_key_is_with_the_centre_that_is_nearest(number: int, count: int, seed: int) -> None:
    keys = np.random.default_rng(seed).normal(size=(number, 3)).astype(np.float32)
    labels = np.array(cluster(keys, count))
    centres = np.stack(
        [keys[labels == each].astype(np.float64).mean(axis=0) for each in range(labels.max() + 1)]
    )
    distances = ((keys[:, None, :] - centres[None]) ** 2).sum(axis=2)
    assert (distances[np.arange(number), labels] <= distances.min(axis=1) + 1e-9).all()
