"""ATIF documents of other producers become trajectories; ours obey the rules of version 1.7."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import Any

import pytest
from hypothesis import given

from dreamgym.data.ingest import Defaults, atif
from dreamgym.data.ingest.dialogue import END
from dreamgym.data.ingest.json_reader import Record
from dreamgym.errors import DataError
from dreamgym.types import Trajectory
from tests.data.trajectory_examples import episode, trajectories

TERMINAL = Defaults(environment="terminal")


def document(*steps: dict[str, Any], **more: Any) -> dict[str, Any]:
    numbered = [{"step_id": number, **step} for number, step in enumerate(steps, 1)]
    agent = {"name": "helper", "version": "1.0", "model_name": "tiny-1"}
    return {"schema_version": "ATIF-v1.7", "agent": agent, "steps": numbered, **more}


def ingested(value: dict[str, Any]) -> Trajectory:
    return atif.from_record(Record(where="x.json:1", value=json.loads(json.dumps(value))), TERMINAL)


STOCK = document(
    {"source": "system", "message": "Be brief."},
    {"source": "user", "message": "What does it cost?", "timestamp": "2026-01-02T03:04:05Z"},
    {
        "source": "agent",
        "message": "I search.",
        "reasoning_content": "Two calls at once.",
        "tool_calls": [
            {"tool_call_id": "p", "function_name": "search", "arguments": {"what": "price"}},
            {"tool_call_id": "v", "function_name": "search", "arguments": {"what": "volume"}},
        ],
        "observation": {
            "results": [
                {"source_call_id": "p", "content": "185"},
                {"source_call_id": "v", "content": [{"type": "text", "text": "1.5M"}, {"type": "image"}]},
            ]
        },
        "metrics": {"prompt_tokens": 520},
    },
    {"source": "agent", "message": "185."},
    session_id="session-1",
    trajectory_id="doc-1",
    a_key_of_version_1_8=True,
)


def test_a_document_with_tool_calls_becomes_a_trajectory() -> None:
    trajectory = ingested(STOCK)
    assert trajectory.id == "doc-1"
    assert trajectory.task.instruction == "What does it cost?"
    assert trajectory.task.parameters == {"system_prompt": "Be brief."}
    assert trajectory.provenance.policy == "tiny-1"
    assert trajectory.provenance.recorded_at == datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC).timestamp()
    assert [(turn.action, turn.thought, turn.outcome.next_state.text) for turn in trajectory.transitions] == [
        ('search({"what": "price"})', "Two calls at once.\n\nI search.", "185"),
        ('search({"what": "volume"})', None, "1.5M\n\n[image]"),
        ("185.", None, END),
    ]
    assert trajectory.transitions[-1].outcome.terminated


def test_rewards_stand_in_the_extra_objects() -> None:
    observed = {"results": [{"content": "ok"}]}
    steps = [
        {"source": "agent", "message": word, "observation": observed, "extra": {"reward": reward}}
        for word, reward in (("a", 0.5), ("b", 1))
    ]
    trajectory = ingested(document({"source": "user", "message": "Go."}, *steps, extra={"success": True}))
    assert [turn.outcome.reward for turn in trajectory.transitions] == [0.5, 1.0]
    assert trajectory.success


def test_copied_context_sets_the_scene_and_is_no_turn() -> None:
    old = {"is_copied_context": True}
    trajectory = ingested(
        document(
            {"source": "user", "message": "Build it.", **old},
            {
                "source": "agent",
                "message": "make",
                "observation": {"results": [{"content": "Error 1"}]},
                **old,
            },
            {"source": "agent", "message": "make clean", "observation": {"results": [{"content": "Clean."}]}},
        )
    )
    assert trajectory.task.instruction == "Build it."
    assert trajectory.start.text == "Error 1"
    assert [turn.action for turn in trajectory.transitions] == ["make clean"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"schema_version": "ATIF-v2.0"},
            "schema_version to be 'ATIF-v1.7' or another 1.x, got 'ATIF-v2.0'",
        ),
        ({"agent": {"name": "x"}}, "expected a key 'agent.version', got none"),
        ({"steps": []}, "expected steps to"),
        ({"steps": [{**STOCK["steps"][1], "step_id": 2}]}, "expected steps.0.step_id to be 1, got 2"),
        (
            {"steps": [{"step_id": 1, "source": "robot", "message": "x"}]},
            "'system', 'user' or 'agent', got 'robot'",
        ),
        ({"extra": {"reward": "much"}}, "expected reward to be a valid number"),
    ],
)
def test_a_document_against_the_rules_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError) as refusal:
        ingested({**STOCK, **change})
    assert message in str(refusal.value)


ROOT = {"schema_version", "session_id", "trajectory_id", "agent", "steps", "final_metrics", "extra"}
STEP = {"step_id", "source", "message", "reasoning_content", "observation", "extra"}


@given(trajectories(max_number=1e100))
def test_our_documents_obey_version_1_7(trajectory: Trajectory) -> None:
    """The rules of the specification that apply to what we write: no key of our own outside ``extra``."""
    made = atif.to_record(trajectory)
    assert made["schema_version"] == "ATIF-v1.7"
    assert set(made) <= ROOT
    assert set(made["agent"]) == {"name", "version"}
    assert all(isinstance(value, str) for value in made["agent"].values())
    assert [step["step_id"] for step in made["steps"]] == list(range(1, len(trajectory) + 3))
    for step in made["steps"]:
        assert set(step) <= STEP
        assert step["source"] in {"system", "user", "agent"}
        assert isinstance(step["message"], str)
        assert step["source"] == "agent" or "reasoning_content" not in step
        for result in step.get("observation", {"results": []})["results"]:
            assert set(result) == {"content"}


def test_step_rewards_are_found_where_other_readers_look() -> None:
    made = atif.to_record(episode("one"))
    assert [step["extra"]["reward"] for step in made["steps"] if step["source"] == "agent"] == [0.0, 0.0, 1.0]
    assert made["extra"]["reward"] == 1.0
    assert made["extra"]["success"] is True
