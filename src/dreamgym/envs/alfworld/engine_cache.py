"""Caches pure functions of the simulator's text generation.

To render admissible commands, the simulator parses the same templates and queries at every step and
deep-copies its context: 93% of a step. The functions below return the same values from a cache. They are
installed only inside episode processes; `tests/envs/test_alfworld_episodes.py` compares all texts with the
original simulator.
"""

from __future__ import annotations

import copy
import functools
import re
from collections.abc import Callable
from typing import Any

_TASK = re.compile(r'(?<=Your task is to: ).*?(?=\.")')
_PLACEHOLDER = "UNKNOWN GOAL"


def install() -> None:
    """Replace the pure functions of `textworld.envs.pddl` in this process."""
    from textworld.envs.pddl import logic, textgen
    from textworld.logic import Rule

    textgen.deepcopy = _copy
    textgen._parse_and_convert = _cached_parse(textgen._parse_and_convert)
    Rule.parse_conjunctive_query = functools.lru_cache(maxsize=None)(Rule.parse_conjunctive_query)
    logic._parse_and_convert = _cached_grammar(logic._parse_and_convert, textgen)


def _copy(value: Any) -> Any:
    """Copy what the text generator mutates: a symbol's context and a context's tables.

    Entities, placeholders and parsed expressions are only read.
    """
    if isinstance(value, list):
        return [_copy(item) for item in value]
    if isinstance(value, dict):
        return dict(value)
    made = copy.copy(value)
    inner = getattr(made, "symbol", None)
    if inner is not None and not isinstance(inner, str):  # a ListSymbol sets the context of the one inside
        made.symbol = _copy(inner)
    return made


def _cached_parse(parse: Callable[..., Any]) -> Callable[..., Any]:
    cache: dict[tuple[str, str], Any] = {}

    def lookup(text: str, *, rule_name: str, trace: bool = False) -> Any:
        key = text, rule_name
        if key not in cache:
            cache[key] = parse(text, rule_name=rule_name, trace=trace)
        return _copy(cache[key])

    return lookup


def _cached_grammar(parse: Callable[..., Any], textgen: Any) -> Callable[..., Any]:
    """Games of one source differ only in the sentence with the task: parse the rest once."""
    cache: dict[str, Any] = {}

    def lookup(text: str, *, rule_name: str) -> Any:
        found = _TASK.search(text)
        if rule_name != "pddlStart" or found is None:
            return parse(text, rule_name=rule_name)
        common = text[: found.start()] + _PLACEHOLDER + text[found.end() :]
        if common not in cache:
            cache[common] = parse(common, rule_name=rule_name)
        actions, grammar = cache[common]
        own = textgen.ContextSensitiveGrammar()
        own._rules.update(grammar._rules)
        sentence = f"Your task is to: {found.group()}."
        own._rules["task"] = [
            textgen.ProductionRule(
                lhs="task", rhs=textgen._parse_and_convert(sentence, rule_name="symbols"), condition=""
            )
        ]
        return actions, own

    return lookup
