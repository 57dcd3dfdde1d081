"""Chat messages become trajectories by the documented rules, and an export is read back."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dreamgym.data.ingest import Defaults, atif, messages, read_foreign
from dreamgym.data.ingest.dialogue import EMPTY, END, NO_REPLY
from dreamgym.data.ingest.json_reader import Record
from dreamgym.data.schema import decode_trajectory, dump_json, encode_trajectory, parse_json
from dreamgym.errors import ConfigError, DataError
from dreamgym.types import Trajectory
from tests.data.trajectory_examples import episode, json_values, trajectories

SHOP = Defaults(environment="shop", split="valid")


def user(text: Any) -> dict[str, Any]:
    return {"role": "user", "content": text}


def assistant(text: Any = None, *calls: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **({"tool_calls": list(calls)} if calls else {}), **more}


def call(identity: str | None, name: str, arguments: Any) -> dict[str, Any]:
    return {"id": identity, "type": "function", "function": {"name": name, "arguments": arguments}}


def tool(identity: str | None, text: Any) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": identity, "content": text}


def ingested(*said: dict[str, Any], **more: Any) -> Trajectory:
    record = Record(where="chats.jsonl:1", value=json.loads(json.dumps({"messages": list(said), **more})))
    trajectory = messages.from_record(record, SHOP)
    assert decode_trajectory(encode_trajectory(trajectory)) == trajectory
    return trajectory


def turns(trajectory: Trajectory) -> list[tuple[str, str | None, str]]:
    return [(turn.action, turn.thought, turn.outcome.next_state.text) for turn in trajectory.transitions]


def test_a_conversation_with_tools_becomes_task_states_and_actions() -> None:
    trajectory = ingested(
        {"role": "system", "content": "You run a shop."},
        user("Find me a red mug."),
        assistant("Let me look.", call("c1", "search", '{"query": "red mug", "limit": 3}')),
        tool("c1", "1. Mug, red"),
        assistant("Here it is.", reasoning_content="Only one match."),
        reward=1.0,
        success=True,
        id="chat-7",
        model="tiny-1",
    )
    assert trajectory.id == "chat-7"
    assert trajectory.task.instruction == "Find me a red mug."
    assert trajectory.task.environment == "shop"
    assert trajectory.task.split == "valid"
    assert trajectory.task.parameters == {"system_prompt": "You run a shop."}
    assert trajectory.start.text == "Find me a red mug."
    assert turns(trajectory) == [
        ('search({"limit": 3, "query": "red mug"})', "Let me look.", "1. Mug, red"),
        ("Here it is.", "Only one match.", END),
    ]
    last = trajectory.transitions[-1].outcome
    assert (last.reward, last.terminated, last.truncated, last.success) == (1.0, True, False, True)
    assert trajectory.transitions[0].outcome.reward == 0.0
    assert trajectory.provenance.policy == "tiny-1"
    assert trajectory.provenance.source == "real"


def test_what_is_said_between_task_and_first_action_is_the_start_state() -> None:
    trajectory = ingested(
        user("Open the chest."), user("You are in a hall."), assistant("open chest"), user("Open.")
    )
    assert trajectory.task.instruction == "Open the chest."
    assert trajectory.start.text == "You are in a hall."
    assert turns(trajectory) == [("open chest", None, "Open.")]


def test_a_given_task_makes_the_first_user_message_the_start_state() -> None:
    trajectory = ingested(
        user("You are in a hall."),
        assistant("look"),
        task={"id": "t1", "instruction": "Find it.", "family": "find"},
    )
    assert trajectory.task.instruction == "Find it."
    assert (trajectory.task.id, trajectory.task.family) == ("t1", "find")
    assert trajectory.start.text == "You are in a hall."
    assert ingested(user("Hall."), assistant("look"), task="Find it.").task.instruction == "Find it."


def test_several_calls_in_one_message_are_several_turns_matched_by_id() -> None:
    trajectory = ingested(
        user("Compare."),
        assistant("Both.", call("a", "price", '{"of": 1}'), call("b", "price", '{"of": 2}')),
        tool("b", "20"),
        tool("a", "10"),
        assistant("1 is cheaper"),
    )
    assert turns(trajectory) == [
        ('price({"of": 1})', "Both.", "10"),
        ('price({"of": 2})', None, "20"),
        ("1 is cheaper", None, END),
    ]


def test_replies_without_an_id_answer_the_calls_in_order() -> None:
    trajectory = ingested(
        user("Go."),
        assistant(None, call(None, "f", "{}"), call("", "g", "{}")),
        tool(None, "F"),
        tool(None, "G"),
    )
    assert [turn[2] for turn in turns(trajectory)] == ["F", "G"]


def test_a_call_without_a_reply_is_marked() -> None:
    trajectory = ingested(
        user("Go."),
        assistant(None, call("a", "f", "{}"), call("b", "g", "{}")),
        tool("b", "G"),
        assistant("done"),
    )
    assert [turn[2] for turn in turns(trajectory)] == [NO_REPLY, "G", END]


def test_text_without_a_reply_joins_the_next_thought() -> None:
    trajectory = ingested(
        user("Go."),
        assistant("First I look.", reasoning_content="hm"),
        assistant("Then I go.", call("a", "go", "{}")),
        tool("a", "Gone."),
        assistant("All done."),
    )
    assert turns(trajectory) == [
        ("go({})", "hm\n\nFirst I look.\n\nThen I go.", "Gone."),
        ("All done.", None, END),
    ]


def test_an_empty_message_of_the_agent_is_no_action_but_its_thought_is_kept() -> None:
    trajectory = ingested(
        user("Go."), assistant("", reasoning="Where?"), assistant("  "), assistant("go north")
    )
    assert turns(trajectory) == [("go north", "Where?", END)]


def test_no_state_is_ever_empty() -> None:
    trajectory = ingested(
        user("Go."),
        assistant(None, call("a", "f", "{}")),
        tool("a", ""),
        assistant("ok"),
        user(None),
        assistant("x"),
    )
    assert [turn[2] for turn in turns(trajectory)] == [EMPTY, EMPTY, END]


def test_what_a_user_adds_after_a_tool_joins_the_next_state() -> None:
    trajectory = ingested(user("Go."), assistant(None, call("a", "f", "{}")), tool("a", "F"), user("Hurry!"))
    assert turns(trajectory) == [("f({})", None, "F\n\nHurry!")]


def test_parts_are_joined_and_what_is_no_text_is_named() -> None:
    trajectory = ingested(
        user([{"type": "text", "text": "See:"}, {"type": "image_url", "image_url": {"url": "data:..."}}]),
        assistant([{"type": "thinking", "thinking": "A cat."}, {"type": "text", "text": "A cat"}]),
    )
    assert trajectory.task.instruction == "See:\n\n[image_url]"
    assert turns(trajectory) == [("A cat", "A cat.", END)]


def test_arguments_that_are_no_json_are_kept_as_text() -> None:
    trajectory = ingested(
        user("Go."), assistant(None, call("a", "sh", "{ls"), call("b", "sh", {"x": [1, None]}))
    )
    assert [turn[0] for turn in turns(trajectory)] == ['sh("{ls")', 'sh({"x": [1, null]})']


def test_a_record_without_a_reward_is_marked_as_unknown() -> None:
    trajectory = ingested(user("Go."), assistant("went"))
    assert trajectory.total_reward == 0.0
    assert not trajectory.success
    assert trajectory.transitions[-1].outcome.reward_source == "unknown"
    assert trajectory.transitions[-1].outcome.terminated


def test_rewards_of_single_messages_win_over_the_total() -> None:
    trajectory = ingested(
        user("Go."), assistant("a", reward=0.25), user("ok"), assistant("b", reward=0.5), reward=9.0
    )
    assert [turn.outcome.reward for turn in trajectory.transitions] == [0.25, 0.5]


def test_a_record_without_id_gets_one_from_its_content() -> None:
    one, again, other = (ingested(user("Go."), assistant(word)) for word in ("a", "a", "b"))
    assert one.id == again.id != other.id
    assert one.task.id == other.task.id


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ([], "expected messages to"),
        ([user("Hi")], "at least one message of the agent"),
        ([assistant("Hi")], "a user message before the agent's first one"),
        ([user("Hi"), tool("a", "x"), assistant("y")], "expected a tool call before a tool's reply"),
        ([user("Hi"), assistant(None, call("a", "f", "{}")), tool("z", "x")], "['a'], got one to 'z'"),
        ([user("Hi"), {"role": "wizard", "content": "x"}], "messages.1: expected role to be one of"),
        ([user(3), assistant("x")], "messages.0: expected content"),
        (["Hi"], "messages.0: expected the row to be"),
        ([user("Hi"), assistant(None, {"function": {"name": ""}})], "tool_calls.0.function.name"),
        ([user("Hi"), assistant(None, call("a", "f", {"x": float("inf")}))], "expected finite numbers"),
    ],
)
def test_a_conversation_that_makes_no_sense_is_refused_with_a_reason(said: list[Any], message: str) -> None:
    with pytest.raises(DataError) as refusal:
        messages.from_record(Record(where="x:1", value={"messages": said, "id": 1}), SHOP)
    assert message in str(refusal.value)


@pytest.mark.parametrize(("key", "value"), [("reward", "high"), ("reward", True), ("success", 1), ("id", [])])
def test_a_wrong_value_next_to_the_messages_is_refused(key: str, value: Any) -> None:
    with pytest.raises(DataError, match=f"expected {key}"):
        ingested(user("Hi"), assistant("x"), **{key: value})


def test_a_foreign_record_needs_an_environment() -> None:
    with pytest.raises(ConfigError, match="--env NAME"):
        messages.from_record(
            Record(where="x:1", value={"messages": [user("Hi"), assistant("x")]}), Defaults()
        )


@given(trajectories(max_number=1e100), st.sampled_from([messages, atif]))
@settings(max_examples=100)
def test_any_trajectory_is_one_line_that_its_format_recognises(
    trajectory: Trajectory,
    format: Any,  # noqa: A002
) -> None:
    line = dump_json(format.to_record(trajectory), what="record")
    assert "\n" not in line
    assert format.recognises(parse_json(line))


@pytest.mark.parametrize("format", [messages, atif])
def test_an_export_comes_back_with_its_texts_rewards_and_success(format: Any) -> None:  # noqa: A002
    exported = episode("one")
    back = format.from_record(Record(where="x:1", value=format.to_record(exported)), SHOP)
    assert (back.id, back.task.instruction, back.start.text) == (
        exported.id,
        exported.task.instruction,
        exported.start.text,
    )
    assert back.provenance.policy == exported.provenance.policy
    assert "system_prompt" not in back.task.parameters
    for mine, theirs in zip(back.transitions, exported.transitions, strict=True):
        assert (mine.action, mine.thought) == (theirs.action, theirs.thought)
        assert mine.outcome.next_state.text == theirs.outcome.next_state.text
        assert (mine.outcome.reward, mine.outcome.success) == (theirs.outcome.reward, theirs.outcome.success)


def test_an_edited_text_of_an_export_is_read() -> None:
    record = messages.to_record(episode("one"))
    record["messages"][2]["content"] = "go south"
    record["messages"][2]["reasoning_content"] = "Why not?"
    value = parse_json(json.dumps(record))
    trajectory = messages.from_record(Record(where="x:1", value=value), SHOP)
    assert trajectory.transitions[0].action == "go south"
    assert trajectory.transitions[0].thought == "Why not?"


@given(st.data())
@settings(max_examples=150)
def test_hostile_records_are_refused_and_never_crash(data: st.DataObject) -> None:
    """Any value anywhere in a good record: the answer is a valid trajectory or a `DataError`."""
    good: list[Any] = [
        messages.to_record(episode("one")),
        atif.to_record(episode("one")),
        {"messages": [user("Hi"), assistant("t", call("a", "f", "{}")), tool("a", [{"type": "text"}])]},
    ]
    value = json.loads(json.dumps(data.draw(st.sampled_from(good))))
    place = value
    while True:
        key = data.draw(st.sampled_from(list(place) if isinstance(place, dict) else list(range(len(place)))))
        if not isinstance(place[key], dict | list) or not place[key] or data.draw(st.integers(0, 3)) == 0:
            break
        place = place[key]
    place[key] = data.draw(json_values)
    for format in (messages, atif):  # noqa: A001
        try:
            trajectory = format.from_record(Record(where="x:1", value=value), SHOP)
        except DataError:
            continue
        assert decode_trajectory(encode_trajectory(trajectory)) == trajectory


def test_a_json_document_a_list_and_lines_are_all_read(tmp_path: Path) -> None:
    record = {"messages": [user("Hi"), assistant("x")]}
    other = {"messages": [user("Hi"), assistant("y")]}
    (tmp_path / "one.json").write_text(json.dumps(record, indent=2), encoding="utf-8")
    (tmp_path / "list.json").write_text(json.dumps([record, other], indent=2), encoding="utf-8")
    (tmp_path / "lines.json").write_text(f"{json.dumps(record)}\n{json.dumps(other)}\n", encoding="utf-8")
    places = {
        name: [where.rpartition("/")[2] for where, _ in read_foreign(tmp_path / name, SHOP)]
        for name in ("one.json", "list.json", "lines.json")
    }
    assert places == {
        "one.json": ["one.json:1"],
        "list.json": ["list.json:1 (item 1)", "list.json:1 (item 2)"],
        "lines.json": ["lines.json:1", "lines.json:2"],
    }
