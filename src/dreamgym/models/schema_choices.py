"""Lists every JSON text that a small JSON schema allows, as choices for constrained decoding."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from dreamgym.errors import ConfigError

MAX_CHOICES = 2_000
_MAX_WORK = 20_000
"""Subschemas and texts visited in all: `$defs` let a small schema describe 10^8 of them."""
_MAX_CHARACTERS = 4_000_000
_MAX_DEPTH = 32


def schema_choices(schema: Mapping[str, Any]) -> tuple[str, ...]:
    """
    >>> schema_choices({"type": "object", "properties": {"done": {"type": "boolean"}}, "required": ["done"]})
    ('{"done": false}', '{"done": true}')

    Raises:
        ConfigError: the schema is malformed, or allows no text, infinitely many, or too many.
    """
    definitions = schema.get("$defs", {})
    if not isinstance(definitions, Mapping):
        raise _unsupported("$defs is not an object")
    found = _Expansion(definitions).texts(schema)
    if not found:
        raise _unsupported("it allows no reply")
    return tuple(found)


class _Expansion:
    def __init__(self, definitions: Mapping[str, Any]) -> None:
        self._definitions = definitions
        self._work = 0

    def texts(self, schema: Any, depth: int = 0) -> list[str]:
        if not isinstance(schema, Mapping) or depth > _MAX_DEPTH:
            raise _unsupported(f"expected nested objects, at most {_MAX_DEPTH} deep")
        if "$ref" in schema:
            found = self.texts(self._definitions.get(str(schema["$ref"]).rpartition("/")[2]), depth + 1)
        elif schema.get("type") == "object" and isinstance(schema.get("properties"), Mapping):
            found = self._objects(schema["properties"], schema.get("required"), depth)
        else:
            found = [json.dumps(value, ensure_ascii=False) for value in _values(schema)]
        self._work += 1 + len(found)
        if self._work > _MAX_WORK:
            raise _unsupported("it is too large to list its replies")
        return found

    def _objects(self, properties: Mapping[str, Any], required: Any, depth: int) -> list[str]:
        if not isinstance(required, list) or sorted(map(str, required)) != sorted(properties):
            raise _unsupported("its properties are not all required")
        parts = [
            [f"{json.dumps(name, ensure_ascii=False)}: {text}" for text in self.texts(each, depth + 1)]
            for name, each in properties.items()
        ]
        count = math.prod(map(len, parts))
        longest = sum(max(map(len, part), default=0) for part in parts)
        if count > MAX_CHOICES or count * longest > _MAX_CHARACTERS:
            raise _unsupported("it is too large to list its replies")
        return ["{" + ", ".join(values) + "}" for values in itertools.product(*parts)]


def _values(schema: Mapping[str, Any]) -> Sequence[Any]:
    kind, low, high = schema.get("type"), schema.get("minimum"), schema.get("maximum")
    values: Sequence[Any] | None = None
    if "const" in schema:
        values = [schema["const"]]
    elif isinstance(schema.get("enum"), list):
        values = schema["enum"]
    elif kind == "boolean":
        values = [False, True]
    elif kind == "null":
        values = [None]
    elif kind == "integer" and isinstance(low, int) and isinstance(high, int):
        values = range(low, min(high, low + MAX_CHOICES) + 1)
    if values is None or len(values) > MAX_CHOICES:
        raise _unsupported(f"got {json.dumps(dict(schema))[:200]}")
    return values


def _unsupported(problem: str) -> ConfigError:
    return ConfigError(
        f"response_format: this server supports a json_schema that allows at most {MAX_CHOICES:,} replies "
        f"(enum, const, boolean, bounded integer, object of these): {problem}"
    )
