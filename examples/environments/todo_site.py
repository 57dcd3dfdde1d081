"""A web site of your own in a real browser: `--env examples/environments/todo_site.py:TodoSite`."""

from __future__ import annotations

import random
from html import escape
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import HTMLResponse
from starlette.routing import Route

import dreamgym as dg
from dreamgym.envs.browser import Site, Visit

THINGS = ["milk", "bread", "rice", "tea", "apples", "soap"]
FORM = "<form><label>New <input name=add></label><button>Add</button></form>"


class TodoSite(Site):
    """Put two things on a shopping list."""

    def __init__(self) -> None:
        self.lists: dict[str, list[str]] = {}  # one list for each episode

    def tasks(self) -> dict[str, list[dg.Task]]:
        return {"train": [self.task(n) for n in range(100)], "test": [self.task(n) for n in range(100, 120)]}

    def task(self, number: int) -> dg.Task:
        one, two = wanted = random.Random(number).sample(THINGS, 2)
        setup = {"start": "/{session}", "values": THINGS, "wanted": sorted(wanted)}
        text = f"Put {one} and {two} on the list."
        return dg.Task(id=f"todo-{number}", instruction=text, environment="todo", parameters=setup)

    def app(self) -> Any:
        async def show(request: Request) -> HTMLResponse:
            things = self.lists.setdefault(request.path_params["session"], [])
            things += request.query_params.getlist("add")
            items = "".join(f"<li>{escape(each)}</li>" for each in things)
            return HTMLResponse(f"<title>List</title><h1>List</h1><ul>{items}</ul>{FORM}")

        return Starlette(routes=[Route("/{session}", show)])

    async def check(self, visit: Visit) -> bool:
        return sorted(self.lists.get(visit.session, [])) == visit.task.parameters["wanted"]
