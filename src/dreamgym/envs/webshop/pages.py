"""The pages of the shop as lists of elements, and their texts: WebShop's own, or one line per element."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from dreamgym.envs.webshop.catalogue import Product

PAGE_SIZE = 10
BACK, PREVIOUS, NEXT, BUY = "back to search", "< prev", "next >", "buy now"
TABS = ("description", "features", "reviews", "attributes")
THANKS = "Thank you for shopping with us!"
NO_SUCH_ACTION = "Invalid action. Use search[words] or click[text]."
NO_SEARCH_HERE = "Invalid action. There is no search box on this page."
NO_SUCH_BUTTON = "Invalid action. There is no such button on this page."
REFUSALS = (NO_SUCH_ACTION, NO_SEARCH_HERE, NO_SUCH_BUTTON)
View = Literal["text", "elements"]
_ACTION = re.compile(r"(?P<verb>search|click)\[(?P<words>[^\[\]\n]{1,300})\]")
_BRACKETS = str.maketrans("[]", "()")
_TEXT = 300
"""Characters of a longer text in one element line."""


class Action(NamedTuple):
    """A search for words, or a click on a text."""

    verb: Literal["search", "click"]
    words: str


def parse_action(text: str) -> Action | None:
    """The one parser of actions, for the shop and for the experience model's facts; None if it is none.

    >>> parse_action("click[Buy Now]"), parse_action("buy now"), parse_action("search[ ]")
    (Action(verb='click', words='buy now'), None, None)
    """
    found = _ACTION.fullmatch(text.strip())
    words = " ".join(found["words"].split()).lower() if found else ""
    if found is None or not words:
        return None
    return Action("search" if found["verb"] == "search" else "click", words)


@dataclass(frozen=True, slots=True)
class Element:
    """Something on a page. `target` is the text that a click names; empty for what cannot be clicked."""

    kind: str
    """``text``, ``button``, ``item``, ``searchbox``, or the name of an option."""
    target: str
    label: str
    """What WebShop shows."""
    note: str = ""
    """What an element line adds: a description of a button, the state of an option."""


@dataclass(frozen=True, slots=True)
class Page:
    """What the customer sees now."""

    elements: tuple[Element, ...]
    can_search: bool = False

    @property
    def clickable(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(each.target for each in self.elements if each.target))


def target_of(label: str) -> str:
    """The text that a click on a label names: an action has no brackets inside.

    >>> target_of("Large [2 pack]")
    'large (2 pack)'
    """
    return " ".join(label.translate(_BRACKETS).split()).lower()


_BACK = Element("button", BACK, "Back to Search", "a new search")
_PREVIOUS = Element("button", PREVIOUS, "< Prev", "the page before")


def search_page() -> Page:
    return Page((Element("searchbox", "", "Search", "words to search for"),), can_search=True)


def results_page(products: Sequence[Product], number: int, total: int) -> Page:
    """`products` are those on this page."""
    elements = [_BACK, Element("text", "", f"Page {number} (Total results: {total})")]
    if number > 1:
        elements.append(_PREVIOUS)
    if number * PAGE_SIZE < total:
        elements.append(Element("button", NEXT, "Next >", "more results"))
    items = (Element("item", each.id, each.title, each.price_tag) for each in products)
    return Page((*elements, *items))


def item_page(product: Product, chosen: Mapping[str, str], tabs: Sequence[str]) -> Page:
    elements = [_BACK, _PREVIOUS]
    for name, values in product.options.items():
        for value in values:
            note = "chosen" if chosen.get(name) == value else ""
            elements.append(Element(name, target_of(value), value, note))
    elements += [
        Element("text", "", product.title),
        Element("text", "", f"Price: {product.price_tag}"),
        Element("text", "", f"Rating: {product.rating}"),
    ]
    elements += [Element("button", tab, tab.capitalize(), "read") for tab in tabs]
    return Page((*elements, Element("button", BUY, "Buy Now", "buy with the chosen options")))


def tab_page(product: Product, tab: str) -> Page:
    return Page((_BACK, _PREVIOUS, *(Element("text", "", text) for text in tab_texts(product, tab))))


def tab_texts(product: Product, tab: str) -> tuple[str, ...]:
    texts = {
        "description": (product.description,) if product.description else (),
        "features": product.features,
        "reviews": product.reviews,
        "attributes": product.attributes,
    }
    return texts[tab] or ("None",)


def done_page() -> Page:
    return Page((Element("text", "", THANKS),))


def render(page: Page, instruction: str, view: View) -> str:
    return _element_lines(page) if view == "elements" else _visible_text(page, instruction)


def _visible_text(page: Page, instruction: str) -> str:
    """The visible texts of WebShop's HTML page, in its order, joined as in its text mode."""
    parts = ["WebShop"] if page.can_search else []
    if page.elements[0].label != THANKS:
        parts += ["Instruction:", instruction]
    group = ""
    for element in page.elements:
        if element.kind not in ("text", "button", "item", "searchbox") and element.kind != group:
            parts.append(group := element.kind)
        if element.kind == "item":
            parts += [element.target.upper(), element.label, element.note]
        else:
            parts.append(element.label)
    return " [SEP] ".join(parts)


def _element_lines(page: Page) -> str:
    """The paper's ``[id] type: description``. The id is what a click names; ``-`` cannot be clicked."""
    return "\n".join(element_line(element) for element in page.elements)


def element_line(element: Element) -> str:
    if element.kind == "item":
        return f"[{element.target}] item: {short(element.label)}, {element.note}"
    if element.kind in ("text", "searchbox"):
        return f"[-] {element.kind}: {short(element.note or element.label)}"
    return f"[{element.target}] {element.kind}: {element.note or 'not chosen'}"


def short(text: str) -> str:
    return text if len(text) <= _TEXT else f"{text[: _TEXT - 1].rstrip()}…"
