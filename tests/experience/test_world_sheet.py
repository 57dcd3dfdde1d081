"""The world sheet in use: changes applied, and only what an action touches told."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from dreamgym.experience.world_sheet import apply, difference, tell, touched
from dreamgym.types import Change, WorldSheet

KITCHEN = WorldSheet(
    facts=(
        ("atlocation", "agent1", "loc 4"),
        ("receptacleatlocation", "fridge 1", "loc 4"),
        ("receptacleatlocation", "fridge 11", "loc 9"),
        ("openable", "fridge 1"),
        ("inreceptacle", "apple 1", "fridge 1"),
        ("inreceptacle", "apple 2", "fridge 1"),
        ("inreceptacle", "egg 1", "fridge 11"),
        ("heatable", "apple 1"),
    )
)


def test_an_action_touches_what_it_names_the_actor_and_the_actors_place() -> None:
    facts = touched(KITCHEN, "open fridge 1", actor="agent1")
    assert ("openable", "fridge 1") in facts
    assert ("atlocation", "agent1", "loc 4") in facts
    assert not any("fridge 11" in fact for fact in facts)
    assert ("heatable", "apple 1") not in facts


def test_lines_that_the_action_names_come_last() -> None:
    lines = tell(touched(KITCHEN, "open fridge 1", actor="agent1"), order=["agent1", "fridge 1"])
    assert lines[-2:] == ["fridge 1: openable", "inreceptacle fridge 1: apple 2, apple 1"]


facts = st.tuples(st.sampled_from("abc"), st.sampled_from("xyz"))
sheets = st.lists(facts, unique=True).map(lambda found: WorldSheet(facts=tuple(found)))


@given(sheets, sheets)
def test_a_difference_leads_from_one_sheet_to_the_other(before: WorldSheet, after: WorldSheet) -> None:
    assert set(apply(before, difference(before, after)).facts) == set(after.facts)


@given(sheets)
def test_changing_nothing_changes_nothing(sheet: WorldSheet) -> None:
    assert apply(sheet, Change()) == sheet
