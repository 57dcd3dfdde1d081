"""ATIF, the Agent Trajectory Interchange Format of the Harbor project: read up to 1.x, written as 1.7.

A file is one JSON document, or one document per line. ATIF has no rewards; they are in the ``extra``
object of an agent's step and of the document.
"""

from __future__ import annotations

import re
from typing import Any, Literal

from pydantic import Field

from dreamgym.data.ingest.dialogue import Call, Defaults, Header, Message, join, make_trajectory, parse_time
from dreamgym.data.ingest.json_reader import Foreign, Record
from dreamgym.data.ingest.messages import parts_text
from dreamgym.data.schema import check, row_of
from dreamgym.errors import DataError
from dreamgym.types import Trajectory

VERSION = "ATIF-v1.7"


class _ToolCall(Foreign):
    tool_call_id: str
    function_name: str = Field(min_length=1)
    arguments: dict[str, Any]


class _Result(Foreign):
    source_call_id: str | None = None
    content: str | list[str | dict[str, Any]] | None = None


class _Observation(Foreign):
    results: list[_Result]


class _Step(Foreign):
    step_id: int
    source: Literal["system", "user", "agent"]
    message: str | list[str | dict[str, Any]]
    timestamp: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[_ToolCall] | None = None
    observation: _Observation | None = None
    is_copied_context: bool | None = None
    extra: dict[str, Any] | None = None


class _Agent(Foreign):
    name: str
    version: str
    model_name: str | None = None


class _Document(Foreign):
    schema_version: str
    agent: _Agent
    steps: list[_Step] = Field(min_length=1)
    session_id: str | None = None
    trajectory_id: str | None = None
    extra: dict[str, Any] | None = None


class _Verdict(Foreign):
    """What producers write about the result into an ``extra`` object."""

    reward: float | None = None
    success: bool | None = None


def recognises(value: Any) -> bool:
    return isinstance(value, dict) and str(value.get("schema_version", "")).startswith("ATIF-")


def from_record(record: Record, defaults: Defaults) -> Trajectory:
    """The trajectory of one document, or `DataError` without its place. Subagents' own ones are not read."""
    given = check(_Document, record.value)
    if not re.fullmatch(r"ATIF-v1\.\d+", given.schema_version):
        raise DataError(
            f"expected schema_version to be {VERSION!r} or another 1.x, got {given.schema_version!r}"
        )
    for position, step in enumerate(given.steps, 1):
        if step.step_id != position:
            raise DataError(f"expected steps.{position - 1}.step_id to be {position}, got {step.step_id}")
    verdict = check(_Verdict, given.extra or {})
    header = Header(
        id=given.trajectory_id or given.session_id or f"atif-{record.digest}",
        policy=given.agent.model_name or given.agent.name,
        recorded_at=next((parse_time(step.timestamp) for step in given.steps if step.timestamp), 0.0),
        reward=verdict.reward,
        success=verdict.success,
    )
    messages = [message for step in given.steps for message in _messages(step)]
    return make_trajectory(messages, header, defaults)


def to_record(trajectory: Trajectory) -> dict[str, Any]:
    """One document: the instruction and the start state from the user, then one step per turn."""
    row_of(trajectory)  # checks that the turns follow one another
    steps: list[dict[str, Any]] = [
        {"step_id": 1, "source": "user", "message": trajectory.task.instruction},
        {"step_id": 2, "source": "user", "message": trajectory.start.text},
    ]
    for number, transition in enumerate(trajectory.transitions, 3):
        thought = {} if transition.thought is None else {"reasoning_content": transition.thought}
        steps.append(
            {
                "step_id": number,
                "source": "agent",
                "message": transition.action,
                **thought,
                "observation": {"results": [{"content": transition.outcome.next_state.text}]},
                "extra": {"reward": transition.outcome.reward if trajectory.graded else None},
            }
        )
    provenance = trajectory.provenance
    return {
        "schema_version": VERSION,
        "session_id": trajectory.id,
        "trajectory_id": trajectory.id,
        "agent": {"name": provenance.policy, "version": str(provenance.policy_version)},
        "steps": steps,
        "final_metrics": {"total_steps": len(steps)},
        "extra": {"reward": trajectory.total_reward, "success": trajectory.success}
        if trajectory.graded
        else {},
    }


def _messages(step: _Step) -> list[Message]:
    copied = bool(step.is_copied_context)
    text, _ = parts_text(step.message)
    results = step.observation.results if step.observation else []
    if step.source != "agent":
        said = join([text, *(parts_text(result.content)[0] for result in results)])
        return [Message(role=step.source, text=said, copied=copied)]
    calls = tuple(
        Call(id=call.tool_call_id, name=call.function_name, arguments=call.arguments)
        for call in step.tool_calls or []
    )
    reward = check(_Verdict, step.extra or {}).reward
    acted = Message(
        role="assistant", text=text, thought=step.reasoning_content, calls=calls, reward=reward, copied=copied
    )
    replies = [
        Message(
            # A result without a call of this step is a message of the environment.
            role="tool" if calls and result.source_call_id else "user",
            text=parts_text(result.content)[0],
            call_id=result.source_call_id if calls else None,
            copied=copied,
        )
        for result in results
    ]
    return [acted, *replies]
