"""MiniWoB++: small web tasks in a real browser, on the pages that come with the package `miniwob`.

An instance is a seed of a page's own generator; training and test seeds differ. The reward is 1 for a solved
task, without MiniWoB++'s discount for the time that it took, and 0 for everything else.
"""

from __future__ import annotations

import asyncio
import random
import re
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from pydantic import Field, field_validator

from dreamgym.config import nearest_name
from dreamgym.envs.browser.environment import BrowserFactory, BrowserOptions, site_spec
from dreamgym.envs.browser.process import check_installed
from dreamgym.envs.browser.site import Site, Visit, shown_id
from dreamgym.envs.episode import check_count, check_split
from dreamgym.envs.miniwob.experts import EXPERTS, SOLVERS, heuristic_action
from dreamgym.envs.miniwob.instructions import texts_to_type
from dreamgym.errors import EpisodeFailedError, MissingExtraError
from dreamgym.types import FailureKind, Task

NAME = "miniwob"
KINDS = tuple(sorted(SOLVERS))
FIRST_SEED = {"train": 0, "test": 1_000_000}
"""Seeds of a split start here."""
_PRELOAD = """async () => {
  // Images that appear under the pointer: while they load, their elements move.
  const rules = [...document.styleSheets].flatMap((sheet) => [...sheet.cssRules].map((rule) => rule.cssText));
  const found = rules.join(' ').matchAll(/url\\("([^"]+)"\\)/g);
  await Promise.all([...new Set([...found].map((each) => each[1]))].map((source) => new Promise((done) => {
    const image = new Image();
    image.onload = image.onerror = done;
    image.src = source;
  })));
}"""
_BEGIN = """([seed]) => {
  core.EPISODE_MAX_TIME = 2 ** 30;  // no time limit
  Math.seedrandom(String(seed));
  core.startEpisodeReal();
  for (const id of ['reward-display', 'click-canvas']) document.getElementById(id).style.display = 'none';
  document.getElementById('query').setAttribute('aria-hidden', 'true');  // the instruction is the task's
  return core.getUtterance();
}"""
_RESULT = """() => {
  if (!WOB_DONE_GLOBAL) return null;
  core.cover_div.style.display = 'none';  // the button that starts another episode
  return WOB_RAW_REWARD_GLOBAL;
}"""


class MiniWobOptions(BrowserOptions):
    """Options of the MiniWoB++ environment."""

    kinds: tuple[str, ...] = Field((), description="kinds of tasks; none for all")
    instances: dict[str, int] = Field(
        {"train": 100, "test": 25}, description="instances of each kind in a split, one seed for each"
    )

    @field_validator("kinds")
    @classmethod
    def _known(cls, kinds: tuple[str, ...]) -> tuple[str, ...]:
        for kind in kinds:
            if kind not in KINDS:
                raise ValueError(f"unknown kind {kind!r}{nearest_name(kind, KINDS)}")
        return kinds

    @field_validator("instances")
    @classmethod
    def _splits(cls, instances: dict[str, int]) -> dict[str, int]:
        if set(instances) != set(FIRST_SEED) or not all(1 <= each <= 100_000 for each in instances.values()):
            raise ValueError(
                f"expected a number of instances for each of {', '.join(FIRST_SEED)}, got {instances}"
            )
        return instances


class MiniWobSite(Site):
    """MiniWoB++: log in, book a flight, answer an e-mail and other small tasks on web pages"""

    name = NAME
    experts = EXPERTS
    horizon = 25
    explored = True

    def app(self) -> Any:
        from starlette.applications import Starlette
        from starlette.routing import Mount
        from starlette.staticfiles import StaticFiles

        return Starlette(routes=[Mount("/", StaticFiles(directory=pages_folder()))])

    def tasks(self) -> Mapping[str, Sequence[Task]]:
        return {}  # the factory lists them: instructions are made by the pages

    async def open(self, visit: Visit) -> str:
        kind = str(visit.task.parameters.get("kind"))
        if kind not in KINDS:
            raise EpisodeFailedError(
                FailureKind.INVALID_TASK, f"{NAME}: unknown kind {kind!r}{nearest_name(kind, KINDS)}"
            )
        return page_path(kind)

    async def ready(self, visit: Visit) -> None:
        await visit.page.evaluate(_PRELOAD)
        shown = await visit.page.evaluate(_BEGIN, [visit.task.parameters.get("seed")])
        await visit.context.clock.run_for(1000)
        if shown != visit.task.instruction:
            raise EpisodeFailedError(
                FailureKind.INVALID_TASK,
                f"{NAME}: task {visit.task.id!r} was recorded with other pages: expected "
                f"{visit.task.instruction!r}, got {shown!r}; install the version of miniwob that it "
                "was recorded with",
            )

    async def check(self, visit: Visit) -> bool | float:
        reward = await visit.page.evaluate(_RESULT)
        return False if reward is None else float(reward >= 1)

    async def expert_action(self, visit: Visit, expert: str | None) -> str:
        if expert == "heuristic":
            return heuristic_action(visit)
        action = await SOLVERS[str(visit.task.parameters["kind"])](visit)
        return re.sub(r"'(\d+)'", lambda found: repr(shown_id(visit, found[1])), action, count=1)

    def values(self, task: Task) -> Sequence[str]:
        return texts_to_type(task.instruction)


class MiniWobFactory(BrowserFactory):
    """Instances of each kind; the browser writes their instructions."""

    def __init__(self, options: MiniWobOptions) -> None:
        super().__init__(MiniWobSite(), options, name=NAME)
        self._kinds = options.kinds or KINDS
        self._instances = options.instances
        self._instructions: dict[tuple[str, int], str] = {}

    @property
    def splits(self) -> tuple[str, ...]:
        return tuple(FIRST_SEED)

    async def tasks(self, split: str, count: int | None = None, *, seed: int = 0) -> Sequence[Task]:
        check_split(split, self.splits, self.name)
        first = FIRST_SEED[split]
        every = [(kind, first + place) for place in range(self._instances[split]) for kind in self._kinds]
        check_count(split, len(every), count)
        random.Random(seed).shuffle(every)
        chosen = every[:count]
        await self._write_instructions(chosen)
        return [self._task(split, kind, number) for kind, number in chosen]

    def _task(self, split: str, kind: str, number: int) -> Task:
        return Task(
            id=f"{kind}-{number}",
            instruction=self._instructions[kind, number],
            environment=NAME,
            split=split,
            family=kind,
            parameters={"kind": kind, "seed": number},
        )

    async def _write_instructions(self, instances: Sequence[tuple[str, int]]) -> None:
        missing = [each for each in instances if each not in self._instructions]
        for kind in sorted({kind for kind, _ in missing}):
            await self._ask(kind, [number for other, number in missing if other == kind])

    async def _ask(self, kind: str, seeds: Sequence[int]) -> None:
        from playwright.async_api import Error

        tab = await self.process.open([await self.address()], virtual_time=True)
        try:
            async with asyncio.timeout(self.options.seconds + 0.1 * len(seeds)):
                await tab.page.goto(self.base + page_path(kind), timeout=1000 * self.options.seconds)
                for seed in seeds:
                    self._instructions[kind, seed] = str(await tab.page.evaluate(_BEGIN, [seed]))
        except (Error, TimeoutError) as error:
            message = f"{NAME}: no instruction for {kind!r}: {error}"
            raise EpisodeFailedError(FailureKind.CRASHED, message) from None
        finally:
            await self.process.close(tab)


def page_path(kind: str) -> str:
    return f"/miniwob/{kind}.html"


def pages_folder() -> Path:
    """The HTML files of the package `miniwob`, which is not imported: it would load Selenium."""
    found = find_spec("miniwob")
    if found is None or not found.submodule_search_locations:
        raise MissingExtraError("MiniWoB++", NAME)
    return Path(found.submodule_search_locations[0]) / "html"


def open_miniwob(options: MiniWobOptions) -> MiniWobFactory:
    check_installed(NAME, "MiniWoB++")
    pages_folder()
    return MiniWobFactory(options)


SPEC = site_spec(
    MiniWobSite, NAME, open=open_miniwob, options=MiniWobOptions, splits=tuple(FIRST_SEED), extra=NAME
)
