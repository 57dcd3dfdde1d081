"""The goal, read off a sheet, agrees with the real engine's verdict at every step."""

from __future__ import annotations

from itertools import islice

from dreamgym.envs.alfworld.goals import goal_met
from dreamgym.envs.alfworld.teacher import HouseholdTeacher, current_sheet
from dreamgym.replay.builtin import builtin_dataset
from dreamgym.replay.offline import read_trajectories


async def test_success_on_the_sheet_is_success_in_the_engine() -> None:
    successes = 0
    for trajectory in islice(read_trajectories(builtin_dataset()), 0, 1500, 3):
        assert trajectory.sheet is not None
        annotation = await HouseholdTeacher().annotate(trajectory)
        assert not goal_met(trajectory.task, trajectory.sheet)
        sheet = trajectory.sheet
        for note, transition in zip(annotation.notes, trajectory.transitions, strict=True):
            sheet = current_sheet(sheet, (note,))
            assert goal_met(trajectory.task, sheet) == transition.outcome.success, transition.action
            successes += transition.outcome.success
    assert successes > 300
