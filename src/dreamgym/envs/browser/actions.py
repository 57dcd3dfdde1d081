"""The actions of a browser agent, with the names and arguments of BrowserGym: ``click('12')``.

An action is parsed, never evaluated: one call, whose arguments are texts and numbers.
"""

from __future__ import annotations

import ast
import re
import warnings
from collections.abc import Mapping
from dataclasses import dataclass

SIGNATURES: Mapping[str, str] = {
    "click": "i b?",
    "dblclick": "i b?",
    "hover": "i",
    "focus": "i",
    "clear": "i",
    "fill": "i t",
    "press": "i k",
    "select_option": "i o",
    "upload_file": "i o",
    "drag_and_drop": "i i",
    "scroll": "n n",
    "send_msg_to_user": "t",
    "noop": "n?",
}
"""Kinds of arguments: i element id, t text, k key, o text or list of texts, b mouse button, n number."""
NOT_AN_ACTION = (
    "Invalid action. Use click('id'), dblclick('id'), hover('id'), focus('id'), clear('id'), "
    "fill('id', 'text'), press('id', 'key'), select_option('id', 'option'), upload_file('id', 'file'), "
    "drag_and_drop('id', 'id'), scroll(x, y), send_msg_to_user('text') or noop()."
)
LONGEST = 4000
"""Characters of an action."""
_BUTTONS = ("left", "middle", "right")
_ID = re.compile(r"[0-9]{1,7}", re.ASCII)
_FAR = 100_000
"""Largest number of an argument."""
_KEY = re.compile(
    r"(?:(?:Control|Shift|Alt|Meta|ControlOrMeta)\+){0,3}"
    r"(?:Enter|Tab|Escape|Backspace|Delete|Insert|Home|End|PageUp|PageDown|Space|F[1-9]|F1[0-2]"
    r"|Arrow(?:Left|Right|Up|Down)|[!-~])"
)
Argument = str | float | tuple[str, ...]


@dataclass(frozen=True, slots=True)
class BrowserAction:
    """A call with checked arguments."""

    name: str
    arguments: tuple[Argument, ...] = ()

    @property
    def elements(self) -> tuple[str, ...]:
        """The ids of the elements that it names."""
        kinds = SIGNATURES[self.name].split()
        return tuple(
            str(each) for kind, each in zip(kinds, self.arguments, strict=False) if kind.startswith("i")
        )


def parse_action(text: str) -> BrowserAction | None:
    """The one call that the text is; None if it is none, or an argument has the wrong form.

    >>> parse_action("fill('7', 'two words')")
    BrowserAction(name='fill', arguments=('7', 'two words'))
    >>> parse_action("click(12)"), parse_action("__import__('os')"), parse_action("click('1'); click('2')")
    (None, None, None)
    """
    if len(text) > LONGEST:
        return None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # an unknown escape in a text
            call = ast.parse(text.strip(), mode="eval").body
        if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name) or call.keywords:
            return None
        found = [ast.literal_eval(argument) for argument in call.args]
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        return None
    kinds = SIGNATURES.get(call.func.id, "?").split()
    least = sum(not kind.endswith("?") for kind in kinds)
    if call.func.id not in SIGNATURES or not least <= len(found) <= len(kinds):
        return None
    checked = tuple(_argument(kind[0], each) for kind, each in zip(kinds, found, strict=False))
    if any(each is None for each in checked):
        return None
    return BrowserAction(call.func.id, tuple(each for each in checked if each is not None))


def _argument(kind: str, value: object) -> Argument | None:
    if kind == "n":
        right = isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= _FAR
        return float(value) if right and isinstance(value, int | float) else None
    if kind == "o" and isinstance(value, list | tuple):
        return tuple(value) if value and all(isinstance(each, str) for each in value) else None
    if not isinstance(value, str) or not _encodable(value):
        return None
    if kind == "o":
        return (value,)
    forms = {"i": _ID, "k": _KEY}
    if kind in forms and not forms[kind].fullmatch(value):
        return None
    return value if kind != "b" or value in _BUTTONS else None


def _encodable(text: str) -> bool:
    """A lone surrogate cannot be sent to the browser."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
