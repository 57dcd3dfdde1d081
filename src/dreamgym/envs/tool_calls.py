"""Tool calls as texts: ``NAME {"argument": "value"}``. Describes tools to an agent, and parses and checks
what it replies."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dreamgym.data.schema import parse_json
from dreamgym.errors import DataError
from dreamgym.structured import one_line
from dreamgym.types import Task

ANSWER = "answer"
_DESCRIPTION = 200
"""Characters of a tool's description that are shown."""
_REASON = 300
"""Characters of a refusal's reason."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tool:
    """A tool as its server announces it."""

    name: str
    description: str = ""
    schema: Mapping[str, Any] = field(default_factory=dict)
    """JSON Schema of the arguments."""


ANSWER_TOOL = Tool(
    name=ANSWER,
    description="End the episode with this answer.",
    schema={
        "type": "object",
        "properties": {"text": {"type": "string"}},
        "required": ["text"],
        "additionalProperties": False,
    },
)
"""Ends an episode; the only tool that no server offers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """One action of an episode and what came of it."""

    action: str
    """As the agent wrote it."""
    tool: str | None
    """None if the action was refused before any tool was called."""
    arguments: Mapping[str, Any]
    result: str
    """What the agent saw."""
    failed: bool
    """Refused, or the tool reported an error."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeRecord:
    """What a check receives: the task, and all calls of the episode so far."""

    task: Task
    calls: Sequence[ToolCall]
    folder: Path | None = None
    """The episode's own folder, if the command of the server names ``{folder}``."""

    @property
    def answer(self) -> str | None:
        """The text of the final answer; None while there is none."""
        last = self.calls[-1] if self.calls else None
        if last is None or last.tool != ANSWER or last.failed:
            return None
        return str(last.arguments.get("text", ""))


class RefusedCallError(Exception):
    """An action that is no valid call of a tool; the message says why."""


def parse_call(action: str, tools: Mapping[str, Tool]) -> tuple[str, dict[str, Any]]:
    """The tool and the arguments of an action.

    >>> tools = {"add": Tool(name="add", schema={"type": "object", "properties": {"a": {"type": "integer"}}})}
    >>> parse_call('add {"a": 1}', tools), parse_call("add", tools)
    (('add', {'a': 1}), ('add', {}))
    >>> parse_call('add {"a": "one"}', tools)
    Traceback (most recent call last):
    dreamgym.envs.tool_calls.RefusedCallError: add: argument 'a': 'one' is not of type 'integer'

    Raises:
        RefusedCallError: there is no such tool, the arguments are no JSON object, or they do not fit the
            tool's schema.
    """
    name, _, text = action.strip().partition(" ")
    if name not in tools:
        brace = name.find("{")
        if brace > 0 and name[:brace] in tools:
            raise RefusedCallError(f"expected a space between {name[:brace]} and its arguments")
        raise RefusedCallError(f"unknown tool {name[:80]!r}; tools: {', '.join(tools)}"[:_REASON])
    if not text.strip():
        arguments: Any = {}
    else:
        try:
            arguments = parse_json(text)
            json.dumps(arguments, allow_nan=False)  # a number beyond a float's range
        except (DataError, ValueError) as error:
            raise RefusedCallError(f"{name}: {str(error)[:_REASON]}") from None
    if not isinstance(arguments, dict):
        raise RefusedCallError(f"{name}: expected a JSON object of arguments, got {text[:80]!r}")
    problem = _problem(arguments, tools[name].schema)
    if problem is not None:
        raise RefusedCallError(f"{name}: {problem[:_REASON]}")
    return name, arguments


def _problem(arguments: dict[str, Any], schema: Mapping[str, Any]) -> str | None:
    """How arguments break their schema; None if they fit, or if the schema itself is invalid: the server
    then decides."""
    from jsonschema.exceptions import SchemaError, best_match
    from jsonschema.validators import Draft202012Validator, validator_for
    from referencing import Registry
    from referencing.exceptions import Unresolvable

    try:
        kind: Any = validator_for(schema, default=Draft202012Validator)
        kind.check_schema(schema)
        # The empty registry: a schema cannot make us fetch an address.
        error = best_match(kind(schema, registry=Registry()).iter_errors(arguments))
    except (SchemaError, Unresolvable, RecursionError, ValueError, TypeError, OverflowError):
        return None
    if error is None:
        return None
    place = ".".join(map(str, error.absolute_path))
    return f"argument {place!r}: {error.message}" if place else str(error.message)


def describe_tools(tools: Sequence[Tool], *, limit: int) -> str:
    """The tools as an agent reads them, one line each.

    >>> print(describe_tools([ANSWER_TOOL], limit=1000))
    Call a tool by its name and a JSON object of arguments:
    answer {"text": string} - End the episode with this answer.
    """
    lines = ["Call a tool by its name and a JSON object of arguments:"]
    for tool in tools:
        about = one_line(tool.description)[:_DESCRIPTION]
        lines.append(f"{tool.name} {signature(tool.schema)}" + (f" - {about}" if about else ""))
    return shortened("\n".join(lines), limit)


def signature(schema: Mapping[str, Any], depth: int = 0) -> str:
    """The arguments of a tool in short; ``?`` marks those that may be left out.

    >>> kinds = {"path": {"type": "string"}, "depth": {"enum": [1, 2]}}
    >>> signature({"properties": kinds, "required": ["path"]})
    '{"path": string, "depth"?: 1 | 2}'
    """
    properties, required = schema.get("properties"), schema.get("required")
    if not isinstance(properties, dict):
        return "{}"
    needed = set(map(str, required)) if isinstance(required, list) else set()
    parts = [
        f'"{name}"{"" if name in needed else "?"}: {_type(kind, depth)}' for name, kind in properties.items()
    ]
    return "{" + ", ".join(parts) + "}"


def _type(kind: Any, depth: int) -> str:
    if not isinstance(kind, dict) or depth > 3:
        return "any"
    if isinstance(kind.get("enum"), list):
        return " | ".join(json.dumps(value) for value in kind["enum"][:20])
    for several in ("anyOf", "oneOf"):
        if isinstance(kind.get(several), list):
            return " | ".join(_type(each, depth + 1) for each in kind[several][:8])
    if kind.get("type") == "array":
        return f"[{_type(kind.get('items'), depth + 1)}]"
    if kind.get("type") == "object" and isinstance(kind.get("properties"), dict):
        return signature(kind, depth + 1)
    found = kind.get("type", "any")
    return " | ".join(map(str, found)) if isinstance(found, list) else str(found)


def shortened(text: str, limit: int) -> str:
    """At most `limit` characters, and how many were left out.

    >>> shortened("abcdef", 4), shortened("abcd", 4)
    ('abcd… (2 more characters)', 'abcd')
    """
    return text if len(text) <= limit else f"{text[:limit]}… ({len(text) - limit} more characters)"
