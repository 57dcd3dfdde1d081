"""WebShop as a real web site in a browser: the engine of `webshop` behind HTML pages on loopback.

Tasks, rewards and experts are those of `webshop`; what an agent sees and does are those of the browser.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import Field

from dreamgym.envs.browser.environment import BrowserEpisode, BrowserFactory, BrowserOptions, site_spec
from dreamgym.envs.browser.process import check_installed
from dreamgym.envs.browser.site import Found, Site, Visit
from dreamgym.envs.webshop import WebShopOptions, open_webshop
from dreamgym.envs.webshop.experts import EXPERTS, expert_action
from dreamgym.envs.webshop.facts import AGENT, SEARCH_PAGE, can_succeed, goal_met, hidden_facts
from dreamgym.envs.webshop.goals import SPLITS, GoalKind, suggested_searches
from dreamgym.envs.webshop.pages import TABS
from dreamgym.envs.webshop.rewards import Goal
from dreamgym.envs.webshop.shop import Shop, open_shop
from dreamgym.envs.webshop.site import Session, ShopSite
from dreamgym.envs.webshop.site_facts import BOX, ShopSiteAnnotator, facts_for, state_texts
from dreamgym.errors import EpisodeFailedError
from dreamgym.types import Fact, FailureKind, Task, WorldSheet

NAME = "webshop-site"
ELEMENTS = 16
"""Of a state: a page of results has ten products and three buttons."""


class WebShopSiteOptions(BrowserOptions):
    """Options of WebShop in the browser."""

    elements: int = Field(ELEMENTS, ge=3, description="elements of a state, a table counts as one")
    data: Path | None = Field(
        None, description="folder with WebShop's JSON files; by default WEBSHOP_DATA, else the own catalogue"
    )
    products: int | None = Field(None, ge=1, description="take only the first products of the catalogue")
    goals: GoalKind = Field("auto", description="auto: human instructions where the data has them")
    graded: bool = Field(True, description="reward partial matches, as WebShop does; false for 0 or 1")


class WebShopSiteEpisode(BrowserEpisode):
    """A visit whose hidden facts are those of the shop behind the site."""

    async def world_sheet(self) -> WorldSheet:
        return await self._factory.world_sheet(self.task)


class WebShopSiteFactory(BrowserFactory):
    """One task for each goal of the catalogue."""

    episode = WebShopSiteEpisode

    def __init__(self, site: WebShopSite, options: WebShopSiteOptions) -> None:
        super().__init__(site, options, name=NAME)
        self._shop_site = site

    async def world_sheet(self, task: Task) -> WorldSheet:
        view = ("view", self.options.view, str(self.options.elements))
        return WorldSheet(facts=(*self._shop_site.facts(task), ("has", SEARCH_PAGE, BOX), view))


class WebShopSite(Site):
    """buy the product that an instruction describes, in a shop on real web pages"""

    name = NAME
    experts = EXPERTS
    horizon = 25

    def __init__(self, shop: Shop, *, graded: bool = True) -> None:
        self._shop = shop
        self._graded = graded
        self._site = ShopSite(shop)

    def app(self) -> Any:
        return self._site.app()

    def tasks(self) -> Mapping[str, Sequence[Task]]:
        return {
            split: [
                Task(
                    id=f"{goal.product.id}-{goal.number}",
                    instruction=goal.instruction,
                    environment=NAME,
                    split=split,
                    family=goal.product.category,
                    parameters={"goal": goal.number},
                )
                for goal in self._shop.splits[split]
            ]
            for split in SPLITS
        }

    def facts(self, task: Task) -> tuple[Fact, ...]:
        return hidden_facts(self._shop, self._goal(task), TABS, "text")

    def _goal(self, task: Task) -> Goal:
        number, goals = task.parameters.get("goal"), self._shop.goals
        goal = goals[number] if isinstance(number, int) and 0 <= number < len(goals) else None
        if goal is None or goal.instruction != task.instruction:
            raise EpisodeFailedError(
                FailureKind.INVALID_TASK,
                f"{NAME}: task {task.id!r} is not a goal of this catalogue; open the catalogue that it "
                "was recorded with (options data, products and goals, or WEBSHOP_DATA)",
            )
        return goal

    async def open(self, visit: Visit) -> str:
        visit.data = self._site.open(self._goal(visit.task))
        return str(visit.data.path)

    async def check(self, visit: Visit) -> bool | float:
        score = visit.data.visit.score
        if score is None:
            return False
        return float(score.reward if self._graded else score.reward == 1)

    async def close(self, visit: Visit) -> None:
        if isinstance(visit.data, Session):
            self._site.close(visit.data)

    async def expert_action(self, visit: Visit, expert: str | None) -> str:
        verb, _, words = expert_action(visit.data.visit, expert).removesuffix("]").partition("[")
        if verb == "search":
            (box,), (button,) = await visit.find("input[name=search]"), await visit.find("form button")
            return f"click({button.id!r})" if box.value == words else f"fill({box.id!r}, {words!r})"
        found: list[Found] = await visit.find(f'button[name=click][value="{_css(words)}"]')
        return f"click({found[0].id!r})" if found else "noop()"

    def values(self, task: Task) -> Sequence[str]:
        return suggested_searches(task.instruction)


def _css(text: str) -> str:
    """Inside a quoted value of a CSS selector."""
    return text.replace("\\", "\\\\").replace('"', '\\"')


def open_webshop_site(options: WebShopSiteOptions) -> BrowserFactory:
    check_installed("browser", "WebShop in the browser")
    open_webshop(WebShopOptions())  # its own extra
    shop = open_shop(options.data, options.products, options.goals)
    return WebShopSiteFactory(WebShopSite(shop, graded=options.graded), options)


SPEC = site_spec(
    WebShopSite,  # type: ignore[arg-type]  # made by `open`
    NAME,
    open=open_webshop_site,
    options=WebShopSiteOptions,
    splits=SPLITS,
    extra="browser",
    annotator=ShopSiteAnnotator,
    actor=AGENT,
    select_facts=facts_for,
    state_texts=state_texts,
    goal_met=goal_met,
    can_succeed=can_succeed,
)
