"""WebShop's graded reward of a purchase.

    type × (matched attributes + matched options + price is low enough) / (attributes + options + 1)

WebShop compares the nouns of two titles with a part-of-speech tagger for the type score. Here every word that
is no stop word and has a letter counts as a noun; this can change the reward of a wrong product only.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import lru_cache

from dreamgym.envs.webshop.catalogue import Product
from dreamgym.envs.webshop.search import STOP_WORDS

SIMILAR = 85
"""Two phrases with a larger token set ratio (percent) are the same."""
_EXACT = frozenset({"size"})
"""Options whose values must be equal."""
_COLORS = (
    "black", "white", "grey", "gray", "silver", "gold", "red", "pink", "orange", "yellow", "green", "blue",
    "purple", "violet", "brown", "beige", "khaki", "ivory", "teal", "turquoise", "burgundy", "coral",
)  # fmt: skip
"""A value that contains one of these stands for it: ``navy blue stripes`` is blue."""
_WORD = re.compile(r"[^\W_]+")


@dataclass(frozen=True, slots=True, kw_only=True)
class Goal:
    """What a customer wants."""

    number: int
    """The position in the shuffled list of goals."""
    product: Product
    """The product that the goal was made from."""
    instruction: str
    attributes: tuple[str, ...]
    options: tuple[str, ...]
    """The wanted values."""
    price_limit: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """The parts of a reward."""

    type: float
    attributes: int
    options: int
    price: bool
    wanted: int
    """Attributes, options and the price."""

    @property
    def reward(self) -> float:
        return self.type * (self.attributes + self.options + self.price) / self.wanted


def score(goal: Goal, product: Product, chosen: Mapping[str, str]) -> Score:
    """The score of buying `product` with the `chosen` options (value by name)."""
    matched = sum(option_matches(goal, product, name, value) for name, value in chosen.items())
    return Score(
        type=type_score(goal.product, product),
        attributes=sum(has_attribute(product, attribute) for attribute in goal.attributes),
        options=min(matched, len(goal.options)),
        price=product.price <= goal.price_limit,
        wanted=len(goal.attributes) + len(goal.options) + 1,
    )


def fits(goal: Goal, product: Product) -> bool:
    """Whether the product, with the right options, earns the full reward."""
    found = score(goal, product, {})
    return found.type == 1 and found.price and found.attributes == len(goal.attributes)


def type_score(wanted: Product, product: Product) -> float:
    nouns = title_words(wanted.title)
    common = len(set(nouns) & set(title_words(product.title)))
    title = common / len(nouns) if nouns else 0.2
    if title == 0:
        return 0.0
    if title < 0.1:
        return 0.1
    same = wanted.query == product.query or len(set(wanted.path) & set(product.path)) >= 2
    return 1.0 if same or title > 0.2 else 0.5


def has_attribute(product: Product, attribute: str) -> bool:
    return any(_similar(known, attribute) for known in product.attributes) or attribute in product.text


def option_matches(goal: Goal, product: Product, name: str, value: str) -> bool:
    """Whether a chosen value is a wanted one; as in WebShop, also if a text of the product has it."""
    plain, wanted = plain_color(value), tuple(map(plain_color, goal.options))
    same = plain in wanted if name in _EXACT else any(_similar(each, plain) for each in wanted)
    return same or plain in product.text


def plain_color(value: str) -> str:
    """
    >>> plain_color("navy blue stripes"), plain_color("x-large")
    ('blue', 'x-large')
    """
    return next((color for color in _COLORS if color in value), value)


@lru_cache(maxsize=4096)
def title_words(title: str) -> tuple[str, ...]:
    words = _WORD.findall(title.lower())
    return tuple(word for word in words if word not in STOP_WORDS and not word.isdigit())


@lru_cache(maxsize=65_536)
def _similar(left: str, right: str) -> bool:
    return token_set_ratio(left, right) > SIMILAR


def token_set_ratio(left: str, right: str) -> float:
    """Percent of similarity of two phrases, whatever the order of words; 100 if one has all of the other's.

    >>> token_set_ratio("long lasting", "lasting, long"), round(token_set_ratio("easy clean", "easy care"))
    (100.0, 74)
    """
    mine, theirs = set(_WORD.findall(left.lower())), set(_WORD.findall(right.lower()))
    if not mine or not theirs:
        return 0.0
    common = " ".join(sorted(mine & theirs))
    if common and (mine <= theirs or theirs <= mine):
        return 100.0
    first, second = _joined(common, mine - theirs), _joined(common, theirs - mine)
    pairs = [(first, second)] + ([(common, first), (common, second)] if common else [])
    return max(200 * _common_length(one, other) / (len(one) + len(other)) for one, other in pairs)


def _joined(common: str, rest: Collection[str]) -> str:
    return " ".join([common, *sorted(rest)]).strip()


def _common_length(left: str, right: str) -> int:
    """Of the longest common subsequence."""
    row = [0] * (len(right) + 1)
    for letter in left:
        above = 0
        for place, other in enumerate(right, 1):
            above, row[place] = row[place], above + 1 if letter == other else max(row[place], row[place - 1])
    return row[-1]
