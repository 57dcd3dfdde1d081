"""JSON schemas whose replies end in time: every string and list gets a length, so that the whole reply fits.

A small model that is held to a schema may still write one string until its tokens are used up, and half an
object is none. Servers differ in what they take: `exact` keeps what says how long and how many, `plain`
leaves it out.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_SHORTEST = 16
"""Characters of a string that is worth writing."""
_ITEMS = 4
"""Of a list that says nothing of its length."""
_NUMBER = 12
_DENSEST = 2.0
"""Characters of a token, at most, that are counted on: of prose it is twice that, of numbers less."""
_SHARE = 0.6
"""Of the characters that the model wrote in as many tokens: what it writes next may be dearer."""
WORDS = ("minLength", "maxLength", "minItems", "maxItems", "prefixItems")
"""Of a schema, for how long and how many."""


class _EndlessError(Exception):
    """A schema that holds itself: no length fits all that it allows."""


def room_for(tokens: int, written: str) -> int:
    """Characters that fit these tokens, by a reply that has used them up.

    >>> room_for(100, "word " * 90), room_for(100, "7" * 100)
    (200, 60)
    """
    return int(tokens * min(_DENSEST, _SHARE * len(written) / max(tokens, 1)))


def bounded(schema: Mapping[str, Any], characters: int) -> dict[str, Any] | None:
    """The schema of shorter replies; None where it has no end.

    >>> parts = {"a": {"type": "string"}, "b": {"type": "string"}, "sure": {"type": "boolean"}}
    >>> bounded({"type": "object", "properties": parts}, 100)["properties"]["a"]
    {'type': 'string', 'maxLength': 29}
    """
    try:
        fitted = _fitted(schema, characters, _Definitions(schema))
    except _EndlessError:
        return None
    fitted.pop("$defs", None)
    return fitted


def exact(schema: Any) -> Any:
    """Lists that name each of their items allow no others: some servers look at either and not at both."""
    if _names_items(schema):
        schema = {name: each for name, each in schema.items() if name != "items"}
    return _each(schema, exact)


def plain(schema: Any) -> Any:
    """Without anything about how long and how many, for servers that refuse it."""
    return _without(schema, WORDS)


def _names_items(schema: Any) -> bool:
    return isinstance(schema, dict) and isinstance(schema.get("prefixItems"), list)


def _each(schema: Any, change: Any) -> Any:
    if isinstance(schema, list):
        return [change(each) for each in schema]
    return {name: change(each) for name, each in schema.items()} if isinstance(schema, dict) else schema


def _without(schema: Any, words: tuple[str, ...]) -> Any:
    """In `properties` names are the user's own: there nothing is left out."""
    if not isinstance(schema, dict):
        return _each(schema, lambda each: _without(each, words))
    return {
        name: {own: _without(inner, words) for own, inner in each.items()}
        if name == "properties" and isinstance(each, dict)
        else _without(each, words)
        for name, each in schema.items()
        if name not in words
    }


class _Definitions:
    """What a schema calls by name; a name within itself has no end."""

    def __init__(self, schema: Mapping[str, Any]) -> None:
        self._known = schema.get("$defs", {})
        self._within: tuple[str, ...] = ()

    def found(self, schema: Mapping[str, Any]) -> tuple[Mapping[str, Any], _Definitions]:
        if "$ref" not in schema:
            return schema, self
        name = str(schema["$ref"]).removeprefix("#/$defs/")
        if name in self._within or name not in self._known:
            raise _EndlessError
        inner = _Definitions({"$defs": self._known})
        inner._within = (*self._within, name)
        rest = {key: each for key, each in schema.items() if key != "$ref"}
        return inner.found(self._known[name] | rest)


def _fitted(schema: Mapping[str, Any], room: int, names: _Definitions) -> dict[str, Any]:
    schema, names = names.found(schema)
    told = dict(schema)
    for either in ("anyOf", "oneOf"):
        if either in schema:
            told[either] = [_fitted(each, room, names) for each in schema[either]]
    if "enum" in schema or "const" in schema:
        return told
    if schema.get("type") == "string":
        told["maxLength"] = _length(schema, room)
    elif schema.get("type") == "array":
        told |= _fitted_list(schema, room - 2, names)
    elif isinstance(properties := schema.get("properties"), dict):
        told["properties"] = _fitted_properties(properties, room - 2, names)
    return told


def _length(schema: Mapping[str, Any], room: int) -> int:
    return int(min(schema.get("maxLength", room), max(room - 2, schema.get("minLength", 1), 1)))


def _fitted_list(schema: Mapping[str, Any], room: int, names: _Definitions) -> dict[str, Any]:
    if _names_items(schema):
        named = schema["prefixItems"]
        return {"prefixItems": [_fitted(each, room // max(len(named), 1) - 2, names) for each in named]}
    items = schema.get("items", {})
    most = min(schema.get("maxItems", _ITEMS), _ITEMS, room // (_least(items, names) + 2))
    most = max(most, schema.get("minItems", 0))
    return {"maxItems": most, "items": _fitted(items, room // max(most, 1) - 2, names)}


def _fitted_properties(
    properties: Mapping[str, Mapping[str, Any]], room: int, names: _Definitions
) -> dict[str, Any]:
    """What has a length of its own takes it; the others share what is left."""
    room -= sum(len(name) + 6 for name in properties)
    own = {name: _own(each, names) for name, each in properties.items()}
    left = room - sum(length or 0 for length in own.values())
    share = max(left // max(sum(length is None for length in own.values()), 1), _SHORTEST)
    return {name: _fitted(each, own[name] or share, names) for name, each in properties.items()}


def _own(schema: Mapping[str, Any], names: _Definitions) -> int | None:
    """Characters of what cannot grow; None of what can."""
    schema, names = names.found(schema)
    if "enum" in schema or "const" in schema:
        return max(
            (len(repr(each)) for each in [*schema.get("enum", ()), schema.get("const", "")]), default=0
        )
    if "anyOf" in schema:
        several = [_own(each, names) for each in schema["anyOf"]]
        return None if None in several else max((each or 0 for each in several), default=0)
    return _NUMBER if schema.get("type") in ("boolean", "integer", "number", "null") else None


def _least(schema: Mapping[str, Any], names: _Definitions) -> int:
    """Characters below which there is nothing worth saying."""
    if (own := _own(schema, names)) is not None:
        return own
    schema, names = names.found(schema)
    if isinstance(properties := schema.get("properties"), dict):
        return sum(len(name) + 6 + _least(each, names) for name, each in properties.items())
    if schema.get("type") == "array":
        return 2 + int(schema.get("minItems", 0)) * _least(schema.get("items", {}), names)
    return _SHORTEST
