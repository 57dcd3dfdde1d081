"""What is pure in the engine's text generation, computed once instead of at every step.

The engine words every admissible command by parsing the same templates and queries again and deep-copying
its context, which was 93% of a step. The functions below return the same values from a memo. They are
installed only inside engine processes, and `tests/envs/test_alfworld_engine.py` proves the resulting texts
equal, word for word, to those of the untouched engine.
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

    textgen.deepcopy = _fresh
    textgen._parse_and_convert = _memoised(textgen._parse_and_convert)
    Rule.parse_conjunctive_query = functools.lru_cache(maxsize=None)(Rule.parse_conjunctive_query)
    logic._parse_and_convert = _grammar_memo(logic._parse_and_convert, textgen)


def _fresh(value: Any) -> Any:
    """Copy what the text generator mutates (a symbol's context, a context's tables) and nothing below it.

    Entities, placeholders and parsed expressions are only ever read there.
    """
    if isinstance(value, list):
        return [_fresh(item) for item in value]
    if isinstance(value, dict):
        return dict(value)
    made = copy.copy(value)
    inner = getattr(made, "symbol", None)
    if inner is not None and not isinstance(inner, str):  # a ListSymbol sets the context of the one inside
        made.symbol = _fresh(inner)
    return made


def _memoised(parse: Callable[..., Any]) -> Callable[..., Any]:
    known: dict[tuple[str, str], Any] = {}

    def lookup(text: str, *, rule_name: str, trace: bool = False) -> Any:
        key = text, rule_name
        if key not in known:
            known[key] = parse(text, rule_name=rule_name, trace=trace)
        return _fresh(known[key])

    return lookup


def _grammar_memo(parse: Callable[..., Any], textgen: Any) -> Callable[..., Any]:
    """Games of one source differ only in the sentence that tells the task: parse the rest once."""
    known: dict[str, Any] = {}

    def lookup(text: str, *, rule_name: str) -> Any:
        found = _TASK.search(text)
        if rule_name != "pddlStart" or found is None:
            return parse(text, rule_name=rule_name)
        common = text[: found.start()] + _PLACEHOLDER + text[found.end() :]
        if common not in known:
            known[common] = parse(common, rule_name=rule_name)
        actions, grammar = known[common]
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
