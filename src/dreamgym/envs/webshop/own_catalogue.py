"""The catalogue of this package, generated from `grammar.toml` in the format of WebShop's files."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping, Sequence
from importlib.resources import files
from random import Random
from typing import Any

from dreamgym.envs.webshop.catalogue import RawCatalogue

_ATTRIBUTES = 4
"""Of one product, of which an instruction asks for two."""


def generate_catalogue(limit: int | None = None) -> RawCatalogue:
    """The products in a fixed order, categories mixed; `limit` takes the first ones only."""
    grammar = tomllib.loads((files(__package__) / "grammar.toml").read_text(encoding="utf-8"))
    made = list(_products(grammar))
    Random("webshop:order").shuffle(made)
    products, attributes = zip(*made[:limit], strict=True)
    return RawCatalogue(products, {each["asin"]: of for each, of in zip(products, attributes, strict=True)})


def _products(grammar: Mapping[str, Any]) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    number = 100
    for category, rules in grammar.items():
        if not isinstance(rules, dict) or "types" not in rules:
            continue
        for noun, kind in rules["types"].items():
            for _ in range(grammar["products_per_type"]):
                number += 1
                source = Random(f"webshop:{number}")
                yield _product(f"P{number}", category, rules, noun, kind, grammar["reasons"]["texts"], source)


def _product(
    key: str,
    category: str,
    rules: Mapping[str, Any],
    noun: str,
    kind: Mapping[str, Any],
    reasons: Sequence[str],
    source: Random,
) -> tuple[dict[str, Any], dict[str, Any]]:
    own = source.choice(kind["attributes"])
    attributes = [own, *source.sample(rules["attributes"], _ATTRIBUTES - 1)]
    source.shuffle(attributes)
    brand, detail = source.choice(rules["brands"]), source.choice(kind["details"])
    options = {
        name: [{"value": value} for value in _some(values, source)]
        for name, values in {**rules["options"], **kind.get("options", {})}.items()
    }
    low, high = kind["price"]
    product = {
        "asin": key,
        "name": f"{brand} {attributes[0].title()} {noun.title()} {detail}",
        "category": category,
        "query": kind["query"],
        "product_category": f"{rules['path']} › {kind['path']} › {kind['query'].title()}",
        "full_description": f"This {noun} by {brand} is {attributes[1]}. It comes {detail}.",
        "small_description": [f"{each.capitalize()}: {source.choice(reasons)}." for each in attributes],
        "customization_options": options,
        "pricing": f"${source.randrange(100 * low, 100 * high) / 100:.2f}",
        "average_rating": source.randrange(25, 51) / 10,
    }
    return product, {
        "attributes": attributes,
        "instruction": _instruction(kind["query"], asked := source.sample(attributes, 2), source),
        "instruction_attributes": asked,
    }


def _some(values: Sequence[str], source: Random) -> list[str]:
    """Most of the values, in their order."""
    kept = source.sample(range(len(values)), max(2, len(values) - 1))
    return [values[place] for place in sorted(kept)]


def _instruction(query: str, asked: Sequence[str], source: Random) -> str:
    first, second = asked
    return source.choice(
        (
            f"Find me {first}, {second} {query}",
            f"Find me {first} {query} with {second}",
            f"Find me {query} with {first}, {second}",
        )
    )
