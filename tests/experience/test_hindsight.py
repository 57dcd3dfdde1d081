"""A sheet in hindsight says nothing that was not true at the start."""

from __future__ import annotations

from collections import Counter
from itertools import islice

from dreamgym.data.datasets import builtin_dataset
from dreamgym.data.trajectories import read_trajectories
from dreamgym.experience.world_sheet import hindsight_sheet
from dreamgym.types import Outcome, Provenance, State, Task, Trajectory, Transition


def reported(start: str, *states: str) -> Trajectory:
    transitions = tuple(
        Transition(
            state=State(text=before),
            action="?",
            outcome=Outcome(next_state=State(text=after), reward=0.0, terminated=False),
        )
        for before, after in zip((start, *states), states, strict=False)
    )
    return Trajectory(
        id="t",
        task=Task(id="t", instruction="", environment="house"),
        start=State(text=start),
        transitions=transitions,
        provenance=Provenance(source="real", policy="p"),
    )


def test_every_fact_it_recovers_was_true_at_the_start_of_the_recorded_episode() -> None:
    true: Counter[str] = Counter()
    recovered: Counter[str] = Counter()
    for trajectory in islice(read_trajectories(builtin_dataset()), 500):
        assert trajectory.sheet is not None
        facts = set(trajectory.sheet.facts)
        found = hindsight_sheet(trajectory).facts
        assert facts.issuperset(found), (trajectory.id, set(found) - facts)
        true.update(fact[0] for fact in facts)
        recovered.update(fact[0] for fact in found)
    recall = recovered["inreceptacle"] / true["inreceptacle"]
    assert 0.4 < recall < 0.6  # an agent opens about half of what there is


def test_what_the_agent_put_somewhere_was_not_there_before() -> None:
    trajectory = reported(
        "You are in the middle of a room.",
        "On the desk 1, you see a mug 2, and a pen 1.",
        "You pick up the mug 2 from the desk 1.",
        "You open the safe 1. The safe 1 is open. In it, you see a watch 1.",
        "You move the mug 2 to the safe 1.",
        "The safe 1 is open. In it, you see a mug 2, and a watch 1.",
        "You pick up the mug 2 from the safe 1.",
        "You move the mug 2 to the desk 1.",
        "On the desk 1, you see a mug 2, and a pen 1.",
        "You close the safe 1.",
        "The safe 1 is closed.",
    )
    assert hindsight_sheet(trajectory).facts == (
        ("inreceptacle", "mug 2", "desk 1"),
        ("inreceptacle", "pen 1", "desk 1"),
        ("inreceptacle", "watch 1", "safe 1"),
        ("openable", "safe 1"),
        ("pickupable", "mug 2"),
    )


def test_what_was_taken_unseen_was_where_it_was_taken_from_and_what_closes_had_been_open() -> None:
    found = hindsight_sheet(
        reported("Dark.", "You pick up the key 1 from the hook 1.", "You close the door 1.")
    )
    assert ("inreceptacle", "key 1", "hook 1") in found.facts
    assert ("opened", "door 1") in found.facts


def test_a_refusal_and_an_empty_place_reveal_nothing() -> None:
    assert (
        hindsight_sheet(reported("Start.", "Nothing happens.", "On the desk 1, you see nothing.")).facts == ()
    )
