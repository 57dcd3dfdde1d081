"""The hidden facts of a visit, and what an action does to them.

A world sheet holds the goal's product, the right options, and the result lists of the searches that the
instruction suggests, with the pages of their products. In a dream another search shows the list of the most
similar one.

Products, options, groups of options and tabs have numbers for names (``product 12``, ``option 3``), which
small models copy well. Every page follows from the facts (`state_texts`), so an experience model names pages
and spells none.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import Any

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
_OF_VISIT = frozenset({"at", "from", "reads", "chosen"})
"""Predicates of what changes during a visit."""
_NO_CHANGE = Change()
_NOT_SHOWN: dict[str, Any] = {"query": "", "category": "", "path": (), "price": 0.0}
"""Of a product."""


def hidden_facts(shop: Shop, goal: Goal, tabs: Sequence[str], view: pages.View) -> tuple[Fact, ...]:
    facts: list[Fact] = [("at", AGENT, SEARCH_PAGE), ("start", SEARCH_PAGE)]
    facts += [("tab", f"tab {number}", tab) for number, tab in enumerate(tabs, 1)]
    facts += [("target", goal.product.id), ("wanted", str(len(goal.options)))]
    shown: dict[str, Product] = {}
    for number, words in enumerate(suggested_searches(goal.instruction), 1):
        hits, name = shop.search(words), f"list {number}"
        facts += [("search", name, words), ("total", name, str(len(hits)))]
        for rank, product in enumerate(hits[: pages.PAGE_SIZE * _pages(hits, goal)]):
            page, place = divmod(rank, pages.PAGE_SIZE)
            shown.setdefault(product.id, product)
            product_name = f"product {list(shown).index(product.id) + 1}"
            facts.append(("hit", product_name, f"page {page + 1} of {name}", str(place)))
    for number, product in enumerate(shown.values(), 1):
        facts += _product_facts(f"product {number}", product, goal, tabs, view)
    return tuple(fact for fact in facts if all(fact))


def _pages(hits: tuple[Product, ...], goal: Goal) -> int:
    rank = next((place for place, each in enumerate(hits) if each.id == goal.product.id), len(hits))
    return min(max(_FIRST_PAGES, rank // pages.PAGE_SIZE + 1), _LAST_PAGE)


def _product_facts(
    name: str, product: Product, goal: Goal, tabs: Sequence[str], view: pages.View
) -> Iterator[Fact]:
    yield ("id", name, product.id)
    yield ("title", name, product.title)
    yield ("price", name, product.price_tag)
    yield ("rating", name, product.rating)
    right, options = fits(goal, product), count(1)
    if right:
        yield ("fits", name)
    for number, (group, values) in enumerate(product.options.items(), 1):
        for value, option in zip(values, options, strict=False):
            yield ("option", name, f"group {number}", f"option {option}", group, value)
            if right and option_matches(goal, product, group, value):
                yield ("right", name, f"option {option}")
    for number, tab in enumerate(tabs, 1):
        for text in pages.tab_texts(product, tab):
            yield ("text", name, f"tab {number}", pages.short(text) if view == "elements" else text)


@dataclass(frozen=True, slots=True)
class Step:
    """What an action does: a change, or a refusal."""

    reason: str
    change: Change = _NO_CHANGE
    refusal: str | None = None
    shows: str = ""
    """The facts that make it possible here or not, as lines of a prompt."""


class VisitFacts:
    """An index of the facts of one moment. Names are those of the facts."""

    def __init__(self, facts: Iterable[Fact]) -> None:
        self.facts = frozenset(facts)
        self.wanted = 0
        self.visit: list[Fact] = []
        """What changes during a visit."""
        self.tabs: dict[str, str] = {}
        self.searches: dict[str, str] = {}
        self.totals: dict[str, str] = {}
        self.hits: dict[str, list[tuple[int, str]]] = defaultdict(list)
        self.options: dict[str, list[tuple[str, str, str, str]]] = defaultdict(list)
        """By product: names of group and option, and what the page shows of them."""
        self.about: dict[tuple[str, str], str] = {}
        """By predicate and product: id, title, price, rating."""
        self.texts: dict[tuple[str, str], list[str]] = defaultdict(list)
        """By product and tab."""
        now: dict[str, str] = {}
        chosen: dict[tuple[str, str], str] = {}
        for fact in facts:
            match fact:
                case ("at" | "from" | "reads", _, place):
                    now[fact[0]] = place
                case ("chosen", product, group, option):
                    chosen[product, group] = option
                case ("tab", name, tab):
                    self.tabs[name] = tab
                case ("wanted", number) if number.isdecimal():
                    self.wanted = int(number)
                case ("search", name, words):
                    self.searches[name] = words
                case ("total", name, number):
                    self.totals[name] = number
                case ("hit", product, page, place) if place.isdecimal():
                    self.hits[page].append((int(place), product))
                case ("option", product, group, option, *shown) if len(shown) == 2:
                    self.options[product].append((group, option, shown[0], shown[1]))
                case ("text", product, tab, text):
                    self.texts[product, tab].append(text)
                case (predicate, product, text):
                    self.about[predicate, product] = text
            if fact[0] in _OF_VISIT:
                self.visit.append(fact)
        self.at, self.back, self.reads = now.get("at", SEARCH_PAGE), now.get("from", ""), now.get("reads", "")
        self.chosen = {group: option for (product, group), option in chosen.items() if product == self.at}
        """Option by group, of the present product."""

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

    def listed(self, place: str) -> bool:
        """Whether a place is a page of results; the first one of a list may be empty."""
        return place in self.hits or place.removeprefix("page 1 of ") in self.totals

    def product(self, name: str) -> Product | None:
        """The product with what its pages show."""
        if ("id", name) not in self.about:
            return None
        options: dict[str, tuple[str, ...]] = {}
        for _, _, group, value in self.options[name]:
            options[group] = (*options.get(group, ()), value)
        known = {tab: tuple(self.texts.get((name, tab_name), ())) for tab_name, tab in self.tabs.items()}
        return Product(
            id=self.about["id", name],
            title=self.about.get(("title", name), ""),
            price_tag=self.about.get(("price", name), ""),
            rating=self.about.get(("rating", name), ""),
            description="".join(known.get("description", ())),
            features=known.get("features", ()),
            reviews=known.get("reviews", ()),
            attributes=known.get("attributes", ()),
            options=options,
            **_NOT_SHOWN,
        )

    def page(self) -> tuple[str, pages.Page | None]:
        """The name of the present page, and the page; None if the facts do not have it."""
        if self.at == SEARCH_PAGE:
            return SEARCH_PAGE, pages.search_page()
        if self.listed(self.at):
            return self.at, self._results()
        product = self.product(self.at)
        if product is None:
            return self.at, None
        if ("bought", self.at) in self.facts:
            return f"bought {self.at}", pages.done_page()
        if self.reads:
            tab = self.tabs.get(self.reads)
            return f"{self.reads} of {self.at}", pages.tab_page(product, tab) if tab in pages.TABS else None
        chosen = {g: v for group, option, g, v in self.options[self.at] if self.chosen.get(group) == option}
        return self.at, pages.item_page(product, chosen, tuple(self.tabs.values()))

    def _results(self) -> pages.Page | None:
        number, _, name = self.at.removeprefix("page ").partition(" of ")
        hits = [product for each in self.products(self.at) if (product := self.product(each))]
        total = self.totals.get(name, "")
        if not number.isdecimal() or not total.isdecimal():
            return None
        return pages.results_page(hits, int(number), int(total))

    def step(self, text: str) -> Step:
        """What an action does from here."""
        action = pages.parse_action(text)
        if action is None:
            return Step("no such action", refusal=pages.NO_SUCH_ACTION, shows="no such action")
        here = f"agent on {self.at}"
        if action.verb == "search":
            if self.at != SEARCH_PAGE:
                refused = f"{here}. a search box here: no"
                return Step(refused, refusal=pages.NO_SEARCH_HERE, shows="search: not here")
            name = self.nearest_list(action.words)
            reason = f"{here}. a search box here: yes. it shows {name or 'nothing'}"
            return self._move(reason, f"page 1 of {name}" if name else "", "search")
        moved = self._click(action.words)
        if moved is None:
            refused = f"{here}. such a button here: no"
            return Step(refused, refusal=pages.NO_SUCH_BUTTON, shows="click: not here")
        return replace(moved, reason=f"{here}. such a button here: yes. {moved.reason}")

    def _click(self, target: str) -> Step | None:
        if self.at == SEARCH_PAGE:
            return None
        if target == pages.BACK:
            return self._move("a new search", SEARCH_PAGE, "click")
        if self.listed(self.at):
            return self._click_result(target)
        if self.reads:
            left, shows = Change(ended=(("reads", AGENT, self.reads),)), f"click: {self.at}"
            return Step(f"back to {self.at}", left, shows=shows) if target == pages.PREVIOUS else None
        if target == pages.PREVIOUS:
            return self._move(f"back to {self.back}", self.back, "click")
        if target == pages.BUY:
            return self._buy()
        for name, tab in self.tabs.items():
            if tab == target:
                return Step(f"reads {name}", Change(begun=(("reads", AGENT, name),)), shows=f"click: {name}")
        return self._choose(target)

    def _click_result(self, target: str) -> Step | None:
        number, _, name = self.at.removeprefix("page ").partition(" of ")
        if target in (pages.PREVIOUS, pages.NEXT):
            if not number.isdecimal():
                return None
            other = f"page {int(number) + (1 if target == pages.NEXT else -1)} of {name}"
            return self._move(f"turns to {other}", other, "click") if other in self.hits else None
        found = next(
            (each for each in self.products(self.at) if self.about.get(("id", each)) == target), None
        )
        if found is None:
            return None
        moved = self._move(f"opens {found}", found, "click")
        before = (fact for fact in self.visit if fact[:2] == ("chosen", found))  # of an earlier visit
        begun = (*moved.change.begun, ("from", AGENT, self.at))
        return replace(moved, change=Change(ended=(*moved.change.ended, *before), begun=begun))

    def _choose(self, target: str) -> Step | None:
        named = ((each[0], each[1]) for each in self.options[self.at] if pages.target_of(each[3]) == target)
        group, option = next(named, ("", ""))
        if not option:
            return None
        before = self.chosen.get(group)
        ended: tuple[Fact, ...] = (
            (("chosen", self.at, group, before),) if before not in (None, option) else ()
        )
        begun: tuple[Fact, ...] = (("chosen", self.at, group, option),) if before != option else ()
        shows = f"click: {option} of {group} after {before or 'none'}"
        return Step(f"chooses {option} of {group}", Change(ended=ended, begun=begun), shows=shows)

    def _buy(self) -> Step:
        fits = "yes" if ("fits", self.at) in self.facts else "no"
        right = min(self.right_options(), self.wanted)
        verdict = "yes" if right == self.wanted else "no"
        return Step(
            f"{self.at}: fits {fits}. right options, {right} = {self.wanted}: {verdict}",
            Change(begun=(("bought", self.at),)),
            shows=f"{self.at}: fits {fits}\nright options: {right} of {self.wanted}",
        )

    def _move(self, reason: str, place: str, how: str) -> Step:
        ended: list[Fact] = [("at", AGENT, self.at)]
        ended += [("from", AGENT, self.back)] if self.back else []
        ended += [("reads", AGENT, self.reads)] if self.reads else []
        if not place:
            return Step(reason, shows=f"{how}: nothing")
        change = Change(ended=tuple(ended), begun=(("at", AGENT, place),))
        return Step(reason, change, shows=f"{how}: {place}")


def _overlap(left: set[str], right: set[str]) -> float:
    return len(left & right) / len(left | right) if left | right else 0.0


def facts_for(sheet: WorldSheet, action: str) -> list[str]:
    """The lines of a prompt about the sheet before an action: what its words name on the present page, where
    the agent is, and what it has chosen."""
    known = VisitFacts(sheet.facts)
    if action == "start":
        return [f"at {AGENT}, {known.at}"]
    step = known.step(action)
    mine = (fact for fact in known.visit if fact[1] in (AGENT, known.at) or fact in step.change.ended)
    return [*step.shows.split("\n"), *(f"{fact[0]} {', '.join(fact[1:])}" for fact in mine)]


def state_texts(task: Task, sheet: WorldSheet) -> dict[str, str]:
    """The page that the customer sees, if the facts have it, and the refusals, by their names."""
    known = VisitFacts(sheet.facts)
    name, page = known.page()
    view: pages.View = "elements" if task.parameters.get("view") == "elements" else "text"
    shown = {} if page is None else {name: pages.render(page, task.instruction, view)}
    return shown | {text.partition(". ")[2].rstrip(".").lower(): text for text in pages.REFUSALS}


def actions_on(page: pages.Page, instruction: str) -> tuple[str, ...]:
    """Clicks on everything that can be clicked; searches that the instruction suggests, where there is a
    search box."""
    clicks = (f"click[{target}]" for target in page.clickable)
    searches = suggested_searches(instruction) if page.can_search else ()
    return (*clicks, *(f"search[{words}]" for words in searches))


def dreamt_actions(task: Task, sheet: WorldSheet) -> tuple[str, ...]:
    """Those of the page that the customer sees; none where the facts do not have it."""
    _, page = VisitFacts(sheet.facts).page()
    return () if page is None else actions_on(page, task.instruction)


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
        right = {
            group
            for group, option, _, _ in known.options[product]
            if ("right", product, option) in known.facts
        }
        if ("fits", product) in known.facts and len(right) >= known.wanted:
            return True
    return False
