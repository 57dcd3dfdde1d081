"""WebShop as a web site: the pages of the same engine as HTML, for a browser on this machine.

A session is one visit. Its address cannot be guessed; its state is kept until it is closed.

    site = ShopSite(open_shop(None, None, "auto"))
    server = HttpServer(site.app())
    await server.start()
    session = site.open(goal)
    page = server.url + session.path        # open it in a browser
    ...
    site.close(session).score               # None if nothing was bought
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any
from urllib.parse import parse_qs

from dreamgym.envs.webshop import pages
from dreamgym.envs.webshop.pages import Element, Page
from dreamgym.envs.webshop.rewards import Goal
from dreamgym.envs.webshop.shop import Shop, Visit

_MAX_BODY = 4096
"""Bytes of a form."""
_HEADERS: Mapping[str, str] = {
    "content-security-policy": "default-src 'none'; style-src 'unsafe-inline'; form-action 'self'",
    "cache-control": "no-store",
    "x-content-type-options": "nosniff",
}
_STYLE = (
    "body{font:16px sans-serif;max-width:60em;margin:2em auto}button[aria-pressed=true]{font-weight:bold}"
    "form{display:inline}h2{font-size:1em}li{margin:.4em 0}"
)


@dataclass(frozen=True, slots=True)
class Session:
    """One visit of the site."""

    path: str
    """Of its address."""
    visit: Visit


class ShopSite:
    """The sessions of one shop."""

    def __init__(self, shop: Shop, *, tabs: Sequence[str] = pages.TABS) -> None:
        self._shop = shop
        self._tabs = tuple(tabs)
        self._visits: dict[str, Visit] = {}

    def open(self, goal: Goal) -> Session:
        """A new visit, at the search page."""
        key = secrets.token_urlsafe(12)
        self._visits[key] = visit = Visit(self._shop, goal, tabs=self._tabs)
        return Session(f"/{key}", visit)

    def close(self, session: Session) -> Visit:
        """Drop a session, also twice; its address is then not found."""
        self._visits.pop(session.path.removeprefix("/"), None)
        return session.visit

    @property
    def sessions(self) -> int:
        return len(self._visits)

    def app(self) -> Any:
        """The ASGI application; it needs the extra ``serve``."""
        from starlette.applications import Starlette
        from starlette.requests import Request
        from starlette.responses import HTMLResponse, PlainTextResponse, RedirectResponse, Response
        from starlette.routing import Route

        async def show(request: Request) -> Response:
            visit = self._visits.get(request.path_params["key"])
            if visit is None:
                return PlainTextResponse("no such session", 404)
            if request.method == "POST":
                body = bytearray()
                async for part in request.stream():
                    body += part
                    if len(body) > _MAX_BODY:
                        return PlainTextResponse("the form is too long", 413)
                action = form_action(bytes(body))
                if action is None or (visit.score is None and visit.act(action) is not None):
                    return PlainTextResponse("there is no such action on this page", 400)
                # A reload of the page must not repeat the action.
                return RedirectResponse(request.url.path, 303)
            return HTMLResponse(page_html(visit.page, visit.goal.instruction), headers=dict(_HEADERS))

        return Starlette(routes=[Route("/{key}", show, methods=["GET", "POST"])])


def form_action(body: bytes) -> str | None:
    """The action of a form.

    >>> form_action(b"click=buy+now"), form_action(b"search=desk%20lamp"), form_action(b"x=1")
    ('click[buy now]', 'search[desk lamp]', None)
    """
    try:
        fields = parse_qs(body.decode("utf-8"), max_num_fields=4)
    except ValueError:
        return None
    for verb in ("click", "search"):
        if verb in fields:
            return f"{verb}[{fields[verb][0]}]"
    return None


def page_html(page: Page, instruction: str) -> str:
    parts = ["<!doctype html><html lang=en><head><meta charset=utf-8><title>WebShop</title>"]
    parts.append(f"<style>{_STYLE}</style></head><body><h1>WebShop</h1>")
    parts.append(f"<p>Instruction: {escape(instruction)}</p>")
    if page.can_search:
        parts.append(
            "<form method=post><label>Search <input name=search type=search required autocomplete=off>"
            "</label><button>Search</button></form>"
        )
    else:
        group = ""
        for element in page.elements:
            if element.kind not in ("text", "button", "item") and element.kind != group:
                group = element.kind
                parts.append(f"<h2>{escape(group)}</h2>")
            parts.append(_element_html(element))
    return "".join([*parts, "</body></html>"])


def _element_html(element: Element) -> str:
    if element.kind == "text":
        return f"<p>{escape(element.label)}</p>"
    label = element.target.upper() if element.kind == "item" else element.label
    option = element.kind not in ("button", "item")
    pressed = f' aria-pressed="{"true" if element.note else "false"}"' if option else ""
    button = (
        f'<form method=post><button name=click value="{escape(element.target)}"{pressed}>'
        f"{escape(label)}</button></form>"
    )
    if element.kind == "item":
        return f"<div>{button} {escape(element.label)} <b>{escape(element.note)}</b></div>"
    return button
