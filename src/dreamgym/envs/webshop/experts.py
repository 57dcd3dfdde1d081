"""Scripted customers: one knows the wanted product, the other sees only the page and the instruction."""

from __future__ import annotations

import re

from dreamgym.envs.webshop import pages
from dreamgym.envs.webshop.goals import options_in, price_limit_in, suggested_searches
from dreamgym.envs.webshop.rewards import option_matches
from dreamgym.envs.webshop.search import tokens
from dreamgym.envs.webshop.shop import Visit

EXPERTS = ("script", "heuristic")
"""The script looks for the goal's product, which it knows; the heuristic buys the first fitting hit."""
_ENOUGH = 0.5
"""Fraction of the wanted product's words that the title of a fitting hit has."""
_AMOUNT = re.compile(r"\d+(?:\.\d+)?")


def expert_action(visit: Visit, expert: str | None) -> str:
    if visit.page.can_search:
        return _search(visit)
    if visit.tab is not None:
        return f"click[{pages.PREVIOUS}]"
    if visit.product is None:
        hit = _first_fitting(visit) if expert == "heuristic" else _wanted(visit)
        if hit is not None:
            return f"click[{hit}]"
        return f"click[{pages.NEXT if pages.NEXT in visit.page.clickable else pages.BACK}]"
    if expert != "heuristic" and visit.product.id != visit.goal.product.id:
        return f"click[{pages.PREVIOUS}]"
    option = _asked_option(visit) if expert == "heuristic" else _right_option(visit)
    return f"click[{option or pages.BUY}]"


def _search(visit: Visit) -> str:
    """The first suggestion that was not tried yet; the first one again after all."""
    suggested = suggested_searches(visit.goal.instruction)
    words = next((each for each in suggested if each not in visit.searches), suggested[0])
    return f"search[{words}]"


def _wanted(visit: Visit) -> str | None:
    wanted = visit.goal.product.id
    return wanted if wanted in visit.page.clickable else None


def _right_option(visit: Visit) -> str | None:
    """The next option of the goal that is not chosen; a value with the same text in two groups is clicked
    once, because a click finds the first."""
    assert visit.product is not None
    clicked = {pages.target_of(value) for value in visit.chosen.values()}
    for name, values in visit.product.options.items():
        right = [value for value in values if value in visit.goal.options]
        right = right or [value for value in values if option_matches(visit.goal, visit.product, name, value)]
        if right and visit.goal.options and visit.chosen.get(name) not in right:
            target = pages.target_of(right[0])
            if target not in clicked:
                return target
    return None


def _first_fitting(visit: Visit) -> str | None:
    items = [element for element in visit.page.elements if element.kind == "item"]
    limit = price_limit_in(visit.goal.instruction)
    cheap = [item for item in items if _price(item.note) <= limit]
    wanted = set(tokens(suggested_searches(visit.goal.instruction)[0]))
    fitting = [item for item in cheap if len(wanted & set(tokens(item.label))) >= _ENOUGH * len(wanted)]
    return next((item.target for item in fitting or cheap), None)


def _asked_option(visit: Visit) -> str | None:
    assert visit.product is not None
    asked = {value.lower() for value in options_in(visit.goal.instruction)}
    words = f" {visit.goal.instruction.lower()} "
    clicked = {pages.target_of(value) for value in visit.chosen.values()}
    for name, values in visit.product.options.items():
        found = [value for value in values if value in asked] or [
            value for value in values if f" {value} " in words
        ]
        if found and name not in visit.chosen and pages.target_of(found[0]) not in clicked:
            return pages.target_of(found[0])
    return None


def _price(tag: str) -> float:
    found = _AMOUNT.search(tag)
    return float(found[0]) if found else 0.0
