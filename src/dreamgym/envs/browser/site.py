"""A web site as an environment: where it is, its tasks, and a check in Python. Subclass `Site`.

`examples/environments/todo_site.py` is a whole one. The site is at `url`, or `app` returns an ASGI
application, which is started on loopback for the run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from dreamgym.envs.browser.mapping import useful_elements
from dreamgym.envs.browser.snapshot import ATTRIBUTE, Node
from dreamgym.types import Task

if TYPE_CHECKING:
    from dreamgym.envs.registry import EnvironmentSpec

FIND = """([name, selector]) => [...document.querySelectorAll(selector)].map((e) => ({
  id: e.getAttribute(name) || '',
  text: (e.innerText || e.textContent || '').trim().replace(/\\s+/g, ' '),
  value: e.value === undefined ? '' : String(e.value),
  checked: Boolean(e.checked),
  visible: e.getClientRects().length > 0,
  classes: e.getAttribute('class') || '',
}))"""


@dataclass(frozen=True, slots=True)
class Found:
    """An element that a CSS selector found, for experts and checks."""

    id: str
    text: str
    value: str
    checked: bool
    visible: bool
    classes: str


@dataclass(slots=True, kw_only=True)
class Visit:
    """One episode, as checks and experts see it."""

    task: Task
    session: str
    """An unguessable key, for sites that keep something for each episode."""
    context: Any
    """Playwright's browser context."""
    tree: Node = field(default_factory=lambda: Node("", "RootWebArea", ""))
    """The page after the last action."""
    actions: list[str] = field(default_factory=list)
    """What the agent has done."""
    messages: list[str] = field(default_factory=list)
    """What the agent has sent to the user."""
    data: Any = None
    """Whatever the site keeps for this episode."""

    @property
    def page(self) -> Any:
        """Playwright's page: the newest one that is open."""
        return self.context.pages[-1]

    async def find(self, selector: str) -> list[Found]:
        """The elements of a CSS selector, in document order."""
        return [Found(**each) for each in await self.page.evaluate(FIND, [ATTRIBUTE, selector])]


def shown_id(visit: Visit, number: str) -> str:
    """The id under which an agent sees an element: of nested ones only one is listed."""
    node = next((each for each in visit.tree.walk() if each.id == number), None)
    listed = {each.id for each in useful_elements(visit.tree)}
    if node is None or number in listed:
        return number
    inner = [each.id for each in node.walk() if each.id in listed]
    while node is not None and node.id not in listed:
        node = node.parent
    return inner[0] if inner else node.id if node is not None else number


class Site:
    """A web site with tasks. Override `tasks` and `check`, and give `url` or `app`."""

    name: ClassVar[str] = "site"
    url: str = ""
    """``http://host:port`` of a site that is running; empty for `app`."""
    allow: Sequence[str] = ()
    """Further ``host:port`` that its pages may reach; everything else is blocked."""
    horizon: int = 20
    experts: tuple[str, ...] = ()
    finishing: tuple[str, ...] = ()
    explored: ClassVar[bool] = False
    """Whether episodes have a world sheet: the pages and effects that visits of their own find for each task
    (`exploration`), along the way of the first expert and next to it. The same actions must always lead to
    the same pages."""
    virtual_time: bool | None = None
    """Whether the clock of pages stands still between actions, so that episodes repeat exactly; by default
    for an `app`."""
    uploads: Path | None = None
    """The folder whose files an agent may upload."""

    def app(self) -> Any:
        """The ASGI application."""
        return None

    def tasks(self) -> Mapping[str, Sequence[Task]]:
        """By split. ``parameters["start"]`` is the path of the first page; ``{session}`` in it becomes the
        key of the episode. ``parameters["values"]`` lists texts that are worth typing."""
        raise NotImplementedError

    async def open(self, visit: Visit) -> str:
        """The path of the first page, or its whole address on a host of `allow`."""
        start = visit.task.parameters.get("start", "/")
        return str(start).replace("{session}", visit.session)

    async def ready(self, visit: Visit) -> None:
        """Called when the first page is loaded."""

    async def check(self, visit: Visit) -> bool | float:
        """After each action: True ends the episode with success, False continues it, a number ends it with
        that reward (success is 1)."""
        raise NotImplementedError

    async def close(self, visit: Visit) -> None:
        """Called once at the end of each episode."""

    async def expert_action(self, visit: Visit, expert: str | None) -> str:
        """The action of an expert; called only if `experts` names one."""
        raise NotImplementedError

    def wanted(self, task: Task) -> str:
        """The words with which the state mapping compares elements."""
        return task.instruction

    def values(self, task: Task) -> Sequence[str]:
        """Texts that are worth typing: they make the list of admissible actions finite."""
        given = task.parameters.get("values", [])
        return [str(each) for each in given] if isinstance(given, list) else []

    @classmethod
    def environment_spec(cls, name: str | None = None) -> EnvironmentSpec:
        """The site as an environment; `registry.as_environment` and references call it."""
        from dreamgym.envs.browser.environment import site_spec

        return site_spec(cls, name or cls.name)
