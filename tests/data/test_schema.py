"""A trajectory survives the way to a row and back; anything else is refused with a reason."""

from __future__ import annotations

import contextlib
import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dreamgym.data.trajectories import decode_trajectory, encode_trajectory
from dreamgym.errors import DataError
from dreamgym.types import State, Trajectory
from tests.data.trajectory_examples import episode, json_values, trajectories


@given(trajectories())
def test_a_trajectory_comes_back_from_its_row_unchanged(trajectory: Trajectory) -> None:
    line = encode_trajectory(trajectory)
    assert "\n" not in line
    assert decode_trajectory(line) == trajectory
    assert decode_trajectory(line.encode()) == trajectory
    assert encode_trajectory(decode_trajectory(line)) == line


def test_each_state_is_stored_once_and_defaults_are_left_out() -> None:
    row = json.loads(encode_trajectory(episode("one")))
    assert row["schema_version"] == 1
    assert [sorted(turn) for turn in row["turns"]] == [["action", "outcome"]] * 3
    assert sorted(row["turns"][0]["outcome"]) == ["next_state", "reward"]
    assert "seed" not in row
    assert "sheet" not in row


def edited(path: str, value: Any) -> str:
    """The row of a good episode with one value changed; `...` removes it."""
    row: Any = json.loads(encode_trajectory(episode("one")))
    *parents, last = (int(key) if key.isdigit() else key for key in path.split("."))
    place = row
    for key in parents:
        place = place[key]
    if value is ...:
        del place[last]
    else:
        place[last] = value
    return json.dumps(row)


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("id", 7, "expected id to be a valid string, got 7"),
        ("id", "", "expected id to be"),
        ("task", ..., "expected a key 'task', got none"),
        ("task.goal", "x", "expected no key 'task.goal', got 'x'"),
        ("task.origin", "dreamt", "expected task.origin to be 'seed' or 'generated', got 'dreamt'"),
        ("schema_version", 2, "expected schema_version to be 1, got 2"),
        ("schema_version", ..., "expected a key 'schema_version'"),
        ("turns.0.outcome.reward", "1", "expected turns.0.outcome.reward to be a valid number, got '1'"),
        ("turns.0.outcome.reward", True, "turns.0.outcome.reward"),
        ("turns.0.outcome.reward", None, "turns.0.outcome.reward"),
        ("turns.1.outcome.terminated", 1, "expected turns.1.outcome.terminated to be a valid boolean, got 1"),
        ("turns.1.outcome.terminated", True, "got an end at turn 1 of 3"),
        ("turns.2.outcome.next_state", "here", "turns.2.outcome.next_state"),
        ("start.admissible_actions", [1], "start.admissible_actions.0"),
        ("seed", 1.0, "expected seed to be a valid integer, got 1.0"),
        ("sheet", {"facts": [["in", 1]]}, "sheet.facts.0.1"),
        ("provenance.source", "imagined", "'real' or 'synthetic'"),
    ],
)
def test_a_wrong_value_is_refused_with_its_place_and_what_came(path: str, value: Any, message: str) -> None:
    with pytest.raises(DataError) as refusal:
        decode_trajectory(edited(path, value))
    assert message in str(refusal.value)


HOSTILE: dict[str, str | bytes] = {
    "nothing": b"",
    "a bare NUL": b"\0",
    "a NUL inside text": b'{"id": "a\0b"}',
    "invalid UTF-8": b'{"id": "\xff\xfe"}',
    "half a surrogate in text": '{"id": "\ud800"}',
    "half a surrogate pair": b'{"id": "\\ud800"}',
    "deep lists": b"[" * 100_000,
    "deep objects": b'{"a":' * 100_000 + b"1" + b"}" * 100_000,
    "NaN": encode_trajectory(episode("one")).replace("1.0", "NaN").encode(),
    "infinity": encode_trajectory(episode("one")).replace("1.0", "-Infinity").encode(),
    "a number beyond floats": encode_trajectory(episode("one")).replace("1.0", "1e999").encode(),
    "a hidden infinity": edited("task.parameters", {"x": [0]}).replace("[0]", "[1e999]").encode(),
    "an endless integer": b"1" * 1_000_000,
    "two rows on a line": encode_trajectory(episode("one")).encode() * 2,
    "a list": b"[]",
    "null": b"null",
    "a torn row": encode_trajectory(episode("one"))[:100].encode(),
}


@pytest.mark.parametrize("line", HOSTILE.values(), ids=HOSTILE.keys())
def test_hostile_lines_are_refused_in_few_words(line: str | bytes) -> None:
    with pytest.raises(DataError) as refusal:
        decode_trajectory(line)
    assert "expected" in str(refusal.value)
    assert "got" in str(refusal.value)
    assert len(str(refusal.value)) < 1000


@given(st.binary(max_size=200) | st.text(max_size=200) | json_values.map(json.dumps))
def test_any_other_line_raises_a_data_error_and_nothing_else(line: str | bytes) -> None:
    with pytest.raises(DataError):
        decode_trajectory(line)


@given(st.data())
@settings(max_examples=60)
def test_a_row_with_any_value_replaced_is_decoded_or_refused(data: st.DataObject) -> None:
    row: Any = json.loads(encode_trajectory(episode("one")))
    place = row
    while True:
        keys = list(place) if isinstance(place, dict) else list(range(len(place)))
        key = data.draw(st.sampled_from(keys))
        if not isinstance(place[key], dict | list) or not place[key] or data.draw(st.booleans()):
            break
        place = place[key]
    place[key] = data.draw(json_values)
    with contextlib.suppress(DataError):
        decode_trajectory(json.dumps(row))


def test_a_broken_chain_of_states_is_not_written() -> None:
    good = episode("one")
    stray = replace(good.transitions[1], state=State(text="Elsewhere."))
    broken = replace(good, transitions=(good.transitions[0], stray, good.transitions[2]))
    with pytest.raises(DataError, match=r"expected turn 1 to start in the state before it.*'Elsewhere.'"):
        encode_trajectory(broken)


@pytest.mark.parametrize("reward", [float("nan"), float("inf")])
def test_a_number_that_is_not_finite_is_not_written(reward: float) -> None:
    good = episode("one", turns=1)
    outcome = replace(good.transitions[0].outcome, reward=reward)
    with pytest.raises(DataError, match="finite"):
        encode_trajectory(replace(good, transitions=(replace(good.transitions[0], outcome=outcome),)))


def test_text_that_is_no_unicode_is_not_written() -> None:
    with pytest.raises(DataError, match="Unicode"):
        encode_trajectory(replace(episode("one"), start=State(text="\ud800"), transitions=()))
