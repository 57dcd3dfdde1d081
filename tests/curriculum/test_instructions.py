"""Household instructions are read back to their goals, all of them, and nothing else is."""

from __future__ import annotations

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from dreamgym.data.datasets import builtin_dataset
from dreamgym.data.trajectories import read_trajectories
from dreamgym.envs.alfworld import SPEC
from dreamgym.envs.alfworld.generate import FAMILIES, generate_game
from dreamgym.envs.alfworld.instructions import can_succeed_here, task_from_instruction
from dreamgym.envs.alfworld.rooms import affordances
from dreamgym.types import Task


def test_every_instruction_of_the_shipped_trajectories_leads_back_to_its_goal() -> None:
    seen: dict[str, Task] = {each.task.id: each.task for each in read_trajectories(builtin_dataset())}
    assert len(seen) == 1500
    for task in seen.values():
        read = task_from_instruction(task.instruction)
        assert read is not None, task.instruction
        assert read.instruction == task.instruction
        assert read.parameters["goal"] == task.parameters["goal"]
        assert (read.family, read.environment, read.origin) == (task.family, "alfworld", "generated")


@pytest.mark.parametrize("split", ["train", "valid_unseen"])
def test_every_instruction_of_generated_games_leads_back_to_its_goal(split: str) -> None:
    for index in range(60):
        game = generate_game(split, 5, index, 0)
        read = task_from_instruction(game.instruction)
        assert read is not None
        assert read.parameters["goal"] == game.parameters()


@pytest.mark.parametrize(
    ("words", "family", "thing", "place"),
    [
        ("put some spraybottle on toilet", "pick_and_place_simple", "SprayBottle", "Toilet"),
        ("find two pillow and put them in sofa", "pick_two_obj_and_place", "Pillow", "Sofa"),
        ("clean some lettuce and put it in diningtable", FAMILIES[2], "Lettuce", "DiningTable"),
        ("put a hot egg in garbagecan", FAMILIES[3], "Egg", "GarbageCan"),
        ("cool some pan and put it in stoveburner", FAMILIES[4], "Pan", "StoveBurner"),
        ("put a clean soapbar in toilet", FAMILIES[2], "SoapBar", "Toilet"),
    ],
)
def test_the_official_wordings_are_read(words: str, family: str, thing: str, place: str) -> None:
    read = task_from_instruction(words)
    assert read is not None
    assert read.instruction == words
    goal = read.parameters["goal"]
    assert isinstance(goal, dict)
    assert (goal["task_type"], goal["object_target"], goal["parent_target"]) == (family, thing, place)


def test_a_floor_lamp_is_a_lamp_too() -> None:
    read = task_from_instruction("examine the book with the floorlamp")
    assert read is not None
    goal = read.parameters["goal"]
    assert isinstance(goal, dict)
    assert (goal["toggle_target"], goal["parent_target"]) == ("FloorLamp", "")


@pytest.mark.parametrize(
    ("freely", "exactly"),
    [
        ("  Put a Mug in the Coffee Table. ", "put a mug in coffeetable"),
        ("put an apple into fridge", "put a apple in fridge"),
        ("put two mugs on desk!", "put two mug in desk"),
        ("heat the potato and put it on a counter top", "heat some potato and put it in countertop"),
        ("put the cool tomato in the microwave", "put a cool tomato in microwave"),
        ("look at the cd under a desk lamp", "look at cd under the desklamp"),
    ],
)
def test_small_liberties_come_out_in_the_benchmarks_own_words(freely: str, exactly: str) -> None:
    read, same = task_from_instruction(freely), task_from_instruction(exactly)
    assert read is not None
    assert read.instruction == exactly
    assert read == same


def test_two_wordings_of_one_goal_are_one_task() -> None:
    one, other = task_from_instruction("put a mug in desk"), task_from_instruction("put some mug on desk")
    assert one is not None
    assert other is not None
    assert one.id == other.id == "generated/pick_and_place_simple-Mug-None-Desk"


@pytest.mark.parametrize(
    "nonsense",
    [
        "",
        "put a mug",
        "put a dragon in desk",
        "put a mug in dragon",
        "put a pillow in mug",
        "put a hot pillow in bed",
        "put a clean laptop in desk",
        "put a bed in mug",
        "put a slice of apple in fridge",
        "put a plate of apple in fridge",
        "put a applesliced in fridge",
        "look at mug under the fridge",
        "put a mug in desk and burn the house down",
        "put a mug in desk\nput a book in desk",
        "put a mug in desk " * 50,
    ],
)
def test_what_no_household_game_knows_is_nothing(nonsense: str) -> None:
    assert task_from_instruction(nonsense) is None


_WORDS = [
    "put",
    "a",
    "an",
    "some",
    "two",
    "the",
    "clean",
    "hot",
    "cool",
    "mug",
    "mugs",
    "apple",
    "book",
    "in",
]
_WORDS += ["on", "into", "desk", "fridge", "coffee", "table", "desklamp", "look", "at", "under", "examine"]
_WORDS += ["with", "heat", "and", "it", "them", "find", ".", "!", "\n", "\ud800", "İ", "ſ", "{obj}", "(", ""]


@settings(deadline=None)
@given(st.one_of(st.text(max_size=300), st.lists(st.sampled_from(_WORDS), max_size=14).map(" ".join)))
@example("put a mug in desk" + "." * 150)
@example("put " + "a " * 80 + "mug in desk")
def test_any_text_is_read_as_a_sensible_goal_or_as_nothing(text: str) -> None:
    read = task_from_instruction(text)
    if read is not None:
        goal = read.parameters["goal"]
        assert isinstance(goal, dict)
        assert goal["task_type"] in FAMILIES
        assert (
            goal["toggle_target"]
            or goal["object_target"] in affordances().contains[str(goal["parent_target"])]
        )
        assert task_from_instruction(read.instruction) == read


def test_the_environment_offers_both_checks_to_a_curriculum() -> None:
    assert SPEC.task_from_instruction is task_from_instruction
    assert SPEC.can_succeed is can_succeed_here
    recorded = next(iter(read_trajectories(builtin_dataset())))
    assert recorded.sheet is not None
    assert can_succeed_here(recorded.task, recorded.sheet)
