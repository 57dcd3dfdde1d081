"""Untrusted text made printable: it can neither control a terminal nor hide in a page."""

from __future__ import annotations


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
