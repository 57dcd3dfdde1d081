"""The shop: a catalogue with its search and goals, and the visit of one customer."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from dreamgym.envs.webshop import pages
from dreamgym.envs.webshop.catalogue import Product, build_products, read_files
from dreamgym.envs.webshop.goals import GoalKind, make_goals, split_goals
from dreamgym.envs.webshop.own_catalogue import generate_catalogue
from dreamgym.envs.webshop.pages import PAGE_SIZE, Page
from dreamgym.envs.webshop.rewards import Goal, Score, score
from dreamgym.envs.webshop.search import ProductSearch
from dreamgym.errors import ConfigError

DATA_VARIABLE = "WEBSHOP_DATA"


@dataclass(frozen=True)
class Shop:
    """A catalogue that is open for visits, which never change it."""

    products: tuple[Product, ...]
    by_id: dict[str, Product]
    index: ProductSearch
    goals: tuple[Goal, ...]
    splits: dict[str, Sequence[Goal]]
    own: bool
    """The catalogue of this package, not the user's data."""

    def search(self, words: str) -> tuple[Product, ...]:
        return tuple(self.products[place] for place in self.index.search(words))


def open_shop(data: Path | None, products: int | None, kind: GoalKind) -> Shop:
    """The shop of a data folder; by default that of ``WEBSHOP_DATA``, else the package's own catalogue."""
    given = str(data) if data is not None else os.environ.get(DATA_VARIABLE, "")
    return _open(given and str(Path(given).expanduser().resolve()), products, kind)


@lru_cache(maxsize=2)
def _open(data: str, limit: int | None, kind: GoalKind) -> Shop:
    raw = read_files(Path(data), limit) if data else generate_catalogue(limit)
    products = build_products(raw, data or "the package's catalogue")
    goals = make_goals(products, kind)
    if len(goals) < len(pages.TABS) + 2:
        raise ConfigError(f"{data or 'the catalogue'}: expected at least 6 goals ({kind}), got {len(goals)}")
    return Shop(
        products=products,
        by_id={product.id: product for product in products},
        index=ProductSearch(products),
        goals=goals,
        splits=split_goals(goals),
        own=not data,
    )


class Visit:
    """One customer in the shop: the current page, the results of the last search, the chosen options."""

    def __init__(self, shop: Shop, goal: Goal, *, tabs: Sequence[str] = pages.TABS) -> None:
        self.shop = shop
        self.goal = goal
        self.results: tuple[Product, ...] = ()
        self.number = 0
        """The page of results; 0 for none."""
        self.product: Product | None = None
        self.tab: str | None = None
        self.chosen: dict[str, str] = {}
        self.searches: list[str] = []
        self.score: Score | None = None
        """Of the purchase, which ends the visit."""
        self._tabs = tuple(tabs)
        self.page = pages.search_page()

    def act(self, text: str) -> str | None:
        """Carry out an action and update the page; the refusal if there is no such action here."""
        action = pages.parse_action(text)
        if action is None:
            return pages.NO_SUCH_ACTION
        if action.verb == "search":
            if not self.page.can_search:
                return pages.NO_SEARCH_HERE
            self.searches.append(action.words)
            self.results, self.number = self.shop.search(action.words), 1
        elif action.words in self.page.clickable:
            self._click(action.words)
        else:
            return pages.NO_SUCH_BUTTON
        self.page = self._page()
        return None

    def _click(self, target: str) -> None:
        if target == pages.BACK:
            self.results, self.number, self.product, self.tab, self.chosen = (), 0, None, None, {}
        elif target == pages.PREVIOUS:
            self._go_back()
        elif target == pages.NEXT:
            self.number += 1
        elif self.product is None:
            self.product, self.chosen = self.shop.by_id[target], {}
        elif target == pages.BUY:
            self.score = score(self.goal, self.product, self.chosen)
        elif target in self._tabs:
            self.tab = target
        else:
            name, value = next(
                (name, value)
                for name, values in self.product.options.items()
                for value in values
                if pages.target_of(value) == target
            )
            self.chosen[name] = value

    def _go_back(self) -> None:
        if self.tab is not None:
            self.tab = None
        elif self.product is not None:
            self.product, self.chosen = None, {}
        else:
            self.number -= 1

    def _page(self) -> Page:
        if self.score is not None:
            return pages.done_page()
        if self.product is not None and self.tab is not None:
            return pages.tab_page(self.product, self.tab)
        if self.product is not None:
            return pages.item_page(self.product, self.chosen, self._tabs)
        if self.number:
            first = (self.number - 1) * PAGE_SIZE
            return pages.results_page(self.results[first : first + PAGE_SIZE], self.number, len(self.results))
        return pages.search_page()
