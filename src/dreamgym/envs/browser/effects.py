"""What an action was seen to do on a page, and what that says about like elements."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

from dreamgym.envs.browser.facts import Shown, element, tree_of
from dreamgym.envs.browser.snapshot import Node


@dataclass(frozen=True, slots=True)
class Effect:
    """What an action was seen to do."""

    to: str
    """The page after it."""
    focus: str
    new: bool = False
    """It has loaded another document: ids start again."""
    toggles: frozenset[str] = frozenset()
    sets: tuple[tuple[str, str], ...] = ()
    """Fields, and what they hold afterwards; empty for nothing."""
    checks: frozenset[str] = frozenset()
    """Boxes that are checked when they appear."""
    end: str = ""
    """``over`` or ``success``."""


SAME = "same"
_SELF = "self"
_TYPED = "typed"


def is_local(effect: Effect, page: str) -> bool:
    """Whether only the form has changed."""
    return effect.to == page and not effect.end and not effect.new


def relative(effect: Effect, acted: str, page: str, text: str) -> Effect:
    """In words that hold for other elements of the kind, too."""
    return replace(
        effect,
        to=SAME if effect.to == page else effect.to,
        focus=_SELF if effect.focus == acted else effect.focus,
        toggles=frozenset(_SELF if each == acted else each for each in effect.toggles),
        sets=tuple(
            (_SELF if name == acted else name, _TYPED if held == text else held) for name, held in effect.sets
        ),
    )


def absolute(effect: Effect, acted: str, page: str, text: str) -> Effect:
    return replace(
        effect,
        to=page if effect.to == SAME else effect.to,
        focus=acted if effect.focus == _SELF else effect.focus,
        toggles=frozenset(acted if each == _SELF else each for each in effect.toggles),
        sets=tuple(
            (acted if name == _SELF else name, text if held == _TYPED else held) for name, held in effect.sets
        ),
    )


def kind_of_node(node: Node) -> tuple[str, ...]:
    parent = node.parent.role if node.parent is not None else ""
    return (node.role, node.tag, parent, "" if node.text() else node.hint)


@lru_cache(maxsize=256)
def kinds_of(shown: Shown) -> dict[str, tuple[str, ...]]:
    """The kind of each element of a page."""
    return {element(node.id): kind_of_node(node) for node in tree_of(shown).walk() if node.id}


def element_of(name: str) -> str:
    """
    >>> element_of("fill element 7 text 2"), element_of("click element 12")
    ('element 7', 'element 12')
    """
    words = name.split()
    return " ".join(words[1:3]) if len(words) > 2 else ""


def text_of(name: str) -> str:
    words = name.split()
    return " ".join(words[3:5]) if len(words) > 4 and words[3] == "text" else ""


def general_name(name: str, effect: Effect, page: str) -> str:
    """Filling a field that keeps what is typed does the same for all texts."""
    acted, text = element_of(name), text_of(name)
    keeps = text and effect.sets == ((acted, text),) and not effect.end and effect.to == page
    return f"fill {acted}" if keeps and name.startswith("fill") else name


def effect_parts(effect: Effect, page: str, name: str) -> list[str]:
    acted, text = element_of(name), text_of(name)
    found = [f"to {effect.to}"] if effect.to != page else []
    found += ["new document"] if effect.new else []
    found += [f"focus {effect.focus}"] if effect.focus else []
    found += [f"toggle {each}" for each in sorted(effect.toggles)]
    found += [f"check {each}" for each in sorted(effect.checks)]
    for field_name, held in effect.sets:
        if field_name == acted and text and held == text:
            found.append("hold")
        else:
            found.append(f"set {field_name} {held}" if held else f"unset {field_name}")
    return [*found, *([effect.end] if effect.end else [])]
