"""The products of a WebShop catalogue, read from WebShop's own JSON files.

A folder holds the products (``items_shuffle.json``, ``items_shuffle_1000.json`` or ``items_1000.json``),
their attributes and synthetic instructions (``items_ins_v2*.json``), and perhaps human instructions
(``items_human_ins.json``) and reviews (``reviews.json``). Each may be compressed (``.gz``, ``.xz``).
"""

from __future__ import annotations

import ast
import gzip
import json
import lzma
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

from dreamgym.errors import ConfigError

PRICE_SEED = 233
"""WebShop draws prices before it seeds its generator, so they differ from run to run; here they do not."""
NO_PRICE = 100.0
_LONGEST_ID = 10
_PRODUCT_FILES = ("items_shuffle.json", "items_shuffle_*.json", "items_[0-9]*.json")
_OPENERS: Mapping[str, Callable[..., Any]] = {".gz": gzip.open, ".xz": lzma.open}
_REVIEWS = 5
"""Shown of each product."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Instruction:
    """A request for a product: what it must be, and which options the customer wants."""

    text: str
    attributes: tuple[str, ...]
    options: tuple[str, ...] | None = None
    """None for every combination of the product's options, one goal each (synthetic instructions)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Product:
    """One product, with the texts of its pages."""

    id: str
    title: str
    query: str
    """The search with which WebShop's authors found it: its type."""
    category: str
    path: tuple[str, ...]
    """From the widest category to the narrowest."""
    price: float
    price_tag: str
    rating: str
    description: str
    features: tuple[str, ...]
    reviews: tuple[str, ...]
    attributes: tuple[str, ...]
    options: Mapping[str, tuple[str, ...]]
    """Values by the name of the option, in lower case."""
    synthetic: Instruction | None = None
    human: tuple[Instruction, ...] = ()
    text: str = field(default="", repr=False)
    """Title, features and description in lower case, in which rewards look for attributes."""


@dataclass(frozen=True, slots=True)
class RawCatalogue:
    """The contents of the files, as WebShop writes them."""

    products: Sequence[Any]
    attributes: Mapping[str, Any]
    human: Mapping[str, Any] = field(default_factory=dict)
    reviews: Sequence[Any] = ()


def read_files(data: Path, limit: int | None = None) -> RawCatalogue:
    """The files in a folder, or next to a file of products; `limit` takes the first products only.

    Raises:
        ConfigError: a file is missing or is not what WebShop writes.
    """
    products = data if data.is_file() else _find(data, _PRODUCT_FILES)
    if products is None:
        raise ConfigError(
            f"WebShop data {str(data)!r}: expected a folder with one of {', '.join(_PRODUCT_FILES)} "
            "(also .gz or .xz); set the option data or WEBSHOP_DATA to your WebShop data folder"
        )
    folder = products.parent
    size = re.search(r"_(\d+)\.json", products.name)
    names = (f"items_ins_v2_{size[1]}.json", "items_ins_v2.json") if size else ("items_ins_v2.json",)
    attributes = _find(folder, (*names, "items_ins_v2*.json"))
    if attributes is None:
        raise ConfigError(
            f"WebShop data {str(folder)!r}: expected items_ins_v2*.json next to {products.name!r}"
        )
    human, reviews = _find(folder, ("items_human_ins.json",)), _find(folder, ("reviews.json",))
    return RawCatalogue(
        _load(products, list)[:limit],
        _load(attributes, dict),
        _load(human, dict) if human else {},
        _load(reviews, list) if reviews else (),
    )


def build_products(raw: RawCatalogue, source: str) -> tuple[Product, ...]:
    """Valid products, each id once; `source` names the catalogue in error messages.

    Raises:
        ConfigError: an entry is not a product.
    """
    prices = Random(PRICE_SEED)
    rated = {str(each.get("asin")): each for each in raw.reviews if isinstance(each, dict)}
    found: dict[str, Product] = {}
    for number, entry in enumerate(raw.products):
        try:
            key = str(entry["asin"])
            if key == "nan" or len(key) > _LONGEST_ID or key.lower() in found:
                continue
            product = _product(entry, raw, rated.get(key, {}), prices)
        except (
            AttributeError,
            KeyError,
            MemoryError,
            RecursionError,
            SyntaxError,
            TypeError,
            ValueError,
        ) as error:
            raise ConfigError(
                f"{source}: entry {number} is not a WebShop product: {type(error).__name__}: {error}"
            ) from error
        found[product.id] = product
    if not found:
        raise ConfigError(f"{source}: expected at least one product, got none")
    return tuple(found.values())


def _product(
    entry: Mapping[str, Any], raw: RawCatalogue, rated: Mapping[str, Any], prices: Random
) -> Product:
    key = str(entry["asin"])
    low, tag = _pricing(str(entry.get("pricing") or ""))
    known = raw.attributes.get(key) or {}
    title, description = _clean(entry["name"]), _clean(entry.get("full_description") or "")
    features = tuple(filter(None, map(_clean, _listed(entry.get("small_description") or []))))
    wanted = tuple(map(str, known.get("instruction_attributes") or ()))
    text = known.get("instruction")
    return Product(
        id=key.lower(),
        title=title,
        query=str(entry["query"]).lower().strip(),
        category=str(entry["category"]),
        path=tuple(part.strip() for part in str(entry["product_category"]).split("›")),
        price=low[0] if len(low) == 1 else prices.uniform(*low[:2]),
        price_tag=tag,
        rating=str(rated.get("average_rating") or entry.get("average_rating") or "N.A."),
        description=description,
        features=features,
        reviews=tuple(_review(each) for each in (rated.get("reviews") or ())[:_REVIEWS]),
        attributes=tuple(map(str, known.get("attributes") or ())),
        options=_options(entry.get("customization_options") or {}),
        synthetic=Instruction(text=_clean(text), attributes=wanted) if text and wanted else None,
        human=tuple(_human(raw.human.get(key) or ())),
        text=" ".join([title, *features, description]).lower(),
    )


def _human(entries: Iterable[Mapping[str, Any]]) -> Iterable[Instruction]:
    for entry in entries:
        attributes = tuple(map(str, entry["instruction_attributes"]))
        options = entry.get("instruction_options") or ()
        values = options.values() if isinstance(options, dict) else options
        if attributes:
            yield Instruction(
                text=_clean(entry["instruction"]).strip("."),
                attributes=attributes,
                options=tuple(str(value).lower() for value in values),
            )


def _pricing(text: str) -> tuple[list[float], str]:
    """
    >>> _pricing("$19.99 - $27.99"), _pricing("")
    (([19.99, 27.99], '$19.99 to $27.99'), ([100.0], '$100.0'))
    """
    found = [float(each.replace(",", "")) for each in re.findall(r"\$\s*(\d[\d,]*(?:\.\d+)?)", text)][:2]
    found = found or [NO_PRICE]
    return found, " to ".join(f"${each}" for each in found)


def _options(groups: Any) -> dict[str, tuple[str, ...]]:
    found: dict[str, tuple[str, ...]] = {}
    for name, contents in _literal(groups).items():
        values = (_clean(each["value"]).replace("/", " | ").lower() for each in contents or ())
        if kept := tuple(filter(None, values)):
            found[_clean(name).lower()] = kept
    return found


def _review(entry: Mapping[str, Any]) -> str:
    score = entry.get("score", entry.get("stars", "N.A."))
    body = entry.get("body", entry.get("review", ""))
    return _clean(f"{score}: {entry.get('title', '')} {body}")


def _listed(value: Any) -> list[Any]:
    """Some copies of the data hold lists as text; a text may also start with a bracket."""
    try:
        found = _literal(value)
    except (SyntaxError, ValueError):
        found = value
    return found if isinstance(found, list) else [found]


def _literal(value: Any) -> Any:
    return ast.literal_eval(value) if isinstance(value, str) else value


def _clean(value: Any) -> str:
    return " ".join(str(value).split())


def _find(folder: Path, patterns: Sequence[str]) -> Path | None:
    for pattern in patterns:
        for ending in ("", *_OPENERS):
            if found := sorted(folder.glob(pattern + ending)):
                return found[0]
    return None


def _load(path: Path, kind: type) -> Any:
    try:
        with _OPENERS.get(path.suffix, open)(path, "rt", encoding="utf-8") as file:
            found = json.load(file)
    except (OSError, EOFError, ValueError, lzma.LZMAError) as error:
        raise ConfigError(f"WebShop file {str(path)!r} cannot be read as JSON: {error}") from error
    if not isinstance(found, kind):
        raise ConfigError(
            f"WebShop file {str(path)!r}: expected a JSON {kind.__name__}, got {type(found).__name__}"
        )
    return found
