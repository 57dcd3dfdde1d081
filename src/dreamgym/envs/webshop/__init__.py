"""WebShop without Java: search a shop, open products, choose options, buy; the reward grades the purchase.

The rules are those of the WebShop paper, the data its standard JSON files or a small catalogue of our own. An
episode holds no thread, process or file, so many run concurrently in one event loop.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from pydantic import Field

from dreamgym.config import Section
from dreamgym.envs.episode import Episode, check_expert, check_split, select_tasks
from dreamgym.envs.registry import EnvironmentSpec
from dreamgym.envs.webshop import pages
from dreamgym.envs.webshop.annotator import WebShopAnnotator
from dreamgym.envs.webshop.experts import EXPERTS, expert_action
from dreamgym.envs.webshop.facts import (
    AGENT,
    actions_on,
    can_succeed,
    dreamt_actions,
    facts_for,
    goal_met,
    hidden_facts,
    state_texts,
)
from dreamgym.envs.webshop.goals import SPLITS, GoalKind
from dreamgym.envs.webshop.pages import REFUSALS, TABS, View
from dreamgym.envs.webshop.rewards import Goal
from dreamgym.envs.webshop.shop import Shop, Visit, open_shop
from dreamgym.errors import ConfigError, EpisodeOverError, MissingExtraError
from dreamgym.types import Outcome, State, Task, WorldSheet

NAME = "webshop"


class WebShopOptions(Section):
    """Options of the WebShop environment."""

    data: Path | None = Field(
        None, description="folder with WebShop's JSON files; by default WEBSHOP_DATA, else the own catalogue"
    )
    products: int | None = Field(None, ge=1, description="take only the first products of the catalogue")
    goals: GoalKind = Field("auto", description="auto: human instructions where the data has them")
    view: View = Field("text", description="text: as WebShop shows a page; elements: [id] type: description")
    attributes_page: bool = Field(True, description="item pages have a page that lists the attributes")
    graded: bool = Field(True, description="reward partial matches, as WebShop does; false for 0 or 1")
    horizon: int = Field(15, ge=1, description="actions after which an episode is truncated")


class WebShopEpisode(Episode):
    """One visit of the shop."""

    experts = EXPERTS
    finishing = (f"click[{pages.BUY}]",)
    """Actions that the policy `clumsy` tries too early."""

    def __init__(self, task: Task, shop: Shop, goal: Goal, options: WebShopOptions) -> None:
        super().__init__(task, options.horizon)
        self._shop, self._goal, self._options = shop, goal, options
        self._view: View = "elements" if task.parameters.get("view", options.view) == "elements" else "text"
        self._tabs = TABS if options.attributes_page else TABS[:-1]

    async def _start(self) -> State:
        self._visit = Visit(self._shop, self._goal, tabs=self._tabs)
        return self._state(None)

    async def _step(self, action: str) -> Outcome:
        refusal = self._visit.act(action)
        score = self._visit.score
        success = score is not None and score.reward == 1
        reward = 0.0 if score is None else score.reward if self._options.graded else float(success)
        return Outcome(
            next_state=self._state(refusal),
            reward=reward,
            terminated=score is not None,
            success=success,
            info={"score": score} if score is not None else {},
        )

    def _state(self, refusal: str | None) -> State:
        page = self._visit.page
        text = pages.render(page, self._goal.instruction, self._view)
        actions = actions_on(page, self._goal.instruction)
        return State(text=refusal or text, admissible_actions=actions)

    async def world_sheet(self) -> WorldSheet:
        if self._phase == "not started":
            raise EpisodeOverError("world_sheet: start the episode first")
        return WorldSheet(facts=hidden_facts(self._shop, self._goal, self._tabs, self._view))

    async def expert_action(self, expert: str | None = None) -> str:
        check_expert(expert, self.experts)
        self._require_running("expert_action")
        return expert_action(self._visit, expert)


class WebShopFactory:
    """One task for each goal of the catalogue."""

    name = NAME
    splits: tuple[str, ...] = SPLITS

    def __init__(self, options: WebShopOptions) -> None:
        self._options = options
        self._opened: Shop | None = None

    async def tasks(self, split: str, count: int | None = None, *, seed: int = 0) -> Sequence[Task]:
        check_split(split, self.splits, self.name)
        tasks = [_task(goal, split, self._options.view) for goal in self._shop.splits[split]]
        return select_tasks(tasks, split, count, seed)

    def make(self, task: Task, *, seed: int = 0) -> WebShopEpisode:
        return WebShopEpisode(task, self._shop, self._goal(task), self._options)

    async def aclose(self) -> None:
        """Nothing is held open."""

    @property
    def _shop(self) -> Shop:
        """Read when it is first used: a catalogue may have a million products."""
        if self._opened is None:
            self._opened = open_shop(self._options.data, self._options.products, self._options.goals)
        return self._opened

    def _goal(self, task: Task) -> Goal:
        number, goals = task.parameters.get("goal"), self._shop.goals
        known = isinstance(number, int) and 0 <= number < len(goals)
        goal = goals[number] if known and isinstance(number, int) else None
        if goal is None or goal.instruction != task.instruction:
            raise ConfigError(
                f"task {task.id!r} is not a goal of this catalogue; open the catalogue that it was recorded "
                "with (options data, products and goals, or WEBSHOP_DATA)"
            )
        return goal


def _task(goal: Goal, split: str, view: View) -> Task:
    return Task(
        id=f"{goal.product.id}-{goal.number}-{view}",
        instruction=goal.instruction,
        environment=NAME,
        split=split,
        family=goal.product.category,
        parameters={"goal": goal.number, "view": view},
    )


def open_webshop(options: WebShopOptions) -> WebShopFactory:
    if find_spec("bm25s") is None or find_spec("snowballstemmer") is None:
        raise MissingExtraError("WebShop", "webshop")
    return WebShopFactory(options)


SPEC = EnvironmentSpec(
    name=NAME,
    summary="buy the product that an instruction describes, in a shop with search",
    options=WebShopOptions,
    open=open_webshop,
    splits=SPLITS,
    extra="webshop",
    annotator=WebShopAnnotator,
    actor=AGENT,
    select_facts=facts_for,
    state_texts=state_texts,
    dreamt_actions=dreamt_actions,
    goal_met=goal_met,
    can_succeed=can_succeed,
    refusals=REFUSALS,
)
