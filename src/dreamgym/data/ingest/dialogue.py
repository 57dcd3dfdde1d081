"""Converts a conversation between an agent and its environment into a trajectory.

Every foreign format is first read into the same messages. The rules for tasks, states, actions and thoughts:

- The first user message is the instruction. What else is said before the first action is the start state; if
  nothing else is, the instruction is the start state too. System text goes to the task's parameters.
- A tool call is an action, written ``name({"argument": value})`` with sorted keys; several calls in one
  message are several turns, in order. Text next to a call joins the thought of its first turn.
- Text without a call is an action if a reply follows or the conversation ends with it; if the agent speaks
  again without a reply, the text joins the thought of its next action.
- Replies of tools and users are the next state. No state is empty: `EMPTY`, `NO_REPLY` and `END` stand for an
  empty reply, a call without a reply and the end of the record.
- The last turn is terminated. It carries the record's reward and success, unless single turns have rewards.
  Where a record has neither, the reward is 0 and its source is `UNKNOWN_REWARD`, unless `Defaults` says more.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Literal, TypeAlias

from dreamgym.data.schema import dump_json, parse_json, shorten
from dreamgym.errors import ConfigError, DataError
from dreamgym.types import UNKNOWN_REWARD, JsonValue, Outcome, Provenance, State, Task, Trajectory, Transition

EMPTY = "[empty reply]"
NoReward: TypeAlias = Literal["keep", "fail", "success", "skip"]
"""What becomes of a record that holds neither a reward nor a success."""
NO_REPLY = "[no reply]"
END = "[end of episode]"


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """A tool call of the agent."""

    name: str
    arguments: Any
    """Parsed JSON, or the text itself where it is not JSON."""
    id: str | None = None

    @property
    def action(self) -> str:
        return render_call(self.name, self.arguments)


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """Something that was said, by the agent (``assistant``) or to it."""

    role: Literal["system", "user", "assistant", "tool"]
    text: str = ""
    thought: str | None = None
    calls: tuple[Call, ...] = ()
    call_id: str | None = None
    """For a tool's reply: the call it answers; None for the first that waits."""
    reward: float | None = None
    copied: bool = False
    """Repeated from an earlier record for context: it sets the scene and is no turn of this one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    """What a record says about its conversation as a whole; None where it says nothing."""

    id: str
    instruction: str | None = None
    task_id: str | None = None
    family: str | None = None
    policy: str | None = None
    recorded_at: float = 0.0
    reward: float | None = None
    success: bool | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Defaults:
    """What the user says about all records of a file."""

    environment: str | None = None
    split: str = "train"
    no_reward: NoReward = "keep"
    """How a record without reward and success is stored: ``keep`` marks its reward as unknown."""


def render_call(name: str, arguments: Any) -> str:
    """A tool call as an action.

    >>> render_call("open", {"door": 2, "by": "key"})
    'open({"by": "key", "door": 2})'
    """
    try:
        text = json.dumps(arguments, ensure_ascii=False, allow_nan=False, sort_keys=True)
    except (ValueError, RecursionError) as error:
        raise DataError(f"expected finite numbers in the arguments of {name!r}, got {error}") from None
    return f"{name}({'' if arguments is None else text})"


def parse_arguments(arguments: Any) -> Any:
    """Arguments often come as JSON inside a string; a string that is not JSON stays what it is."""
    if not isinstance(arguments, str):
        return arguments
    try:
        return parse_json(arguments) if arguments.strip() else {}
    except DataError:
        return arguments


def parse_time(value: Any) -> float:
    """Seconds since the epoch from nanoseconds or ISO 8601; 0 for nothing."""
    try:
        if isinstance(value, str) and not value.isdigit():
            return datetime.fromisoformat(value).timestamp()
        return int(value or 0) / 1e9
    except (ValueError, TypeError, OverflowError):
        raise DataError(f"expected a time in nanoseconds or ISO 8601, got {shorten(value)}") from None


def join(parts: Iterable[str | None]) -> str:
    return "\n\n".join(part for part in parts if part is not None and part.strip())


@dataclass(slots=True)
class _Turn:
    action: str
    thought: str
    call: Call | None = None
    reward: float | None = None
    replies: list[str] = field(default_factory=list)


class _Reading:
    """The conversation so far: what was said before the first action, then turns."""

    def __init__(self) -> None:
        self.system: list[str] = []
        self.user: list[str] = []
        self.copied: list[str] = []
        self.turns: list[_Turn] = []
        self._aloud: list[str | None] = []
        self._aloud_reward: float | None = None

    def take(self, message: Message) -> None:
        if message.copied:
            self._recall(message)
        elif message.role == "assistant":
            self._act(message)
        elif self.turns:
            turn = self._answered(message) if message.role == "tool" else self.turns[-1]
            turn.replies.append(message.text if message.text.strip() else EMPTY)
        elif message.role == "tool":
            raise DataError(f"expected a tool call before a tool's reply, got {shorten(message.text)} first")
        elif message.text.strip():
            (self.system if message.role == "system" else self.user).append(message.text)

    def _recall(self, message: Message) -> None:
        """Take a copied message: of the past only the task and the latest state matter."""
        if self.turns:
            return
        if message.role == "assistant":
            self.copied = []
        elif message.role == "user" and not self.user:
            self.user.append(message.text)
        else:
            (self.system if message.role == "system" else self.copied).append(message.text)

    def _act(self, message: Message) -> None:
        if self.turns and not self.turns[-1].replies and self.turns[-1].call is None:
            unanswered = self.turns.pop()
            self._aloud += [unanswered.thought, unanswered.action]
            self._aloud_reward = _sum(self._aloud_reward, unanswered.reward)
        reward = _sum(self._aloud_reward, message.reward)
        if message.calls:
            first = join([*self._aloud, message.thought, message.text])
            self.turns += [_Turn(call.action, "", call) for call in message.calls]
            self.turns[-len(message.calls)].thought = first
        elif message.text.strip():
            self.turns.append(_Turn(message.text, join([*self._aloud, message.thought])))
        else:
            self._aloud.append(message.thought)
            self._aloud_reward = reward
            return
        self.turns[-1].reward = reward
        self._aloud, self._aloud_reward = [], None

    def _answered(self, message: Message) -> _Turn:
        """The turn whose call this reply answers."""
        if message.call_id is None:
            waiting = [turn for turn in self.turns if turn.call is not None and not turn.replies]
            return waiting[0] if waiting else self.turns[-1]
        for turn in reversed(self.turns):
            if turn.call is not None and turn.call.id == message.call_id:
                return turn
        known = [turn.call.id for turn in self.turns if turn.call is not None][-8:]
        raise DataError(
            f"expected a reply to one of the calls {known!r}, got one to {shorten(message.call_id)}"
        )


def make_trajectory(messages: Sequence[Message], header: Header, defaults: Defaults) -> Trajectory:
    """The trajectory of a conversation, by the rules at the head of this module.

    Raises:
        DataError: there is no action, or no task.
        ConfigError: `defaults` does not name the environment.
    """
    if not defaults.environment:
        raise ConfigError("expected the name of the environment these records come from: give --env NAME")
    reading = _Reading()
    for message in messages:
        reading.take(message)
    if not reading.turns:
        raise DataError("expected at least one message of the agent with text or a tool call, got none")
    user, system = reading.user, join(reading.system)
    if system == header.instruction:
        system = ""
    instruction = header.instruction or (user.pop(0) if user else system)
    if not instruction.strip():
        raise DataError("expected a user message before the agent's first one, or a task, got neither")
    start = join([*user, *reading.copied]) or instruction
    parameters: dict[str, JsonValue] = {"system_prompt": system} if system else {}
    task = Task(
        id=header.task_id or f"task-{_digest(instruction, start, system)}",
        instruction=instruction,
        environment=defaults.environment,
        split=defaults.split,
        family=header.family or "",
        parameters=parameters,
    )
    provenance = Provenance(source="real", policy=header.policy or "unknown", recorded_at=header.recorded_at)
    first = State(text=start)
    return Trajectory(
        id=header.id,
        task=task,
        start=first,
        transitions=_transitions(first, reading.turns, header, defaults.no_reward),
        provenance=provenance,
    )


def _transitions(
    state: State, turns: Sequence[_Turn], header: Header, no_reward: NoReward
) -> tuple[Transition, ...]:
    made = []
    single = any(turn.reward is not None for turn in turns)
    known = single or header.reward is not None or header.success is not None
    success = bool(header.success) or (not known and no_reward == "success")
    # A record with a success and no reward gets the usual reward of its success.
    total = header.reward if header.reward is not None else float(success)
    source = UNKNOWN_REWARD if not known and no_reward in ("keep", "skip") else "environment"
    for position, turn in enumerate(turns):
        last = position == len(turns) - 1
        reward = turn.reward if single else total if last else None
        outcome = Outcome(
            next_state=State(text=join(turn.replies) or (END if last else NO_REPLY)),
            reward=reward or 0.0,
            terminated=last,
            success=last and success,
            reward_source=source if last else "environment",
        )
        made.append(
            Transition(state=state, action=turn.action, outcome=outcome, thought=turn.thought or None)
        )
        state = outcome.next_state
    return tuple(made)


def _sum(first: float | None, second: float | None) -> float | None:
    return second if first is None else first if second is None else first + second


def _digest(*texts: str) -> str:
    return hashlib.sha256(dump_json(texts, what="task").encode()).hexdigest()[:16]
