"""Text for people: untrusted text that can neither control a terminal nor hide in a page, and short names."""

from __future__ import annotations

from collections.abc import Sequence


def printable(text: str) -> str:
    """Text with control characters and direction marks escaped.

    >>> printable("a\\x1b[2Jb\\u202ec\\n")
    'a\\\\x1b[2Jb\\\\u202ec\\n'
    """
    if text.isprintable():
        return text
    return "".join(each if each.isprintable() or each in "\n\t" else _escaped(each) for each in text)


def _escaped(letter: str) -> str:
    code = ord(letter)
    if letter.isspace():
        return " "
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"


def short_names(paths: Sequence[str]) -> list[str]:
    """The shortest end of each path that identifies it; names of language models stay whole.

    >>> short_names(["runs/a/agent", "runs/b/agent", "runs/quickstart/sft@0", "endpoint:m@http://gpu-1/v1"])
    ['a/agent', 'b/agent', 'sft@0', 'endpoint:m@http://gpu-1/v1']
    """
    parts = [[path] if ":" in path.partition("/")[0] else path.split("/") for path in paths]
    names = []
    for own in parts:
        length = 1
        while length < len(own) and sum(other[-length:] == own[-length:] for other in parts) > 1:
            length += 1
        names.append("/".join(own[-length:]))
    return names
