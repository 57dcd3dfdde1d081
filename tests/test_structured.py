"""What models write into JSON as it is can be read, and nothing else becomes readable by it."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dreamgym.curriculum.task_proposers import parse_variations
from dreamgym.experience.rubric_judge import parse_scores
from dreamgym.structured import json_of

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)


@given(value=JSON, indent=st.sampled_from([None, 1]), ascii_only=st.booleans())
def test_json_that_is_right_means_the_same_afterwards(
    value: object, indent: int | None, ascii_only: bool
) -> None:
    assert json.loads(json_of(json.dumps(value, indent=indent, ensure_ascii=ascii_only))) == value


@given(seen=st.text(st.characters(max_codepoint=127, exclude_characters='"\\')))
def test_strings_may_hold_line_breaks_and_tabs_as_they_are(seen: str) -> None:
    assert json.loads(json_of(f'{{"seen": "{seen}"}}')) == {"seen": seen}


@given(text=st.text('"\\{}[]:,\n\tab', max_size=40))
def test_whatever_it_is_given_it_makes_valid_only_what_bare_characters_made_invalid(text: str) -> None:
    try:
        value = json.loads(json_of(text))
    except ValueError:
        return
    assert json.loads(text, strict=False) == value


def test_those_who_read_replies_read_them_so() -> None:
    assert parse_variations('```json\n{"variations": ["put a cup\nin the sink"]}\n```') is not None
    scores = '{"consistency": 2, "diversity": 1, "informativeness": 2, "hallucination": 0}'
    assert parse_scores(f"```\n{scores}\n```").diversity == 1


@pytest.mark.parametrize("text", ['"\n' * 50_001, '\n\\"' * 50_000, '\n{"a": "' + "\\" * 100_001])
def test_long_nonsense_is_looked_at_in_a_moment(text: str) -> None:
    json_of(text)
