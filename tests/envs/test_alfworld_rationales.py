"""Rationales for household agents: they agree with the observations and with the action of the expert."""

from __future__ import annotations

import re
from itertools import islice

import pytest

from dreamgym.data.datasets import builtin_dataset
from dreamgym.data.trajectories import read_trajectories
from dreamgym.envs.alfworld.rationales import think
from dreamgym.training.warm_start import with_thoughts
from dreamgym.types import Trajectory

NAME = re.compile(r"[a-z]+ \d+")


@pytest.fixture(scope="module")
def expert() -> list[Trajectory]:
    played = (e for e in read_trajectories(builtin_dataset()) if e.provenance.policy == "expert")
    return [with_thoughts(each, think) for each in islice(played, 120)]


def test_a_rationale_names_only_what_the_agent_has_seen(expert: list[Trajectory]) -> None:
    for trajectory in expert:
        named = set(NAME.findall(trajectory.start.text))
        for turn in trajectory.transitions:
            named |= set(NAME.findall(turn.state.text))
            assert turn.thought
            assert set(NAME.findall(turn.thought)) <= named


def test_what_is_taken_was_thought_of_nearly_always(expert: list[Trajectory]) -> None:
    """Experts now and then take another of several alike, or put something out of the way."""
    thought_of = [
        NAME.findall(turn.action)[0] in (turn.thought or "")
        for trajectory in expert
        for turn in trajectory.transitions
        if turn.action.startswith("take ")
    ]
    assert len(thought_of) > 100
    assert sum(thought_of) / len(thought_of) > 0.9


def test_a_thing_that_is_clean_is_thought_of_as_to_be_put_down(expert: list[Trajectory]) -> None:
    cleaned = [e for e in expert if e.task.family == "pick_clean_then_place_in_recep" and e.success]
    assert cleaned
    for trajectory in cleaned:
        thoughts = [turn.thought or "" for turn in trajectory.transitions]
        actions = [turn.action for turn in trajectory.transitions]
        clean = next(place for place, action in enumerate(actions) if action.startswith("clean "))
        assert thoughts[clean].startswith("clean ")
        assert all(not thought.startswith("clean ") for thought in thoughts[clean + 1 :])
        assert thoughts[-1].startswith("put ")


def test_recorded_thoughts_are_kept(expert: list[Trajectory]) -> None:
    again = with_thoughts(expert[0], lambda task, past, state: "something else")
    assert [turn.thought for turn in again.transitions] == [turn.thought for turn in expert[0].transitions]
