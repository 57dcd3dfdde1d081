"""Checks of the goal on a world sheet agree with the simulator; also whether a goal can still be met."""

from __future__ import annotations

from itertools import islice

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dreamgym.data.datasets import builtin_dataset
from dreamgym.data.trajectories import read_trajectories
from dreamgym.envs.alfworld.annotator import HouseholdAnnotator
from dreamgym.envs.alfworld.generate import FAMILIES
from dreamgym.envs.alfworld.goals import can_succeed, goal_met
from dreamgym.envs.alfworld.rooms import affordances
from dreamgym.types import Fact, JsonValue, Task, WorldSheet
from tests.envs.current_sheet import current_sheet


async def test_success_on_the_sheet_is_success_in_the_simulator() -> None:
    successes = 0
    for trajectory in islice(read_trajectories(builtin_dataset()), 0, 800, 4):
        assert trajectory.sheet is not None
        annotation = await HouseholdAnnotator().annotate(trajectory)
        assert not goal_met(trajectory.task, trajectory.sheet)
        sheet = trajectory.sheet
        for note, transition in zip(annotation.notes, trajectory.transitions, strict=True):
            sheet = current_sheet(sheet, (note,))
            assert goal_met(trajectory.task, sheet) == transition.outcome.success, transition.action
            successes += transition.outcome.success
    assert successes > 100


def test_every_recorded_task_can_succeed_and_asks_for_something_that_its_receptacle_takes() -> None:
    for trajectory in read_trajectories(builtin_dataset()):
        assert trajectory.sheet is not None
        assert can_succeed(trajectory.task, trajectory.sheet, contains=affordances().contains)


def asked(family: str, thing: str = "Mug", place: str = "Shelf") -> Task:
    lamp = family == "look_at_obj_in_light"
    goal: dict[str, JsonValue] = {
        "task_type": family,
        "object_target": thing,
        "parent_target": "" if lamp else place,
        "toggle_target": "DeskLamp" if lamp else "",
    }
    return Task(id=family, instruction="", environment="alfworld", parameters={"goal": goal})


FACTS: tuple[Fact, ...] = (
    ("inreceptacle", "mug 1", "desk 1"),
    ("pickupable", "mug 1"),
    ("heatable", "mug 1"),
    ("coolable", "mug 1"),
    ("cleanable", "mug 1"),
    ("inreceptacle", "mug 2", "fridge 1"),
    ("pickupable", "mug 2"),
    ("inreceptacle", "desklamp 1", "desk 1"),
    ("toggleable", "desklamp 1"),
    *(
        ("receptacleatlocation", f"{name} 1", f"loc {number}")
        for number, name in enumerate(("desk", "shelf", "fridge", "microwave", "sinkbasin"))
    ),
)


def sheet_of(*without: Fact, plus: tuple[Fact, ...] = ()) -> WorldSheet:
    return WorldSheet(facts=(*(fact for fact in FACTS if fact not in without), *plus))


@pytest.mark.parametrize("family", FAMILIES)
def test_the_planted_house_allows_every_family_until_something_needed_is_taken_away(family: str) -> None:
    task = asked(family)
    assert can_succeed(task, sheet_of())
    assert not can_succeed(asked(family, thing="Book"), sheet_of())
    if family != "look_at_obj_in_light":
        assert not can_succeed(asked(family, place="Safe"), sheet_of())
        assert not can_succeed(task, sheet_of(), contains={"Shelf": {"Book"}})
        assert can_succeed(task, sheet_of(), contains={"Shelf": {"Book", "Mug"}})


@pytest.mark.parametrize(
    ("family", "missing"),
    [
        ("pick_heat_then_place_in_recep", ("receptacleatlocation", "microwave 1", "loc 3")),
        ("pick_cool_then_place_in_recep", ("receptacleatlocation", "fridge 1", "loc 2")),
        ("pick_clean_then_place_in_recep", ("receptacleatlocation", "sinkbasin 1", "loc 4")),
        ("pick_heat_then_place_in_recep", ("heatable", "mug 1")),
        ("pick_cool_then_place_in_recep", ("coolable", "mug 1")),
        ("pick_clean_then_place_in_recep", ("cleanable", "mug 1")),
        ("look_at_obj_in_light", ("inreceptacle", "desklamp 1", "desk 1")),
        ("look_at_obj_in_light", ("toggleable", "desklamp 1")),
        ("pick_two_obj_and_place", ("inreceptacle", "mug 2", "fridge 1")),
        ("pick_and_place_simple", ("receptacleatlocation", "shelf 1", "loc 1")),
    ],
)
def test_an_impossible_task_is_recognised(family: str, missing: Fact) -> None:
    assert missing in FACTS
    assert not can_succeed(asked(family), sheet_of(missing))


def test_a_task_that_is_done_already_cannot_succeed() -> None:
    assert not can_succeed(
        asked("pick_and_place_simple"), sheet_of(plus=(("inreceptacle", "mug 1", "shelf 1"),))
    )


_WORDS = st.sampled_from(
    ["inreceptacle", "holds", "atlocation", "receptacleatlocation", "mug 1", "shelf 1", ""]
)


@given(facts=st.lists(st.lists(_WORDS, min_size=1, max_size=4).map(tuple), max_size=8))
@pytest.mark.parametrize("family", FAMILIES)
def test_no_imagined_sheet_breaks_the_check(family: str, facts: list[Fact]) -> None:
    """A model that declares ``+ inreceptacle mug 1`` has ended a run by it."""
    sheet = sheet_of(plus=tuple(facts))
    assert goal_met(asked(family), sheet) in (True, False)
    assert can_succeed(asked(family), sheet) in (True, False)
