"""The goals of a catalogue, in WebShop's order and splits, and the searches that instructions suggest."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Sequence
from random import Random
from typing import Literal

from dreamgym.envs.webshop.catalogue import PRICE_SEED, Instruction, Product
from dreamgym.envs.webshop.rewards import Goal

SHUFFLE_SEED = 233
SPLITS = ("train", "dev", "test")
_TEST, _DEV = 500, 1000
_SMALL = 3000
"""Below this number of goals a sixth is for tests and a third for development: WebShop's rule at 3,000."""
_NO_LIMIT = 1_000_000.0
_LIMITS = tuple(10.0 * tens for tens in range(1, 100))
GoalKind = Literal["auto", "synthetic", "human"]

_PRICE = re.compile(r",? and price lower than (?P<limit>[\d.]+) dollars\.?$")
_OPENING = re.compile(
    r"^(?:find me|i(?:'m| am) looking for|i (?:need|want|would like)|i'd like|please find)(?: an?| some)? ",
    re.I,
)
_OPTION = re.compile(
    r"(?: with |, and )(?P<name>(?:(?! with )[^:,]){1,40}): (?P<value>.*?)(?=, and [^:,]{1,40}: |$)"
)


def make_goals(products: Sequence[Product], kind: GoalKind = "auto") -> tuple[Goal, ...]:
    """All goals, shuffled as WebShop does. ``auto`` takes human instructions where the catalogue has any."""
    human = kind == "human" or (kind == "auto" and any(product.human for product in products))
    limits = Random(PRICE_SEED)
    found = [
        (product, instruction, options, limit)
        for product in products
        for instruction, options, limit in _requests(product, human, limits)
    ]
    Random(SHUFFLE_SEED).shuffle(found)
    return tuple(
        Goal(
            number=number,
            product=product,
            instruction=text,
            attributes=instruction.attributes,
            options=options,
            price_limit=limit,
        )
        for number, (product, (instruction, text), options, limit) in enumerate(found)
    )


def _requests(
    product: Product, human: bool, limits: Random
) -> Iterator[tuple[tuple[Instruction, str], tuple[str, ...], float]]:
    if human:
        for instruction in product.human:
            limit, text = _price_limit(product.price, limits)
            yield (instruction, instruction.text + text), instruction.options or (), limit
    elif product.synthetic is not None:
        limit, text = _price_limit(product.price, limits)
        names = sorted(product.options)
        for values in itertools.product(*(product.options[name] for name in names)):
            asked = ", and ".join(f"{name}: {value}" for name, value in zip(names, values, strict=True))
            whole = f"{product.synthetic.text}{' with ' if asked else ''}{asked}{text}"
            yield (product.synthetic, whole), values, limit


def _price_limit(price: float, limits: Random) -> tuple[float, str]:
    """One of the next four full tens above the price, not the lowest."""
    above = [limit for limit in _LIMITS if limit > price][:4]
    if len(above) < 2:
        return _NO_LIMIT, ""
    limit = max(limits.sample(above, 2))
    return limit, f", and price lower than {limit:.2f} dollars"


def split_goals(goals: Sequence[Goal]) -> dict[str, Sequence[Goal]]:
    """WebShop's splits: the first 500 are for tests, the next 1,000 for development, the rest to train."""
    test, dev = (_TEST, _DEV) if len(goals) >= _SMALL else (len(goals) // 6, len(goals) // 3)
    return {"train": goals[test + dev :], "dev": goals[test : test + dev], "test": goals[:test]}


def price_limit_in(instruction: str) -> float:
    """
    >>> price_limit_in("Find me a lamp, and price lower than 40.00 dollars")
    40.0
    """
    found = _PRICE.search(instruction)
    try:
        return float(found["limit"]) if found else _NO_LIMIT
    except ValueError:
        return _NO_LIMIT


def options_in(instruction: str) -> list[str]:
    """The option values that a synthetic instruction names.

    >>> options_in("Find me led lamps with color: red, and size: 7 inch, and price lower than 9.00 dollars")
    ['red', '7 inch']
    """
    return [found["value"] for found in _OPTION.finditer(_PRICE.sub("", instruction))]


def suggested_searches(instruction: str) -> tuple[str, ...]:
    """Searches that a customer might try, made from the words of the instruction alone: the product, the
    product with its options, the product without what follows ``with``, ``for`` or a comma.

    >>> suggested_searches("Find me led lamps with usb port with color: red, and price lower than 9 dollars")
    ('led lamps with usb port', 'led lamps with usb port red', 'led lamps')
    """
    wanted = _PRICE.sub("", instruction)
    values = " ".join(found["value"] for found in _OPTION.finditer(wanted))
    product = _words(_OPENING.sub("", _OPTION.sub("", wanted)))
    short = re.split(r" (?:with|for|that|which) |, ", product)
    found = (product, _words(f"{product} {values}"), short[0], short[-1] if "," in product else "")
    return tuple(dict.fromkeys(each.strip() for each in found if each.strip()))


def _words(text: str) -> str:
    """In lower case, without the brackets that end an action, and at most 250 characters."""
    return " ".join(re.sub(r"[\[\]]", " ", text.lower()).split())[:250].strip(" .,")
