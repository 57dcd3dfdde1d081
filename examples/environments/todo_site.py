"""A web site of your own in a real browser: `--env examples/environments/todo_site.py:TodoSite`."""

import random
from html import escape

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import HTMLResponse
from starlette.routing import Route

import dreamgym as dg
from dreamgym.envs.browser import Site, Visit

THINGS = ["milk", "bread", "rice", "tea", "apples", "soap"]


class TodoSite(Site):
    """Put two things on a shopping list."""

    def __init__(self) -> None:
        self.lists: dict[str, list[str]] = {}  # one list for each episode

    def tasks(self) -> dict[str, list[dg.Task]]:
        return {"train": [self.task(n) for n in range(100)], "test": [self.task(n) for n in range(100, 120)]}

    def task(self, n: int) -> dg.Task:
        one, two = wanted = random.Random(n).sample(THINGS, 2)
        setup = {"start": "/{session}", "values": THINGS, "wanted": sorted(wanted)}
        return dg.Task(id=str(n), instruction=f"List {one} and {two}.", environment="todo", parameters=setup)

    async def show(self, request: Request) -> HTMLResponse:
        things = self.lists.setdefault(request.path_params["session"], [])
        things += request.query_params.getlist("add")
        return HTMLResponse("<li>".join(["", *map(escape, things)]) + "<form>New <input name=add><button>Add")

    def app(self) -> Starlette:
        return Starlette(routes=[Route("/{session}", self.show)])

    async def check(self, visit: Visit) -> bool:
        return sorted(self.lists.get(visit.session, [])) == visit.task.parameters["wanted"]
