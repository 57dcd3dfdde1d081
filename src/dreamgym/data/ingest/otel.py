"""OpenTelemetry spans with the GenAI conventions.

A file holds OTLP JSON (``resourceSpans``), or one span per line, as OTLP writes it or as the Python SDK
prints it. Each model call is one span that repeats the conversation so far. The spans of one agent are sorted
by time, and the new messages of each are added to one conversation, which becomes a trajectory.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from dreamgym.data.ingest.dialogue import (
    Call,
    Defaults,
    Header,
    Message,
    join,
    make_trajectory,
    parse_arguments,
    parse_time,
)
from dreamgym.data.ingest.json_reader import Foreign, Record
from dreamgym.data.ingest.messages import ROLES, parse_message
from dreamgym.data.schema import check, parse_json, shorten
from dreamgym.errors import DataError
from dreamgym.files import OnBad, report
from dreamgym.types import Trajectory

MODEL_CALLS = {"chat", "generate_content", "text_completion", None}
"""Values of ``gen_ai.operation.name`` that are a call of the model; older instrumentations set none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """The part of a span that is read."""

    where: str
    trace_id: str
    span_id: str
    parent_id: str | None
    start: float
    """Seconds since the epoch."""
    attributes: dict[str, Any]
    """Those of its events included."""
    verdict: dict[str, Any]
    """The attributes of its last ``gen_ai.evaluation.result`` event."""

    @property
    def operation(self) -> str | None:
        return _text(self.attributes.get("gen_ai.operation.name"))

    @property
    def calls_model(self) -> bool:
        return self.operation in MODEL_CALLS and "gen_ai.output.messages" in self.attributes

    def messages(self, key: str) -> list[Message]:
        return [
            message
            for position, value in enumerate(_list(self.attributes.get(key), key))
            for message in _messages(value, position)
        ]


@dataclass(slots=True)
class _Conversation:
    """The spans of one agent in one trace, or of one conversation over several."""

    id: str
    agent: Span | None = None
    spans: list[Span] = field(default_factory=list)


def recognises(value: Any) -> bool:
    if not isinstance(value, dict):
        return False
    return bool({"resourceSpans", "resource_spans"} & set(value)) or (
        "attributes" in value and bool({"traceId", "trace_id", "context"} & set(value))
    )


def from_records(
    records: Iterable[Record], defaults: Defaults, on_bad: OnBad | None
) -> Iterator[tuple[str, Trajectory]]:
    """(place, trajectory) of every conversation in the spans of a file. All spans are held in memory."""
    spans: list[Span] = []
    for record in records:
        try:
            spans += _spans(record)
        except DataError as error:
            report(record.refuse(error), on_bad)
    made = 0
    for conversation in _conversations(spans):
        where = conversation.spans[0].where
        try:
            trajectory = _trajectory(conversation, defaults)
        except DataError as error:
            report(DataError(f"{where}: {error}"), on_bad)
        else:
            made += 1
            yield where, trajectory
    if spans and not made:
        report(
            DataError(
                f"{spans[0].where}: expected spans with gen_ai.input.messages and gen_ai.output.messages "
                f"(is the capture of content switched on?), got {len(spans)} without"
            ),
            on_bad,
        )


def _spans(record: Record) -> Iterator[Span]:
    value = record.value
    resources = _either(value, "resourceSpans", "resource_spans") if isinstance(value, dict) else None
    if resources is None:
        yield _span(value, record.where)
        return
    for resource in _list(resources, "resourceSpans"):
        for scope in _list(_either(_dict(resource), "scopeSpans", "scope_spans"), "scopeSpans"):
            for span in _list(_dict(scope).get("spans"), "spans"):
                yield _span(span, record.where)


def _span(value: Any, where: str) -> Span:
    span = _dict(value)
    context = span.get("context") or span
    attributes, verdict = _attributes(span.get("attributes")), {}
    for event in _list(span.get("events"), "events"):
        found = _attributes(_dict(event).get("attributes"))
        if event.get("name") == "gen_ai.evaluation.result":
            verdict = found
        else:
            attributes = found | attributes
    trace_id = _text(_either(_dict(context), "traceId", "trace_id"))
    span_id = _text(_either(context, "spanId", "span_id"))
    if not trace_id or not span_id:
        raise DataError(f"expected a span with a trace id and a span id, got {shorten(value)}")
    return Span(
        where=where,
        trace_id=trace_id,
        span_id=span_id,
        parent_id=_text(_either(span, "parentSpanId", "parent_id", "parent_span_id")),
        start=parse_time(_either(span, "startTimeUnixNano", "start_time_unix_nano", "start_time")),
        attributes=attributes,
        verdict=verdict,
    )


def _conversations(spans: Sequence[Span]) -> Iterable[_Conversation]:
    by_id = {(span.trace_id, span.span_id): span for span in spans}
    found: dict[tuple[str, ...], _Conversation] = {}
    for span in sorted(spans, key=lambda each: each.start):
        if not (span.calls_model or span.operation in ("execute_tool", "invoke_agent")):
            continue
        above = _ancestors(span, by_id)
        if span.calls_model and any(each.calls_model for each in above):
            continue  # a client library's span inside a framework's: the same call twice
        agent = next((each for each in [span, *above] if each.operation == "invoke_agent"), None)
        session = _text(span.attributes.get("gen_ai.conversation.id")) or (
            agent and _text(agent.attributes.get("gen_ai.conversation.id"))
        )
        name = _text(agent.attributes.get("gen_ai.agent.name")) if agent else None
        key = (session, name or "") if session else (span.trace_id, agent.span_id if agent else "")
        conversation = found.setdefault(key, _Conversation("-".join(filter(None, key))))
        conversation.agent = conversation.agent or agent
        conversation.spans.append(span)
    return found.values()


def _ancestors(span: Span, by_id: dict[tuple[str, str], Span]) -> list[Span]:
    above: list[Span] = []
    seen = {span.span_id}
    while span.parent_id and span.parent_id not in seen and (span.trace_id, span.parent_id) in by_id:
        span = by_id[span.trace_id, span.parent_id]
        seen.add(span.span_id)  # a hostile file may name a span its own ancestor
        above.append(span)
    return above


def _trajectory(conversation: _Conversation, defaults: Defaults) -> Trajectory:
    calls = [span for span in conversation.spans if span.calls_model]
    tools = [span for span in conversation.spans if span.operation == "execute_tool"]
    if calls:
        messages = _with_results(_merged(calls), tools)
    elif conversation.agent is not None:
        messages = _from_tools(conversation.agent, tools)
    else:
        raise DataError("expected a span of a model call or an agent with these tool calls, got none")
    verdict: dict[str, Any] = {}
    for span in conversation.spans:
        verdict |= span.verdict
    label = _text(verdict.get("gen_ai.evaluation.score.label"))
    first, named = conversation.spans[0], conversation.agent or (calls or conversation.spans)[0]
    header = Header(
        id=conversation.id,
        policy=_text(
            _either(named.attributes, "gen_ai.agent.name", "gen_ai.response.model", "gen_ai.request.model")
        ),
        recorded_at=first.start,
        reward=check(_Score, {"value": verdict.get("gen_ai.evaluation.score.value")}).value,
        success=None if label is None else label in ("pass", "passed", "success"),
    )
    return make_trajectory(messages, header, defaults)


class _Score(Foreign):
    value: float | None


def _merged(spans: Sequence[Span]) -> list[Message]:
    """One conversation from model calls that each repeat, continue or shorten what went before."""
    merged: list[Message] = []
    for span in spans:
        system = _list(span.attributes.get("gen_ai.system_instructions"), "gen_ai.system_instructions")
        given = _messages({"role": "system", "parts": system}, 0) if system else []
        given += span.messages("gen_ai.input.messages")
        merged = _continue(merged, given) if merged and given else merged or given
        merged += span.messages("gen_ai.output.messages")[:1]
    return merged


def _continue(known: list[Message], given: list[Message]) -> list[Message]:
    """The messages after `given`: history that it repeats is not added again."""
    before, now = [_essence(message) for message in known], [_essence(message) for message in given]
    if now == before[: len(now)]:
        return known[: len(now)]  # a new request from an earlier point: the later reply counts
    for overlap in range(min(len(before), len(now)), 0, -1):
        if before[-overlap:] == now[:overlap]:
            return [*known, *given[overlap:]]
    # A shortened history: only what follows the agent's last word is news.
    last = max((place for place, message in enumerate(given) if message.role == "assistant"), default=-1)
    return [*known, *given[last + 1 :]]


def _essence(message: Message) -> tuple[Any, ...]:
    """What stays the same when a message is repeated in the history of a later call."""
    return message.role, message.text, tuple(call.action for call in message.calls), message.call_id


def _with_results(messages: Sequence[Message], tools: Sequence[Span]) -> list[Message]:
    """Answer the calls that no later model call shows an answer to from the spans of the tools themselves."""
    answered = {message.call_id for message in messages if message.role == "tool"}
    results = {_text(tool.attributes.get("gen_ai.tool.call.id")): tool for tool in tools}
    complete: list[Message] = []
    for message in messages:
        complete.append(message)
        complete += [
            Message(role="tool", text=_result(results[call.id]), call_id=call.id)
            for call in message.calls
            if call.id is not None and call.id not in answered and call.id in results
        ]
    return complete


def _from_tools(agent: Span, tools: Sequence[Span]) -> list[Message]:
    """The conversation of an agent whose model calls were not recorded: its input, its tools, its output."""
    messages = agent.messages("gen_ai.input.messages")
    for tool in tools:
        call = Call(
            name=_text(tool.attributes.get("gen_ai.tool.name")) or "tool",
            arguments=parse_arguments(tool.attributes.get("gen_ai.tool.call.arguments")),
        )
        messages += [Message(role="assistant", calls=(call,)), Message(role="tool", text=_result(tool))]
    return [*messages, *agent.messages("gen_ai.output.messages")[:1]]


def _result(tool: Span) -> str:
    return _rendered(tool.attributes.get("gen_ai.tool.call.result", tool.attributes.get("error.type")))


def _messages(value: Any, position: int) -> list[Message]:
    """One recorded message; a message with several tool results becomes several."""
    message = _dict(value)
    if "parts" not in message:
        return [parse_message(message, position)]
    role = ROLES.get(_text(message.get("role")) or "")
    if role is None:
        raise DataError(f"expected a role of {', '.join(ROLES)} in message {position}, got {shorten(value)}")
    said, thought, calls, replies = [], [], [], []
    for part in map(_dict, _list(message["parts"], "parts")):
        kind, content = part.get("type"), part.get("content")
        if kind == "reasoning":
            thought.append(_text(content))
        elif kind == "tool_call":
            name = _text(part.get("name"))
            if not name:
                raise DataError(
                    f"expected a tool call with a name in message {position}, got {shorten(part)}"
                )
            calls.append(
                Call(id=_text(part.get("id")), name=name, arguments=parse_arguments(part.get("arguments")))
            )
        elif kind == "tool_call_response":
            text = _rendered(part.get("response", part.get("result")))
            replies.append(Message(role="tool", text=text, call_id=_text(part.get("id"))))
        else:
            said.append(_text(content) if kind == "text" else f"[{part.get('modality') or kind}]"[:40])
    text = join(said)
    if replies and not (text or calls):
        return replies
    spoken = Message(role=role, text=text, thought=join(thought) or None, calls=tuple(calls))
    return [*replies, spoken]


def _attributes(value: Any) -> dict[str, Any]:
    """Attributes as OTLP writes them (a list of key and typed value) or as SDKs print them (an object)."""
    if isinstance(value, dict):
        return value
    pairs = [_dict(pair) for pair in _list(value, "attributes")]
    return {str(pair.get("key")): _plain(pair.get("value")) for pair in pairs}


def _plain(value: Any) -> Any:
    """The plain value inside OTLP's typed one."""
    if not isinstance(value, dict) or len(value) != 1:
        return value
    ((kind, inner),) = value.items()
    if kind == "arrayValue":
        return [_plain(item) for item in _list(_dict(inner).get("values"), "values")]
    if kind == "kvlistValue":
        return _attributes(_list(_dict(inner).get("values"), "values"))
    if kind == "intValue" and isinstance(inner, str):
        return parse_json(inner)
    return inner


def _list(value: Any, what: str) -> list[Any]:
    """A list, also where it came as JSON inside a string; nothing is an empty one."""
    if isinstance(value, str):
        value = parse_json(value)
    if value is None:
        return []
    if not isinstance(value, list):
        raise DataError(f"expected {what} to be a list, got {shorten(value)}")
    return value


def _dict(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise DataError(f"expected an object, got {shorten(value)}")
    return value


def _either(value: dict[str, Any], *keys: str) -> Any:
    return next((value[key] for key in keys if value.get(key) is not None), None)


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) and value else None


def _rendered(value: Any) -> str:
    if value is None or isinstance(value, str):
        return value or ""
    return Call(name="", arguments=value).action[1:-1]
