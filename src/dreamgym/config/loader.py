"""Reads, validates and lists settings; error messages name the setting and what would be right."""

from __future__ import annotations

import difflib
import json
import tomllib
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError

from dreamgym.config.sections import Config
from dreamgym.errors import ConfigError

S = TypeVar("S", bound=BaseModel)


def load_config(path: Path | None = None, overrides: Sequence[str] = ()) -> Config:
    """Resolve the configuration from an optional TOML file and ``a.b=c`` overrides.

    >>> load_config(overrides=["collect.episodes=7", "environment.name=textworld"]).collect.episodes
    7
    >>> load_config(overrides=["collect.episode=7"])
    Traceback (most recent call last):
    dreamgym.errors.ConfigError: unknown setting 'collect.episode'; did you mean 'collect.episodes'?
    """
    return validate(Config, config_values(path, overrides))


def config_values(path: Path | None = None, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """What a TOML file and overrides state, not validated and without defaults."""
    values: dict[str, Any] = {}
    if path is not None:
        try:
            values = tomllib.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise ConfigError(f"expected a TOML file, found nothing at {str(path)!r}") from None
        except RecursionError:
            raise ConfigError(f"{path}: expected TOML, got values nested too deeply to read") from None
        except (OSError, ValueError) as error:  # ValueError: also digits beyond Python's limit for integers
            raise ConfigError(f"{path}: expected TOML, {error}") from None
    for override in overrides:
        _apply_override(values, override)
    return values


def validate(model: type[S], values: Mapping[str, Any], *, prefix: str = "") -> S:
    """Build `model` from untrusted values, or say which setting is wrong, how, and what would be right."""
    try:
        return model.model_validate(values)
    except ValidationError as error:
        raise ConfigError("; ".join(_explain(model, problem, prefix) for problem in error.errors())) from None


def settings(model: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, str, Any, str]]:
    """(dotted name, type, default, description) of every setting below a model."""
    for name, info in model.model_fields.items():
        section = _section(info.annotation)
        if section is not None:
            place = name if section is info.annotation else f"{name}.NAME"
            yield from settings(section, f"{prefix}{place}.")
            continue
        kind = type_in_words(info.annotation)
        yield f"{prefix}{name}", kind, info.get_default(call_default_factory=True), info.description or ""


_TYPE_WORDS = {
    bool: "true or false",
    int: "whole number",
    float: "number",
    str: "text",
    Path: "path",
    type(None): "none",
    Any: "any value",
}


def type_in_words(kind: Any) -> str:
    """The type of a setting in plain words.

    >>> type_in_words(int | None), type_in_words(Literal["both", "cooking"]), type_in_words(list[str])
    ('whole number or none', 'one of: both, cooking', 'list of text')
    """
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is Literal:
        return f"one of: {', '.join(str(value) for value in arguments)}"
    if origin in (Union, UnionType):
        return " or ".join(type_in_words(part) for part in arguments)
    if origin in (list, tuple, set, frozenset):
        return f"list of {type_in_words(arguments[0])}"
    if origin is dict:
        return f"table of {type_in_words(arguments[1])}"
    if origin is Annotated:
        return type_in_words(arguments[0])
    return _TYPE_WORDS.get(kind, str(getattr(kind, "__name__", kind)))


def nearest_name(wanted: str, known: Collection[str]) -> str:
    """``; did you mean 'x'?`` or a list of what there is.

    >>> nearest_name("alfwrld", ["alfworld", "textworld"])
    "; did you mean 'alfworld'?"
    """
    close = difflib.get_close_matches(wanted, known, n=1, cutoff=0.5)
    return f"; did you mean {close[0]!r}?" if close else f"; expected one of: {', '.join(sorted(known))}"


def _apply_override(values: dict[str, Any], override: str) -> None:
    name, separator, text = override.partition("=")
    keys = name.strip().split(".")
    if not separator or not all(keys):
        raise ConfigError(f"expected --set section.key=value, got {override!r}")
    table = values
    for key in keys[:-1]:
        table = table.setdefault(key, {})
        if not isinstance(table, dict):
            raise ConfigError(f"cannot set {name!r}: {key!r} holds a value, not a section")
    try:
        # A TOML value where it parses as one (numbers, lists, booleans, quoted text), else plain text.
        table[keys[-1]] = tomllib.loads(f"value = {text}")["value"]
    except (ValueError, RecursionError):
        table[keys[-1]] = text


def _section(annotation: Any) -> type[BaseModel] | None:
    """The section that a field is, or that each of its named entries is."""
    if get_origin(annotation) is dict:
        annotation = get_args(annotation)[-1]
    return annotation if isinstance(annotation, type) and issubclass(annotation, BaseModel) else None


def _explain(model: type[BaseModel], problem: Any, prefix: str) -> str:
    location = [str(part) for part in problem["loc"]]
    name = prefix + ".".join(location)
    if problem["type"] != "extra_forbidden":
        # An API key that stands in the wrong field must not reach a log.
        shown = "" if location[0] == "endpoints" else f", got {_short(problem['input'])}"
        return f"setting {name!r}: {problem['msg'].lower()}{shown}"
    for part in location[:-1]:
        info = model.model_fields.get(part)  # None: the name of an entry
        model = (_section(info.annotation) if info is not None else None) or model
    parent = prefix + "".join(f"{part}." for part in location[:-1])
    siblings = [parent + field for field in model.model_fields]
    if parent or difflib.get_close_matches(name, siblings, n=1, cutoff=0.7):
        return f"unknown setting {name!r}{nearest_name(name, siblings)}"
    return f"unknown setting {name!r}{_elsewhere(name, siblings)}"


def _elsewhere(key: str, sections: Sequence[str]) -> str:
    """Suggestions for a key that was given without its section, the likeliest first.

    >>> _elsewhere("horizon", ["train"])
    "; did you mean 'train.horizon'? Options of the environment: environment.options.horizon"
    >>> _elsewhere("family", ["train"])
    "; did you mean 'environment.options.family' (an option of the environment) or 'experience.family'?"
    """
    option = f"environment.options.{key}"
    same = [name for name, *_ in settings(Config) if name.rpartition(".")[2] == key]
    listed = " or ".join(map(repr, same))
    if same and not any(name.startswith(("train.", "learner.", "collect.")) for name in same):
        return f"; did you mean {option!r} (an option of the environment) or {listed}?"
    known = f"; did you mean {listed}?" if same else f"{nearest_name(key, sections)}."
    return f"{known} Options of the environment: {option}"


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 200 else f"{text[:200]}…"


def config_json(config: BaseModel) -> str:
    return json.dumps(config.model_dump(mode="json"), indent=2)
