"""OpenTelemetry GenAI spans become trajectories, however their exporter lays them out."""

from __future__ import annotations

import json
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dreamgym.data.ingest import Defaults, detect, read_foreign
from dreamgym.data.ingest.dialogue import END
from dreamgym.data.schema import decode_trajectory, encode_trajectory
from dreamgym.errors import DataError
from dreamgym.types import Trajectory
from tests.data.trajectory_examples import json_values

SUPPORT = Defaults(environment="support")
clock = count(1_700_000_000_000_000_000, 1_000_000_000)


def text(role: str, content: str) -> dict[str, Any]:
    return {"role": role, "parts": [{"type": "text", "content": content}]}


def asks(identity: str, name: str, arguments: Any) -> dict[str, Any]:
    part = {"type": "tool_call", "id": identity, "name": name, "arguments": arguments}
    return {"role": "assistant", "parts": [{"type": "reasoning", "content": "I must look."}, part]}


def answers(identity: str, response: Any) -> dict[str, Any]:
    return {"role": "tool", "parts": [{"type": "tool_call_response", "id": identity, "response": response}]}


def typed(value: Any) -> dict[str, Any]:
    """A value as OTLP writes it."""
    if isinstance(value, bool):
        return {"boolValue": value}
    if isinstance(value, int):
        return {"intValue": str(value)}
    if isinstance(value, float):
        return {"doubleValue": value}
    if isinstance(value, list):
        return {"arrayValue": {"values": [typed(item) for item in value]}}
    if isinstance(value, dict):
        return {"kvlistValue": {"values": pairs(value)}}
    return {"stringValue": value}


def pairs(attributes: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"key": key, "value": typed(value)} for key, value in attributes.items()]


def span(identity: str, parent: str | None, operation: str, **attributes: Any) -> dict[str, Any]:
    named = {f"gen_ai.{key.replace('__', '.')}": value for key, value in attributes.items()}
    return {
        "traceId": "5b8efff798038103d269b633813fc60c",
        "spanId": identity,
        "parentSpanId": parent or "",
        "name": operation,
        "startTimeUnixNano": str(next(clock)),
        "attributes": {"gen_ai.operation.name": operation} | named,
    }


SYSTEM = [{"type": "text", "content": "Be kind."}]
QUESTION = text("user", "Weather in Paris?")
CALL = asks("call-1", "get_weather", {"location": "Paris"})
REPLY = answers("call-1", "rainy, 57°F")
ANSWER = text("assistant", "It rains.")

WEATHER = [
    span("0a", None, "invoke_agent", agent__name="weather"),
    span(
        "0b", "0a", "chat",
        system_instructions=SYSTEM, input__messages=[QUESTION], output__messages=[CALL],
    ),
    span("0c", "0a", "execute_tool", tool__call__id="call-1", tool__name="get_weather"),
    span(
        "0d", "0a", "chat",
        system_instructions=SYSTEM, input__messages=[QUESTION, CALL, REPLY], output__messages=[ANSWER],
    ),
]  # fmt: skip


def as_otlp(spans: list[dict[str, Any]], *, structured: bool) -> dict[str, Any]:
    """An export request; message attributes as JSON strings, or as structured values."""
    written = [
        each | {"attributes": pairs({k: v if structured else flat(v) for k, v in each["attributes"].items()})}
        for each in spans
    ]
    noise = {"traceId": "ff", "spanId": "ee", "name": "GET /", "attributes": [], "startTimeUnixNano": "1"}
    scope = {"scope": {"name": "test"}, "spans": [noise, *written]}
    return {"resourceSpans": [{"resource": {"attributes": []}, "scopeSpans": [scope]}]}


def as_sdk(each: dict[str, Any]) -> dict[str, Any]:
    """A span as the Python SDK prints it."""
    seconds = int(each["startTimeUnixNano"]) % 86_400_000_000_000 // 1_000_000_000
    return {
        "name": each["name"],
        "context": {
            "trace_id": f"0x{each['traceId']}",
            "span_id": f"0x{each['spanId']}",
            "trace_state": "[]",
        },
        "parent_id": f"0x{each['parentSpanId']}" if each["parentSpanId"] else None,
        "start_time": f"2026-01-01T{seconds // 3600:02}:{seconds // 60 % 60:02}:{seconds % 60:02}.000000Z",
        "attributes": {key: flat(value) for key, value in each["attributes"].items()},
        "events": [],
    }


def flat(value: Any) -> Any:
    return json.dumps(value) if isinstance(value, list | dict) else value


def ingested(tmp_path: Path, *values: Any) -> list[Trajectory]:
    file = tmp_path / "spans.jsonl"
    file.write_text("".join(json.dumps(value) + "\n" for value in values), encoding="utf-8")
    assert detect(file).name == "otel"
    return [trajectory for _, trajectory in read_foreign(file, SUPPORT, format="otel")]


def turns(trajectory: Trajectory) -> list[tuple[str, str | None, str]]:
    return [(turn.action, turn.thought, turn.outcome.next_state.text) for turn in trajectory.transitions]


EXPECTED = [
    ('get_weather({"location": "Paris"})', "I must look.", "rainy, 57°F"),
    ("It rains.", None, END),
]


@pytest.mark.parametrize(
    "values",
    [
        [as_otlp(WEATHER, structured=True)],
        [as_otlp(WEATHER, structured=False)],
        [as_otlp([each], structured=False) for each in WEATHER],
        [each | {"attributes": pairs(each["attributes"])} for each in WEATHER],
        [as_sdk(each) for each in reversed(WEATHER)],
    ],
    ids=["structured", "strings", "one request a line", "one span a line", "as the SDK prints, out of order"],
)
def test_every_layout_gives_the_same_trajectory(tmp_path: Path, values: list[Any]) -> None:
    (trajectory,) = ingested(tmp_path, *values)
    assert trajectory.task.instruction == "Weather in Paris?"
    assert trajectory.task.parameters == {"system_prompt": "Be kind."}
    assert trajectory.provenance.policy == "weather"
    assert trajectory.provenance.recorded_at > 1_600_000_000
    assert turns(trajectory) == EXPECTED


def test_a_pretty_printed_document_is_read(tmp_path: Path) -> None:
    file = tmp_path / "trace.json"
    file.write_text(json.dumps(as_otlp(WEATHER, structured=False), indent=2), encoding="utf-8")
    ((where, trajectory),) = read_foreign(file, SUPPORT)
    assert where == f"{file}:1"
    assert turns(trajectory) == EXPECTED


def test_messages_in_an_event_are_found(tmp_path: Path) -> None:
    spans = [dict(each) for each in WEATHER]
    for each in spans:
        details = {k: v for k, v in each["attributes"].items() if k.endswith("messages")}
        rest = {k: v for k, v in each["attributes"].items() if not k.endswith("messages")}
        event = {"name": "gen_ai.client.inference.operation.details", "attributes": details}
        each.update(attributes=rest, events=[event])
    (trajectory,) = ingested(tmp_path, *spans)
    assert turns(trajectory) == EXPECTED


def test_a_stateful_api_that_sends_only_what_is_new_gives_the_whole_conversation(tmp_path: Path) -> None:
    (trajectory,) = ingested(
        tmp_path,
        span("1", None, "chat", input__messages=[QUESTION], output__messages=[CALL]),
        span("2", None, "chat", input__messages=[REPLY], output__messages=[ANSWER]),
    )
    assert turns(trajectory) == EXPECTED


def test_a_shortened_history_adds_only_its_news(tmp_path: Path) -> None:
    (trajectory,) = ingested(
        tmp_path,
        span("1", None, "chat", input__messages=[QUESTION], output__messages=[CALL]),
        span(
            "2",
            None,
            "chat",
            input__messages=[text("user", "Summary: weather was asked."), CALL, REPLY],
            output__messages=[ANSWER],
        ),
    )
    assert turns(trajectory) == EXPECTED


def test_a_call_recorded_by_framework_and_client_counts_once(tmp_path: Path) -> None:
    inner = [span(f"9{each['spanId']}", each["spanId"], "chat") for each in WEATHER]
    for copy, each in zip(inner, WEATHER, strict=True):
        copy["attributes"] = each["attributes"]
    chats = [copy for copy in inner if copy["attributes"]["gen_ai.operation.name"] == "chat"]
    (trajectory,) = ingested(tmp_path, *WEATHER, *chats)
    assert turns(trajectory) == EXPECTED


def test_the_last_call_is_answered_by_its_tool_span(tmp_path: Path) -> None:
    (trajectory,) = ingested(
        tmp_path,
        span("1", None, "chat", input__messages=[QUESTION], output__messages=[CALL]),
        span("2", None, "execute_tool", tool__call__id="call-1", tool__call__result={"sky": "grey"}),
    )
    assert turns(trajectory) == [(EXPECTED[0][0], "I must look.", '{"sky": "grey"}')]


def test_an_agent_whose_model_calls_were_not_captured_is_read_from_its_tools(tmp_path: Path) -> None:
    (trajectory,) = ingested(
        tmp_path,
        span("1", None, "invoke_agent", input__messages=[QUESTION], output__messages=[ANSWER]),
        span("2", "1", "chat", request__model="tiny-1"),
        span(
            "3",
            "1",
            "execute_tool",
            tool__name="get_weather",
            tool__call__arguments='{"location": "Paris"}',
            tool__call__result="rainy, 57°F",
        ),
    )
    assert turns(trajectory) == [(EXPECTED[0][0], None, EXPECTED[0][2]), EXPECTED[1]]


def test_each_agent_of_a_trace_has_its_own_trajectory(tmp_path: Path) -> None:
    helper = text("user", "Translate.")
    found = ingested(
        tmp_path,
        *WEATHER,
        span("20", "0c", "invoke_agent", agent__name="translator"),
        span("21", "20", "chat", input__messages=[helper], output__messages=[text("assistant", "Il pleut.")]),
    )
    assert {trajectory.provenance.policy: len(trajectory) for trajectory in found} == {
        "weather": 2,
        "translator": 1,
    }


def test_one_conversation_over_several_traces_is_one_trajectory(tmp_path: Path) -> None:
    said = [QUESTION, ANSWER, text("user", "And Rome?")]
    news = [text("assistant", "Sun.")]
    (trajectory,) = ingested(
        tmp_path,
        span("1", None, "chat", conversation__id="c7", input__messages=said[:1], output__messages=said[1:2]),
        span("2", None, "chat", conversation__id="c7", input__messages=said, output__messages=news)
        | {"traceId": "other"},
    )
    assert trajectory.id == "c7"
    assert turns(trajectory) == [("It rains.", None, "And Rome?"), ("Sun.", None, END)]


def test_an_evaluation_gives_reward_and_success(tmp_path: Path) -> None:
    graded = span("1", None, "chat", input__messages=[QUESTION], output__messages=[ANSWER])
    verdict = {"gen_ai.evaluation.score.value": 0.75, "gen_ai.evaluation.score.label": "pass"}
    graded["events"] = [{"name": "gen_ai.evaluation.result", "attributes": pairs(verdict)}]
    (trajectory,) = ingested(tmp_path, graded)
    assert trajectory.total_reward == 0.75
    assert trajectory.success


def test_spans_without_captured_content_are_refused_with_a_hint(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"spans\.jsonl:1: expected spans with gen_ai\.input\.messages"):
        ingested(tmp_path, span("1", None, "chat", request__model="tiny-1"))


def test_a_circle_of_parents_ends(tmp_path: Path) -> None:
    one = span("1", "2", "chat", input__messages=[QUESTION], output__messages=[ANSWER])
    two = span("2", "1", "workflow")
    (trajectory,) = ingested(tmp_path, one, two)
    assert len(trajectory) == 1


@given(st.data())
@settings(max_examples=150, deadline=None)
def test_hostile_spans_are_refused_and_never_crash(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    written = [as_otlp(WEATHER, structured=True), as_sdk(WEATHER[1]), WEATHER[3]]
    value = json.loads(json.dumps(data.draw(st.sampled_from(written))))
    place = value
    while True:
        key = data.draw(st.sampled_from(list(place) if isinstance(place, dict) else list(range(len(place)))))
        if not isinstance(place[key], dict | list) or not place[key] or data.draw(st.integers(0, 5)) == 0:
            break
        place = place[key]
    place[key] = data.draw(json_values)
    file = tmp_path_factory.getbasetemp() / "hostile.jsonl"
    file.write_text(json.dumps(value) + "\n", encoding="utf-8")
    problems: list[DataError] = []
    for _, trajectory in read_foreign(file, SUPPORT, format="otel", on_bad=problems.append):
        assert decode_trajectory(encode_trajectory(trajectory)) == trajectory
    assert all(str(problem).startswith(f"{file}:1: ") for problem in problems)
