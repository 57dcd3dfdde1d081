"""The trajectories that ship with the package: ours, valid, and without the unseen rooms."""

from __future__ import annotations

import re
from collections import Counter

import pytest

from dreamgym.data.datasets import builtin_dataset, dataset_path
from dreamgym.data.trajectories import read_trajectories
from dreamgym.envs.alfworld.generate import FAMILIES
from dreamgym.envs.alfworld.rooms import UNSEEN_ROOMS
from dreamgym.errors import ConfigError
from dreamgym.types import Trajectory


@pytest.fixture(scope="module")
def shipped() -> list[Trajectory]:
    return list(read_trajectories(builtin_dataset("alfworld")))


def test_it_holds_fifteen_hundred_episodes_of_three_kinds_of_policy(shipped: list[Trajectory]) -> None:
    assert len({trajectory.id for trajectory in shipped}) == 1500
    policies = Counter(trajectory.provenance.policy for trajectory in shipped)
    assert policies == {"expert": 750, "noisy:0.3": 450, "random": 300}
    assert Counter(trajectory.task.family for trajectory in shipped) == dict.fromkeys(FAMILIES, 250)
    assert {trajectory.provenance.source for trajectory in shipped} == {"real"}


def test_unseen_rooms_appear_nowhere_in_it(shipped: list[Trajectory]) -> None:
    assert not {trajectory.task.parameters["room"] for trajectory in shipped} & set(UNSEEN_ROOMS)
    named = {int(re.findall(r"-(\d+)/", trajectory.task.id)[0]) for trajectory in shipped}
    assert not named & set(UNSEEN_ROOMS)
    assert {trajectory.task.split for trajectory in shipped} == {"train"}


def test_every_state_has_its_admissible_actions_and_every_episode_its_world_sheet(
    shipped: list[Trajectory],
) -> None:
    for trajectory in shipped:
        assert trajectory.sheet is not None
        assert len(trajectory.sheet.facts) > 20
        assert all(t.outcome.next_state.admissible_actions for t in trajectory.transitions)


def test_experts_succeed_and_some_episodes_show_how_the_environment_says_no(
    shipped: list[Trajectory],
) -> None:
    assert all(t.success for t in shipped if t.provenance.policy == "expert")
    refused = sum(
        transition.outcome.next_state.text == "Nothing happens."
        for trajectory in shipped
        for transition in trajectory.transitions
    )
    assert refused > 500


def test_an_unknown_name_is_refused_with_the_known_ones() -> None:
    assert dataset_path("builtin:alfworld") == builtin_dataset()
    with pytest.raises(ConfigError, match="did you mean 'alfworld'"):
        dataset_path("builtin:alfwrld")
