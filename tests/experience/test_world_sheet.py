"""World sheets: changes are applied, and prompts show the facts that an action touches."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dreamgym.experience.world_sheet import (
    fact_lines,
    object_kinds,
    relevant_facts,
    visible_names,
)
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


def test_relevant_facts_are_about_named_objects_the_actor_and_its_place() -> None:
    facts = relevant_facts(KITCHEN, "open fridge 1", actor="agent1")
    assert ("openable", "fridge 1") in facts
    assert ("atlocation", "agent1", "loc 4") in facts
    assert not any("fridge 11" in fact for fact in facts)
    assert ("heatable", "apple 1") not in facts


def test_lines_about_named_objects_come_last() -> None:
    lines = fact_lines(relevant_facts(KITCHEN, "open fridge 1", actor="agent1"), order=["agent1", "fridge 1"])
    assert lines[-2:] == ["fridge 1: openable", "inreceptacle fridge 1: apple 2, apple 1"]


facts = st.tuples(st.sampled_from("abc"), st.sampled_from("xyz"))
sheets = st.lists(facts, unique=True).map(lambda found: WorldSheet(facts=tuple(found)))


@given(sheets)
def test_an_empty_change_keeps_the_sheet(sheet: WorldSheet) -> None:
    assert sheet.after(Change()) == sheet


@pytest.mark.parametrize("odd", ["mug ²", "mug ①", "mug " + "9" * 5_000, "²", ""])
def test_numbers_that_int_does_not_read_are_part_of_the_name(odd: str) -> None:
    sheet = WorldSheet(facts=(("in", odd, "desk 1"), ("in", "mug 2", "desk 1"), ("opened",)))
    assert len(fact_lines(sheet.facts)) == 1
    assert len(visible_names(sheet)) == 1
    assert "mug" in object_kinds(sheet)
    assert len(relevant_facts(sheet, "look at desk 1")) == 2
