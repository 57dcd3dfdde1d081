"""Records the requests of a browser context in the form of a HAR file, for WebArena-Verified's evaluators."""

from __future__ import annotations

import asyncio
from http.cookies import CookieError, SimpleCookie
from typing import Any

_REQUESTS = 5000
"""Of an episode; later ones are not recorded."""
_BODY = 2**20
"""Bytes of a response that is kept."""
_STATIC = frozenset({"image", "font", "stylesheet", "script", "media", "manifest"})
"""Kinds of requests that no evaluator looks at."""


class NetworkRecorder:
    """Listens to one context from its first request on."""

    def __init__(self, context: Any) -> None:
        self._entries: list[asyncio.Task[dict[str, Any] | None]] = []
        context.on("requestfinished", self._record)

    async def entries(self) -> list[dict[str, Any]]:
        """The requests that have an answer, in the order of their answers."""
        found = await asyncio.gather(*self._entries)
        return [each for each in found if each is not None]

    def close(self) -> None:
        for each in self._entries:
            each.cancel()

    def _record(self, request: Any) -> None:
        if len(self._entries) < _REQUESTS and request.resource_type not in _STATIC:
            self._entries.append(asyncio.create_task(entry(request)))


async def entry(request: Any) -> dict[str, Any] | None:
    """A request of Playwright as an entry of a HAR file; None if the page has closed meanwhile."""
    from playwright.async_api import Error

    try:
        response = await request.response()
        if response is None:
            return None
        sent, received = await request.headers_array(), await response.headers_array()
        headers = {each["name"].lower(): each["value"] for each in received}
        kind = headers.get("content-type", "")
        made: dict[str, Any] = {
            "request": {"url": request.url, "method": request.method, "headers": sent},
            "response": {
                "status": response.status,
                "redirectURL": headers.get("location", ""),
                "headers": received,
                "cookies": _cookies(received),
                "content": {"mimeType": kind, "text": await _body(response, kind)},
            },
        }
        if body := request.post_data_buffer:
            sent_kind = next((each["value"] for each in sent if each["name"].lower() == "content-type"), "")
            text = body[:_BODY].decode(errors="replace")
            made["request"]["postData"] = {"mimeType": sent_kind, "text": text}
    except Error:
        return None
    return made


async def _body(response: Any, kind: str) -> str:
    """Of JSON; evaluators read no other one."""
    if "json" not in kind:
        return ""
    body: bytes = await response.body()
    return body.decode(errors="replace") if len(body) <= _BODY else ""


def _cookies(headers: list[dict[str, str]]) -> list[dict[str, str]]:
    found = []
    for each in headers:
        if each["name"].lower() == "set-cookie":
            for line in each["value"].splitlines():
                try:
                    cookies = SimpleCookie(line)
                except CookieError:
                    continue
                found += [{"name": name, "value": morsel.value} for name, morsel in cookies.items()]
    return found
