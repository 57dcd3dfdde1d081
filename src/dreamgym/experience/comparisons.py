"""Comparisons in the reasoning of an experience model, done again by code.

A model that thinks ``cookbook on counter, kitchen = bathroom: yes`` has read both sides correctly and decided
by habit: small models copy long before they compare. Whether two pieces of text are the same needs no model,
so a verdict that is wrong is put right, and the model goes on from there. Teachers write comparisons as
``LEAD, LEFT = RIGHT: yes``; other reasoning is left alone.
"""

from __future__ import annotations

import re

_COMPARISON = re.compile(r"(?P<left>[^.,;:=\n]+) = (?P<right>[^.,;:=\n]+): (?P<verdict>yes|no)\b")


def corrected(reply: str) -> str | None:
    """A reply as far as its first wrong verdict, which is put right; None where there is none.

    >>> corrected("think: asked from, table = counter: yes. all is well.")
    'think: asked from, table = counter: no'
    >>> corrected("think: asked from, table = table: yes. asked from table: no.") is None
    True
    """
    thought = reply.partition("\n")[0]
    for found in _COMPARISON.finditer(thought):
        right = "yes" if found["left"].strip() == found["right"].strip() else "no"
        if found["verdict"] != right:
            return thought[: found.start("verdict")] + right
    return None
