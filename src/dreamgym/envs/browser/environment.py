"""Episodes in a real browser: what an agent sees and does on the pages of a `Site`."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, Protocol
from urllib.parse import urlsplit

from pydantic import Field

from dreamgym.config import Section
from dreamgym.envs.browser.actions import NOT_AN_ACTION, parse_action
from dreamgym.envs.browser.annotator import SiteAnnotator
from dreamgym.envs.browser.exploration import Explorer
from dreamgym.envs.browser.facts import can_succeed, facts_for, goal_met, state_texts
from dreamgym.envs.browser.mapping import (
    admissible_actions,
    elements_text,
    relevant_elements,
    useful_elements,
)
from dreamgym.envs.browser.perform import REFUSALS, perform
from dreamgym.envs.browser.process import BrowserProcess, Tab, check_installed, first_line
from dreamgym.envs.browser.site import Site, Visit
from dreamgym.envs.browser.snapshot import ATTRIBUTE, MARK, Node, build_tree, render_tree
from dreamgym.envs.episode import Episode, check_expert, check_split, select_tasks
from dreamgym.envs.registry import EnvironmentSpec
from dreamgym.errors import ConfigError, EpisodeFailedError, EpisodeOverError
from dreamgym.http_server import HttpServer
from dreamgym.single_flight import SingleFlight
from dreamgym.types import FailureKind, Outcome, State, Task, WorldSheet

View = Literal["elements", "tree"]
EXTRA = "browser"
_SETTLE = 1000
"""Milliseconds of virtual time after an action: animations and delayed menus finish."""
_REAL_SETTLE = 0.5
"""Seconds of real time after an action, where the clock is real."""
_TRIES = 5
"""Of reading a page that navigates meanwhile."""


_ASKED = """() => {
  const before = window.dreamgymAsked === true;
  window.dreamgymAsked = true;
  return before;
}"""


EXPLORED: dict[str, Any] = {
    "annotator": SiteAnnotator,
    "select_facts": facts_for,
    "state_texts": state_texts,
    "goal_met": goal_met,
    "can_succeed": can_succeed,
}
"""Roles of a site that is `explored`."""


class BrowserOptions(Section):
    """Options of an environment in the browser."""

    executable: Path | None = Field(
        None, description="Chromium; by default DREAMGYM_CHROMIUM, else the one on the PATH"
    )
    view: View = Field(
        "elements",
        description="elements: the relevant ones as [id] type: description; tree: the accessibility tree",
    )
    elements: int = Field(10, ge=3, description="elements of a state in that view, a table counts as one")
    horizon: int | None = Field(None, ge=1, description="actions per episode; by default the site's own")
    sandbox: bool | None = Field(None, description="Chromium's sandbox; by default on, except for root")
    pages: int = Field(64, ge=1, description="episodes that are open at once; others wait")
    seconds: float = Field(60.0, gt=0, description="for one action or one start; more is a failed episode")
    explore: int = Field(
        60, ge=1, description="real actions that find the facts of a task, where the site is `explored`"
    )


class StateMapper(Protocol):
    """Chooses the elements of a page that an agent sees, in document order; `model_mapper` has one."""

    async def choose(self, root: Node, task: Task, actions: list[str], limit: int) -> list[Node]: ...


class BrowserEpisode(Episode):
    """One visit of the site, in a browser context of its own."""

    def __init__(self, task: Task, factory: BrowserFactory, horizon: int, *, explores: bool = False) -> None:
        super().__init__(task, horizon)
        self._factory = factory
        self._explores = explores
        self._site = factory.site
        self.experts = factory.site.experts
        self.finishing = factory.site.finishing
        self._tab: Tab | None = None
        self._visit: Visit | None = None
        self._state = State(text="")

    async def _start(self) -> State:
        try:
            return await self._opened()
        except BaseException:
            await self._release()
            raise

    async def _opened(self) -> State:
        factory = self._factory
        address = await factory.address()
        virtual = factory.virtual_time
        tab = self._tab = await factory.process.open(
            [address, *self._site.allow], virtual_time=virtual, explores=self._explores
        )
        visit = self._visit = Visit(task=self.task, session=secrets.token_urlsafe(12), context=tab.context)
        async with self._bounded("start"):
            path = await self._site.open(visit)
            page = path if path.startswith(("http://", "https://")) else factory.base + path
            await visit.page.goto(page, timeout=1000 * factory.options.seconds)
            await self._settle(visit)
            await self._site.ready(visit)
            self._state = await self._read(visit)
        return self._state

    async def _step(self, action: str) -> Outcome:
        visit = self._running_visit()
        parsed = parse_action(action)
        if parsed is None:
            return _refused(NOT_AN_ACTION, self._state)
        async with self._bounded(f"action {action[:100]!r}"):
            seconds = self._factory.options.seconds
            refusal = await perform(visit.page, parsed, seconds=seconds, uploads=self._site.uploads)
            if refusal is not None:
                return _refused(refusal, self._state)
            visit.actions.append(action)
            if parsed.name == "send_msg_to_user":
                visit.messages.append(str(parsed.arguments[0]))
            await self._settle(visit)
            result = await self._site.check(visit)
            self._state = await self._read(visit)
        over = result is not False
        reward = float(result)
        state = replace(self._state, admissible_actions=()) if over else self._state
        return Outcome(next_state=state, reward=reward, terminated=over, success=over and reward >= 1)

    async def aclose(self) -> None:
        await super().aclose()
        await self._release()

    async def expert_action(self, expert: str | None = None) -> str:
        check_expert(expert, self.experts)
        self._require_running("expert_action")
        async with self._bounded("expert"):
            return await self._site.expert_action(self._running_visit(), expert)

    async def new_document(self) -> bool:
        """Whether the page has loaded another document since this was asked last."""
        return not await self._running_visit().page.evaluate(_ASKED)

    @property
    def tree(self) -> Node:
        """The whole page after the last action."""
        return self._running_visit().tree

    async def _release(self) -> None:
        tab, visit, self._tab, self._visit = self._tab, self._visit, None, None
        if tab is not None:
            await self._factory.process.close(tab)
        if visit is not None:
            await self._site.close(visit)

    def _running_visit(self) -> Visit:
        if self._visit is None:
            raise EpisodeOverError("expected a running episode")
        return self._visit

    @asynccontextmanager
    async def _bounded(self, what: str) -> AsyncIterator[None]:
        """A page that hangs, or a tab or browser that dies, costs this episode."""
        from playwright.async_api import Error
        from playwright.async_api import TimeoutError as PageTimeoutError

        name, seconds = self.task.environment, self._factory.options.seconds
        try:
            async with asyncio.timeout(seconds):
                yield
        except (TimeoutError, PageTimeoutError):
            message = f"{name}: {what}: no answer of the page within {seconds:g} seconds"
            raise EpisodeFailedError(FailureKind.TIMEOUT, message) from None
        except Error as error:
            raise EpisodeFailedError(FailureKind.CRASHED, f"{name}: {what}: {first_line(error)}") from None
        except IndexError:  # no page is left
            message = f"{name}: {what}: the page has closed itself"
            raise EpisodeFailedError(FailureKind.CRASHED, message) from None

    async def _settle(self, visit: Visit) -> None:
        from playwright.async_api import Error

        for _ in range(_TRIES):
            page = visit.page
            try:
                await page.wait_for_load_state("load")
                if self._factory.virtual_time:
                    await visit.context.clock.run_for(_SETTLE)
                else:
                    await asyncio.sleep(_REAL_SETTLE)
                await page.wait_for_load_state("load")
            except Error as error:
                if not _navigates(error):
                    raise
                continue
            if page is visit.page:
                return

    async def _read(self, visit: Visit) -> State:
        """The state of the page; read again if it navigates meanwhile."""
        from playwright.async_api import Error

        for attempt in range(_TRIES):
            page = visit.page
            try:
                await page.evaluate(MARK, ATTRIBUTE)
                session = await visit.context.new_cdp_session(page)
                try:
                    tree = await session.send("Accessibility.getFullAXTree")
                    snapshot = await session.send("DOMSnapshot.captureSnapshot", {"computedStyles": []})
                finally:
                    await session.detach()
                break
            except Error as error:
                if attempt == _TRIES - 1 or not _navigates(error):
                    raise
                await self._settle(visit)
        visit.tree = build_tree(tree, snapshot)
        return await self._factory.state_of(visit)


class ExploredEpisode(BrowserEpisode):
    """A visit whose hidden facts are found by visits of their own."""

    async def world_sheet(self) -> WorldSheet:
        self._require_running("world_sheet")
        return await self._factory.world_sheet(self.task)


def _navigates(error: Exception) -> bool:
    return "Execution context was destroyed" in str(error) or "navigat" in str(error)


def _refused(refusal: str, state: State) -> Outcome:
    return Outcome(next_state=replace(state, text=refusal), reward=0.0, terminated=False, success=False)


class BrowserFactory:
    """The episodes of one site in one browser."""

    episode: type[BrowserEpisode] = BrowserEpisode

    def __init__(self, site: Site, options: BrowserOptions, *, name: str) -> None:
        self.site = site
        if site.explored:
            self.episode = ExploredEpisode
        self.name = name
        self.options = options
        self.mapper: StateMapper | None = None
        """Instead of the rules of `mapping`; set it before the first episode."""
        self.process = BrowserProcess(options.executable, pages=options.pages, sandbox=options.sandbox)
        self._app = site.app()
        if (self._app is None) == (not site.url):
            raise ConfigError(f"site {name!r}: expected either a url or an app")
        self.base = site.url.rstrip("/")
        self.virtual_time = site.virtual_time if site.virtual_time is not None else self._app is not None
        self._server: HttpServer | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._listed: dict[str, list[Task]] | None = None
        self._sheets: dict[str, WorldSheet] = {}
        self._exploring: SingleFlight[WorldSheet] = SingleFlight()

    @property
    def splits(self) -> tuple[str, ...]:
        return tuple(self._tasks)

    async def tasks(self, split: str, count: int | None = None, *, seed: int = 0) -> Sequence[Task]:
        check_split(split, self.splits, self.name)
        return select_tasks(self._tasks[split], split, count, seed)

    def make(self, task: Task, *, seed: int = 0) -> BrowserEpisode:
        return self.episode(task, self, self.options.horizon or self.site.horizon)

    async def world_sheet(self, task: Task) -> WorldSheet:
        """The facts of a task; the site is explored once for each."""
        known = self._sheets.get(task.id)
        if known is None:
            known = await self._exploring.do(task.id, lambda: self._explore(task))
            self._sheets[task.id] = known
        return known

    async def _explore(self, task: Task) -> WorldSheet:
        horizon, options = self.options.horizon or self.site.horizon, self.options
        explorer = Explorer(
            lambda: BrowserEpisode(task, self, horizon, explores=True),
            self.site.values(task),
            options.explore,
        )
        await explorer.run()
        return WorldSheet(facts=explorer.facts(options.view, options.elements))

    async def aclose(self) -> None:
        await self.process.aclose()
        server, self._server = self._server, None
        if server is not None and self._loop is asyncio.get_running_loop():
            await server.aclose()

    async def address(self) -> str:
        """``host:port`` of the site; the app is started when it is first needed."""
        loop = asyncio.get_running_loop()
        if self._app is not None and (self._server is None or loop is not self._loop):
            self._loop, self._server = loop, HttpServer(self._app)
            self._starting = asyncio.create_task(self._server.start())
        if self._server is not None:
            await asyncio.shield(self._starting)
            self.base = self._server.url
        parts = urlsplit(self.base)
        return f"{parts.hostname}:{parts.port or (443 if parts.scheme == 'https' else 80)}"

    async def state_of(self, visit: Visit) -> State:
        """What an agent sees of the page, and what it can do there."""
        limit, wanted = self.options.elements, self.site.wanted(visit.task)
        if self.options.view == "tree":
            text, kept = render_tree(visit.tree), useful_elements(visit.tree)
        else:
            if self.mapper is not None:
                kept = await self.mapper.choose(visit.tree, visit.task, visit.actions, limit)
            else:
                kept = relevant_elements(visit.tree, wanted, limit)
            text = elements_text(visit.tree, kept, wanted)
        actions = admissible_actions(kept, self.site.values(visit.task))
        return State(text=text, admissible_actions=tuple(actions) or ("noop()",))

    @property
    def _tasks(self) -> dict[str, list[Task]]:
        if self._listed is None:
            listed = self.site.tasks()
            self._listed = {
                split: [replace(task, environment=self.name, split=split) for task in tasks]
                for split, tasks in listed.items()
            }
        return self._listed


def site_spec(site: Callable[[], Site], name: str, **fields: Any) -> EnvironmentSpec:
    """The spec of a site, which is made when the environment is opened."""

    def open_site(options: BrowserOptions) -> BrowserFactory:
        check_installed(EXTRA, name)
        return BrowserFactory(site(), options, name=name)

    given: dict[str, Any] = {
        "name": name,
        "open": open_site,
        "summary": (site.__doc__ or "").strip().partition("\n")[0],
        "options": BrowserOptions,
        "extra": EXTRA,
        "refusals": REFUSALS,
        "horizon": getattr(site, "horizon", None),
    }
    return EnvironmentSpec(**(given | (EXPLORED if getattr(site, "explored", False) else {}) | fields))
