"""The hidden facts of a visit, and what an action does to them.

A world sheet holds the goal's product, the right options, and the result lists of the searches that the
instruction suggests, with the pages of their products. In a dream another search shows the list of the most
similar one. Names in changes have no comma or semicolon.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from dreamgym.envs.webshop import pages
from dreamgym.envs.webshop.catalogue import Product
from dreamgym.envs.webshop.goals import suggested_searches
from dreamgym.envs.webshop.rewards import Goal, fits, option_matches
from dreamgym.envs.webshop.search import tokens
from dreamgym.envs.webshop.shop import Shop
from dreamgym.types import Change, Fact, Task, WorldSheet

AGENT, SEARCH_PAGE = "agent", "search page"
_FIRST_PAGES, _LAST_PAGE = 2, 5
"""A list has its first pages, and more up to the one with the wanted product; all if it is on none."""
_NO_CHANGE = Change()
_SEPARATORS = re.compile(r"[,;\s]+")


def hidden_facts(shop: Shop, goal: Goal, tabs: Iterable[str]) -> tuple[Fact, ...]:
    facts: list[Fact] = [("at", AGENT, SEARCH_PAGE), ("start", SEARCH_PAGE)]
    facts += [("tab", tab) for tab in tabs]
    facts += [("target", goal.product.id), ("wanted", str(len(goal.options)))]
    shown: dict[str, Product] = {}
    for number, words in enumerate(suggested_searches(goal.instruction), 1):
        hits, name = shop.search(words), f"list {number}"
        facts += [("search", name, words), ("total", name, str(len(hits)))]
        for rank, product in enumerate(hits[: pages.PAGE_SIZE * _pages(hits, goal)]):
            page, place = divmod(rank, pages.PAGE_SIZE)
            facts.append(("hit", product.id, f"page {page + 1} of {name}", str(place)))
            shown[product.id] = product
    for product in shown.values():
        facts += _product_facts(product, goal, tabs)
    return tuple(fact for fact in facts if all(fact))


def _pages(hits: tuple[Product, ...], goal: Goal) -> int:
    rank = next((place for place, each in enumerate(hits) if each.id == goal.product.id), len(hits))
    return min(max(_FIRST_PAGES, rank // pages.PAGE_SIZE + 1), _LAST_PAGE)


def _product_facts(product: Product, goal: Goal, tabs: Iterable[str]) -> Iterator[Fact]:
    yield ("title", product.id, product.title)
    yield ("price", product.id, product.price_tag)
    yield ("rating", product.id, product.rating)
    right = fits(goal, product)
    if right:
        yield ("fits", product.id)
    for name, values in product.options.items():
        for value in dict.fromkeys(values):
            yield ("option", product.id, fact_name(name), fact_name(pages.target_of(value)))
            if right and option_matches(goal, product, name, value):
                yield ("right", product.id, fact_name(pages.target_of(value)))
    for tab in tabs:
        for text in pages.tab_texts(product, tab):
            yield (tab, product.id, pages.short(text))


def fact_name(text: str) -> str:
    """
    >>> fact_name("navy, 2 pack; large")
    'navy 2 pack large'
    """
    return _SEPARATORS.sub(" ", text).strip()


@dataclass(frozen=True, slots=True)
class Step:
    """What an action does: a change, or a refusal."""

    reason: str
    change: Change = _NO_CHANGE
    refusal: str | None = None
    page: str = ""
    """The page of results, product or tab that it leads to."""


class VisitFacts:
    """An index of the facts of one moment."""

    def __init__(self, facts: Iterable[Fact]) -> None:
        self.facts = tuple(facts)
        self.at, self.back, self.reads, self.wanted = SEARCH_PAGE, "", "", 0
        self.tabs: list[str] = []
        self.searches: dict[str, str] = {}
        self.totals: dict[str, str] = {}
        self.hits: dict[str, list[tuple[int, str]]] = defaultdict(list)
        self.options: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
        self.texts: dict[tuple[str, str], list[str]] = defaultdict(list)
        """By predicate and product: title, price, rating, and those of tabs."""
        for fact in self.facts:
            match fact:
                case ("at", _, place):
                    self.at = place
                case ("from", _, place):
                    self.back = place
                case ("reads", _, tab):
                    self.reads = tab
                case ("tab", tab):
                    self.tabs.append(tab)
                case ("wanted", number) if number.isdecimal():
                    self.wanted = int(number)
                case ("search", name, words):
                    self.searches[name] = words
                case ("total", name, number):
                    self.totals[name] = number
                case ("hit", product, page, place) if place.isdecimal():
                    self.hits[page].append((int(place), product))
                case ("option", product, name, value):
                    self.options[product][name].append(value)
                case (predicate, product, text):
                    self.texts[predicate, product].append(text)
        self.chosen = {fact[2]: fact[3] for fact in self.facts if fact[0] == "chosen" and len(fact) == 4}

    def right_options(self) -> int:
        """Of the product of the current page."""
        return sum(("right", self.at, value) in self.facts for value in self.chosen.values())

    def products(self, page: str) -> list[str]:
        return [product for _, product in sorted(self.hits.get(page, ()))]

    def nearest_list(self, words: str) -> str | None:
        """The list whose search has most in common with the words; None if none has anything."""
        mine = set(tokens(words))
        best = [(_overlap(mine, set(tokens(known))), name) for name, known in self.searches.items()]
        likeness, name = max(best, key=lambda each: each[0], default=(0.0, ""))
        return name if likeness else None

    def step(self, text: str) -> Step:
        """What an action does from here."""
        action = pages.parse_action(text)
        if action is None:
            return Step("no such action", refusal=pages.NO_SUCH_ACTION)
        here = f"agent on {self.at}"
        if action.verb == "search":
            if self.at != SEARCH_PAGE:
                return Step(f"{here}. a search box here: no", refusal=pages.NO_SEARCH_HERE)
            name = self.nearest_list(action.words)
            page = f"page 1 of {name}"
            return self._move(
                f"{here}. a search box here: yes. it shows {name or 'nothing'}", page if name else ""
            )
        moved = self._click(action.words)
        if moved is None:
            return Step(f"{here}. such a button here: no", refusal=pages.NO_SUCH_BUTTON)
        return Step(f"{here}. such a button here: yes. {moved.reason}", moved.change, page=moved.page)

    def _click(self, target: str) -> Step | None:
        if self.at == SEARCH_PAGE:
            return None
        if target == pages.BACK:
            return self._move("a new search", SEARCH_PAGE)
        if self.at in self.hits:
            return self._click_result(target)
        if self.reads:
            left = Change(ended=(("reads", AGENT, self.reads),))
            return Step(f"back to {self.at}", left, page=self.at) if target == pages.PREVIOUS else None
        if target == pages.PREVIOUS:
            return self._move(f"back to {self.back}", self.back)
        if target == pages.BUY:
            return self._buy()
        if target in self.tabs:
            return Step(f"reads {target}", Change(begun=(("reads", AGENT, target),)), page=target)
        return self._choose(fact_name(target))

    def _click_result(self, target: str) -> Step | None:
        number, _, name = self.at.removeprefix("page ").partition(" of ")
        if target in (pages.PREVIOUS, pages.NEXT):
            if not number.isdecimal():
                return None
            other = f"page {int(number) + (1 if target == pages.NEXT else -1)} of {name}"
            return self._move(f"turns to {other}", other) if other in self.hits else None
        if target not in self.products(self.at):
            return None
        moved = self._move(f"opens {target}", target)
        return Step(
            moved.reason,
            Change(ended=moved.change.ended, begun=(*moved.change.begun, ("from", AGENT, self.at))),
            page=target,
        )

    def _choose(self, value: str) -> Step | None:
        name = next((name for name, values in self.options[self.at].items() if value in values), None)
        if name is None:
            return None
        before = self.chosen.get(name)
        ended: tuple[Fact, ...] = (("chosen", self.at, name, before),) if before not in (None, value) else ()
        begun: tuple[Fact, ...] = (("chosen", self.at, name, value),) if before != value else ()
        return Step(f"chooses {value} as {name}", Change(ended=ended, begun=begun), page=self.at)

    def _buy(self) -> Step:
        fitting = ("fits", self.at) in self.facts
        reason = f"{self.at} fits the task: {'yes' if fitting else 'no'}"
        right = min(self.right_options(), self.wanted)
        verdict = "yes" if right == self.wanted else "no"
        return Step(
            f"{reason}. right options, {right} = {self.wanted}: {verdict}",
            Change(begun=(("bought", self.at),)),
            page="bought",
        )

    def _move(self, reason: str, place: str) -> Step:
        """To another page: choices are forgotten."""
        ended: list[Fact] = [("at", AGENT, self.at)]
        ended += [("from", AGENT, self.back)] if self.back else []
        ended += [("reads", AGENT, self.reads)] if self.reads else []
        ended += [("chosen", self.at, name, value) for name, value in self.chosen.items()]
        if not place:
            return Step(reason)
        return Step(reason, Change(ended=tuple(ended), begun=(("at", AGENT, place),)), page=place)


def _overlap(left: set[str], right: set[str]) -> float:
    return len(left & right) / len(left | right) if left | right else 0.0


def facts_for(sheet: WorldSheet, action: str) -> list[str]:
    """The lines of a prompt about the sheet before an action: the page that it leads to, and where the agent
    is."""
    known = VisitFacts(sheet.facts)
    if action == "start":
        return [f"agent: on {known.at}"]
    step = known.step(action)
    lines = [] if step.refusal else list(_page_lines(known, step))
    place = f"{known.at}, {known.reads}" if known.reads else known.at
    return [*lines, f"agent: on {place}{f', from {known.back}' if known.back else ''}"]


def _page_lines(known: VisitFacts, step: Step) -> Iterator[str]:
    if step.page in known.hits:
        name = step.page.partition(" of ")[2]
        yield f"{step.page}: {known.totals.get(name, '0')} results"
        for product in known.products(step.page):
            yield f"{product}: {_text(known, 'title', product)}, {_text(known, 'price', product)}"
    elif step.page in known.tabs:
        yield from (f"{step.page} of {known.at}: {text}" for text in known.texts[step.page, known.at])
    elif step.page == "bought":
        yield f"{known.at}: {'fits' if ('fits', known.at) in known.facts else 'does not fit'}"
        right = [value for value in known.chosen.values() if ("right", known.at, value) in known.facts]
        yield f"right options: {min(len(right), known.wanted)} of {known.wanted}"
    elif step.page and step.page != SEARCH_PAGE:
        yield from _item_lines(known, step)


def _item_lines(known: VisitFacts, step: Step) -> Iterator[str]:
    product = step.page
    details = (_text(known, predicate, product) for predicate in ("title", "price", "rating"))
    yield f"{product}: {', '.join(details)}"
    after = set(known.facts).difference(step.change.ended) | set(step.change.begun)
    for name, values in known.options[product].items():
        picked = next((value for value in values if ("chosen", product, name, value) in after), "none")
        yield f"{name} of {product}: {', '.join(values)}; chosen {picked}"
    yield f"tabs: {', '.join(known.tabs)}"


def _text(known: VisitFacts, predicate: str, product: str) -> str:
    return next(iter(known.texts[predicate, product]), "unknown")


def goal_met(task: Task, sheet: WorldSheet) -> bool:
    """Whether a fitting product was bought with the right options.

    >>> task = Task(id="t", instruction="", environment="webshop")
    >>> bought = (("at", "agent", "p1"), ("fits", "p1"), ("wanted", "1"), ("right", "p1", "red"))
    >>> bought = (*bought, ("bought", "p1"))
    >>> goal_met(task, WorldSheet(facts=bought))
    False
    >>> goal_met(task, WorldSheet(facts=(*bought, ("chosen", "p1", "color", "red"))))
    True
    """
    known = VisitFacts(sheet.facts)
    fitting = {fact[1] for fact in known.facts if fact[0] == "fits" and len(fact) > 1}
    bought = {fact[1] for fact in known.facts if fact[0] == "bought" and len(fact) > 1}
    return known.at in fitting & bought and known.right_options() >= known.wanted


def can_succeed(task: Task, sheet: WorldSheet) -> bool:
    """Whether a listed product fits, and enough of its options are right."""
    known = VisitFacts(sheet.facts)
    if any(fact[0] == "bought" for fact in known.facts):
        return False
    listed = {product for hits in known.hits.values() for _, product in hits}
    for product in listed:
        right = {fact[2] for fact in known.facts if fact[0] == "right" and fact[1] == product}
        groups = sum(bool(right.intersection(values)) for values in known.options[product].values())
        if ("fits", product) in known.facts and groups >= known.wanted:
            return True
    return False
