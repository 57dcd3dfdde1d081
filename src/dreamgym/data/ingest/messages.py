"""Chat messages in OpenAI's format, one conversation per line: ``{"messages": [...], ...}``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import Field

from dreamgym.data.ingest.dialogue import (
    Call,
    Defaults,
    Header,
    Message,
    join,
    make_trajectory,
    parse_arguments,
)
from dreamgym.data.ingest.json_reader import Foreign, Record
from dreamgym.data.schema import check, row_of, shorten
from dreamgym.errors import DataError
from dreamgym.types import Trajectory

ROLES: Mapping[str, Any] = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
    "function": "tool",
}


class _Function(Foreign):
    name: str = Field(min_length=1)
    arguments: str | dict[str, Any] | None = None


class _ToolCall(Foreign):
    id: str | None = None
    function: _Function


class _ChatMessage(Foreign):
    role: str
    content: str | list[str | dict[str, Any]] | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[_ToolCall] | None = None
    tool_call_id: str | None = None
    reward: float | None = None


class _Task(Foreign):
    id: str | None = None
    instruction: str | None = None
    family: str | None = None


class _Conversation(Foreign):
    messages: list[Any] = Field(min_length=1)
    id: str | int | None = None
    task: str | _Task | None = None
    reward: float | None = None
    success: bool | None = None
    model: str | None = None


def recognises(value: Any) -> bool:
    return isinstance(value, dict) and isinstance(value.get("messages"), list)


def from_record(record: Record, defaults: Defaults) -> Trajectory:
    """The trajectory of one conversation, or `DataError` without its place."""
    given = check(_Conversation, record.value)
    task = _Task(instruction=given.task) if isinstance(given.task, str) else given.task or _Task()
    header = Header(
        id=f"messages-{record.digest}" if given.id in (None, "") else str(given.id),
        instruction=task.instruction,
        task_id=task.id,
        family=task.family,
        policy=given.model,
        reward=given.reward,
        success=given.success,
    )
    messages = [parse_message(value, position) for position, value in enumerate(given.messages)]
    return make_trajectory(messages, header, defaults)


def to_record(trajectory: Trajectory) -> dict[str, Any]:
    """One conversation: the instruction as system message, states as user, actions as assistant messages."""
    row_of(trajectory)  # checks that the turns follow one another
    messages: list[dict[str, Any]] = []
    if trajectory.task.instruction:
        messages.append({"role": "system", "content": trajectory.task.instruction})
    messages.append({"role": "user", "content": trajectory.start.text})
    for transition in trajectory.transitions:
        thought = {} if transition.thought is None else {"reasoning_content": transition.thought}
        reward = transition.outcome.reward if trajectory.graded else None
        messages.append({"role": "assistant", "content": transition.action, "reward": reward, **thought})
        messages.append({"role": "user", "content": transition.outcome.next_state.text})
    return {
        "messages": messages,
        "id": trajectory.id,
        "task": {
            "id": trajectory.task.id,
            "instruction": trajectory.task.instruction,
            "family": trajectory.task.family,
        },
        "model": trajectory.provenance.policy,
        "reward": trajectory.total_reward if trajectory.graded else None,
        "success": trajectory.success if trajectory.graded else None,
    }


def parse_message(value: Any, position: int) -> Message:
    """One message of a conversation, with its place among them for the error message."""
    try:
        message = check(_ChatMessage, value)
        if message.role not in ROLES:
            raise DataError(f"expected role to be one of {', '.join(ROLES)}, got {shorten(message.role)}")
    except DataError as error:
        raise DataError(f"messages.{position}: {error}") from None
    text, thinking = parts_text(message.content)
    return Message(
        role=ROLES[message.role],
        text=text,
        thought=join([message.reasoning_content or message.reasoning, thinking]) or None,
        calls=tuple(
            Call(
                id=call.id or None,
                name=call.function.name,
                arguments=parse_arguments(call.function.arguments),
            )
            for call in message.tool_calls or []
        ),
        call_id=message.tool_call_id or None,
        reward=message.reward,
    )


def parts_text(content: str | list[str | dict[str, Any]] | None) -> tuple[str, str]:
    """(text, thought) of the parts of a content; a part without text becomes its type in brackets."""
    if not isinstance(content, list):
        return content or "", ""
    said, thought = [], []
    for part in content:
        if isinstance(part, str):
            said.append(part)
        elif part.get("type") in ("thinking", "reasoning"):
            thought.append(_text(part, "thinking", "text", "content"))
        else:
            said.append(_text(part, "text", "refusal", "content") or f"[{part.get('type', 'part')}]"[:40])
    return join(said), join(thought)


def _text(part: dict[str, Any], *keys: str) -> str:
    return next((part[key] for key in keys if isinstance(part.get(key), str)), "")
