"""Pages in the manner of WebArena's sites, and a server for them; run as a script, it records their trees.

    python -m tests.envs.webarena_pages

A recording has what Chromium says about a page: its accessibility tree and its elements.
"""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

RECORDED = Path(__file__).parent / "recorded"
ORDERS = [
    (f"0000002{place:02}", day, name, total, state)
    for place, (day, name, total, state) in enumerate(
        [
            ("Jan 3, 2023", "Grace Nguyen", "$210.00", "Complete"),
            ("Jan 7, 2023", "Sarah Miller", "$65.32", "Canceled"),
            ("Feb 1, 2023", "Lily Potter", "$39.64", "Pending"),
            ("Feb 9, 2023", "Matt Baker", "$194.25", "Complete"),
            ("Mar 4, 2023", "Ava Brown", "$71.50", "Processing"),
            ("Mar 11, 2023", "Emma Lopez", "$1,004.08", "Complete"),
        ]
    )
]
_ROWS = "".join(
    f"<tr><td><input type=checkbox aria-label='select {number}'></td><td>{number}</td><td>{day}</td>"
    f"<td>{name}</td><td>{total}</td><td>{state}</td><td><a href='/admin/order/{number}'>View</a></td></tr>"
    for number, day, name, total, state in ORDERS
)
_MENU = "".join(
    f"<li><a href='/admin/{each.lower()}'>{each}</a></li>"
    for each in ("Dashboard", "Sales", "Catalog", "Customers", "Marketing", "Content", "Reports", "Stores")
)
PAGES = {
    "admin": f"""<title>Orders / Magento Admin</title><nav><ul>{_MENU}</ul></nav><main><h1>Orders</h1>
<form><label>Search by keyword <input type=search name=q></label><button>Search</button></form>
<button>Filters</button><button>Create New Order</button>
<table><thead><tr><th></th><th>ID</th><th>Purchase Date</th><th>Bill-to Name</th><th>Grand Total</th>
<th>Status</th><th>Action</th></tr></thead><tbody>{_ROWS}</tbody></table>
<label>per page <select><option>20</option><option>50</option></select></label>
<a href='/admin/logout'>Sign out</a></main>""",
    "gitlab": """<title>Projects · GitLab</title><header><a href='/' aria-label='Dashboard'>▲</a>
<input type=search placeholder='Search GitLab'><a href='/dashboard/issues' aria-label='Issues'>◎</a>
<a href='/dashboard/merge_requests' aria-label='Merge requests'>⇄</a>
<a href='/dashboard/todos' aria-label='To-Do List'>☑</a></header><main><h1>Projects</h1>
<a href='/projects/new'>New project</a><ul><li><a href='/byteblaze/a11y'>byteblaze / a11y</a> 4 stars</li>
<li><a href='/byteblaze/dotfiles'>byteblaze / dotfiles</a> 0 stars</li>
<li><a href='/primer/design'>Primer / design</a> 21 stars</li></ul></main>""",
    "todos": "<title>To-Do List · GitLab</title><h1>To-Do List</h1><button>Mark all as done</button>",
    "forum": """<title>books</title><h1>/f/books</h1><a href='/submit/books'>Submit</a><article>
<button aria-label=Upvote>+</button><span>13</span><button aria-label=Downvote>-</button>
<a href='/f/books/1'>A book that changed how I cook</a><p>Submitted by <a href='/user/ada'>ada</a></p>
<a href='/f/books/1#comments'>12 comments</a></article><article><button aria-label=Upvote>+</button>
<span>2</span><button aria-label=Downvote>-</button><a href='/f/books/2'>Which atlas is best?</a>
<p>Submitted by <a href='/user/ben'>ben</a></p><a href='/f/books/2#comments'>No comments</a></article>
<form><label>Title <input name=title></label><label>Forum <select><option>books</option>
<option>consoles</option></select></label><textarea aria-label=Body></textarea>
<button>Create submission</button></form>""",
    "shop": """<title>Laundry Detergent Pacs, 81 Count</title><a href='/'>One Stop Market</a>
<form><input type=search placeholder='Search entire store here...'><button>Search</button></form>
<h1>Tide PODS Spring Meadow Scent HE Turbo Laundry Detergent Pacs, 81 Count</h1><p>$39.99 In stock</p>
<label>Qty <input type=number value=1></label><button>Add to Cart</button>
<form method=post action='/wishlist/index/add/'><input type=hidden name=product value=71337>
<button>Add to Wish List</button></form><a href='/compare'>Add to Compare</a><h2>Reviews</h2>
<p>Five stars: smells of spring.</p><a href='/reviews'>Reviews (12)</a>""",
}


class Pages:
    """The pages on loopback; `requests` has the headers of each request."""

    def __init__(self, home: str = "shop") -> None:
        self.home = home
        self.requests: list[dict[str, str]] = []

    def app(self) -> Any:
        from starlette.applications import Starlette
        from starlette.requests import Request
        from starlette.responses import HTMLResponse, RedirectResponse, Response
        from starlette.routing import Route

        async def show(request: Request) -> Response:
            self.requests.append(dict(request.headers))
            name = request.path_params.get("name", self.home)
            return HTMLResponse(PAGES.get(name, "<title>Empty</title>"))

        async def wish(request: Request) -> Response:
            return RedirectResponse("/shop", status_code=302)

        routes = [
            Route("/dashboard/{name}", show),
            Route("/wishlist/index/add/", wish, methods=["POST"]),
            Route("/{name}", show),
            Route("/", show),
        ]
        return Starlette(routes=routes)


async def record() -> None:
    from dreamgym.envs.browser.process import BrowserProcess
    from dreamgym.envs.browser.snapshot import ATTRIBUTE, MARK
    from dreamgym.http_server import HttpServer

    server, process = HttpServer(Pages().app()), BrowserProcess(None, pages=1)
    await server.start()
    for name in PAGES:
        tab = await process.open([server.url.removeprefix("http://")], virtual_time=True)
        await tab.page.goto(f"{server.url}/{name}")
        await tab.page.evaluate(MARK, ATTRIBUTE)
        session = await tab.context.new_cdp_session(tab.page)
        found = {
            "tree": await session.send("Accessibility.getFullAXTree"),
            "snapshot": await session.send("DOMSnapshot.captureSnapshot", {"computedStyles": []}),
        }
        text = json.dumps(found, separators=(",", ":")).replace(server.url, "http://site.test")
        (RECORDED / f"{name}.json").write_text(text + "\n", encoding="utf-8")
        await process.close(tab)
    await process.aclose()
    await server.aclose()


if __name__ == "__main__":
    asyncio.run(record())
