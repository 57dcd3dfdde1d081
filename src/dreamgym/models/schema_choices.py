"""Lists every JSON text that a small JSON schema allows, as choices for constrained decoding."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping
from typing import Any

from dreamgym.errors import ConfigError

MAX_CHOICES = 2_000
_MAX_WORK = 20_000
"""Subschemas and texts visited in all: `$defs` let a small schema describe 10^8 of them."""
_MAX_CHARACTERS = 4_000_000
_FIELD = "response_format"


def schema_choices(schema: Mapping[str, Any]) -> tuple[str, ...]:
    """
    >>> schema_choices({"type": "object", "properties": {"done": {"type": "boolean"}}, "required": ["done"]})
    ('{"done": false}', '{"done": true}')

    Raises:
        ConfigError: the schema is malformed, or allows infinitely many texts, or too many.
    """
    definitions = schema.get("$defs", {})
    if not isinstance(definitions, Mapping):
        raise ConfigError(f"{_FIELD}: expected $defs of the json_schema to be an object")
    found = _Expansion(definitions).texts(schema)
    if not found:
        raise ConfigError(f"{_FIELD}: expected a json_schema that allows at least one reply")
    return tuple(found)


class _Expansion:
    def __init__(self, definitions: Mapping[str, Any]) -> None:
        self._definitions = definitions
        self._work = 0
        self._characters = 0

    def texts(self, schema: Any, depth: int = 0) -> list[str]:
        self._count(1)
        if not isinstance(schema, Mapping) or depth > 32:
            raise ConfigError(f"{_FIELD}: expected a json_schema made of objects, at most 32 deep")
        if "$ref" in schema:
            target = self._definitions.get(str(schema["$ref"]).rpartition("/")[2])
            return self.texts(target, depth + 1)
        if schema.get("type") == "object" and isinstance(schema.get("properties"), Mapping):
            return self._objects(schema, depth)
        return self._dump(schema)

    def _objects(self, schema: Mapping[str, Any], depth: int) -> list[str]:
        properties, required = schema["properties"], schema.get("required", [])
        if not isinstance(required, list) or sorted(map(str, required)) != sorted(properties):
            raise ConfigError(f"{_FIELD}: expected a json_schema whose properties are all required")
        parts = [
            [f"{json.dumps(name, ensure_ascii=False)}: {text}" for text in self.texts(each, depth + 1)]
            for name, each in properties.items()
        ]
        found: list[str] = []
        for values in itertools.product(*parts):
            found.append("{" + ", ".join(values) + "}")
            self._count(1, len(found[-1]))
            self._check_number(len(found))
        return found

    def _dump(self, schema: Mapping[str, Any]) -> list[str]:
        values: list[Any] | range
        kind, low, high = schema.get("type"), schema.get("minimum"), schema.get("maximum")
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
        else:
            raise ConfigError(
                f"{_FIELD}: this server supports a json_schema with finitely many replies only (enum, const, "
                f"boolean, bounded integer, object of these), got {json.dumps(dict(schema))[:200]}"
            )
        self._check_number(len(values))
        found = [json.dumps(value, ensure_ascii=False) for value in values]
        self._count(len(found), sum(map(len, found)))
        return found

    def _check_number(self, choices: int) -> None:
        if choices > MAX_CHOICES:
            raise ConfigError(f"{_FIELD}: expected a json_schema that allows at most {MAX_CHOICES:,} replies")

    def _count(self, work: int, characters: int = 0) -> None:
        self._work += work
        self._characters += characters
        if self._work > _MAX_WORK or self._characters > _MAX_CHARACTERS:
            raise ConfigError(f"{_FIELD}: the json_schema is too large to list its replies")
