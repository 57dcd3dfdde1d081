"""Comparisons in the reasoning of an experience model, done again by code.

A model that thinks ``cookbook on counter, kitchen = bathroom: yes`` has read both sides correctly and decided
by habit: small models copy long before they compare. Whether two pieces of text are the same needs no model,
so a verdict that is wrong is put right, and the model goes on from there. Annotators write comparisons as
``LEAD, LEFT = RIGHT: yes``; other reasoning is left alone.

Likewise with quotes. Where it was told ``red apple: carried, raw, uncut`` and thinks ``red apple: carried,
fried, diced``, it has written what a meal needs and not what there is, and a policy soon finds out. A quote
is a told fact's name and a colon at the beginning of a clause, as annotators write it; what follows must be
what was told.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

_FACT = "fact: "
_MARKS = frozenset(".;")
"""Where a clause ends: a fact that has one in it cannot be quoted as one."""
_CLAUSE = re.compile(r"(?:(?<=^think: )|(?<=[.;] ))(?P<name>[^.,;:=\n]+): (?P<rest>[^.;\n]*)")
_COMPARISON = re.compile(r"(?P<left>[^.,;:=\n]+) = (?P<right>[^.,;:=\n]+): (?P<verdict>yes|no)\b")


def corrected(reply: str, facts: Sequence[str] = ()) -> str | None:
    """A reply as far as its first wrong verdict or quote, which is put right; None where there is none.

    Args:
        facts: what the model was told, as it was told.

    >>> corrected("think: asked from, table = counter: yes. all is well.")
    'think: asked from, table = counter: no'
    >>> corrected("think: asked from, table = table: yes. asked from table: no.") is None
    True
    >>> corrected("think: knife: carried, sharp; knife, carried = carried: yes.", ["knife: on table, sharp"])
    'think: knife: on table, sharp'
    """
    thought = reply.partition("\n")[0]
    found = [each for each in (_verdict(thought), _quote(thought, facts)) if each is not None]
    if not found:
        return None
    start, right = min(found)
    return thought[:start] + right


def told_facts(question: str) -> list[str]:
    """The facts of a prompt (`reply.prompt`)."""
    return [line.removeprefix(_FACT) for line in question.splitlines() if line.startswith(_FACT)]


def _verdict(thought: str) -> tuple[int, str] | None:
    """Where the first wrong verdict stands, and what it should be."""
    for found in _COMPARISON.finditer(thought):
        right = "yes" if found["left"].strip() == found["right"].strip() else "no"
        if found["verdict"] != right:
            return found.start("verdict"), right
    return None


def _quote(thought: str, facts: Sequence[str]) -> tuple[int, str] | None:
    """Where the first wrong quote begins to quote, and what was told."""
    told: dict[str, list[str]] = {}
    for fact in facts:
        name, colon, rest = fact.partition(": ")
        if colon and not _MARKS & set(rest):
            told.setdefault(name, []).append(rest)
    for found in _CLAUSE.finditer(thought):
        known = told.get(found["name"])
        if known and found["rest"] not in known:
            return found.start("rest"), known[0]
    return None
