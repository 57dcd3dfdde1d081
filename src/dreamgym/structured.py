"""The JSON in a reply, before it is read strictly.

Two things are put right that cannot be mistaken for anything else: the fence that chat models put around it,
and line breaks and the like within its strings as they are. Servers that hold replies to a schema let those
through too (vLLM with xgrammar does where a string has a `maxLength`).
"""

from __future__ import annotations

import re

_FENCE = re.compile(r"\A```(?:json)?\n(?P<inside>.*)\n```\Z", re.S)
# One without an end goes to the end of the text: to look for it again from every quote would take forever.
_STRING = re.compile(r'"(?:[^"\\]|\\.)*(?:"|\\?\Z)', re.S)
_BARE = re.compile(r"[\x00-\x1f]")


def json_of(text: str) -> str:
    r"""
    >>> json_of('```json\n{"seen": "a mug"}\n```')
    '{"seen": "a mug"}'
    >>> json_of('{"seen":\n "a mug,\n\ta pan"}')
    '{"seen":\n "a mug,\\u000a\\u0009a pan"}'
    """
    text = text.strip()
    fenced = _FENCE.match(text)
    inside = fenced["inside"] if fenced else text
    return _STRING.sub(_spelt, inside) if _BARE.search(inside) else inside


def _spelt(found: re.Match[str]) -> str:
    return _BARE.sub(lambda bare: f"\\u{ord(bare[0]):04x}", found[0])
