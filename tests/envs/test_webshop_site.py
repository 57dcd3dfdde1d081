"""WebShop as a site: the same pages and purchases over HTTP, on loopback."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from dataclasses import replace
from html import unescape

import aiohttp
import pytest

from dreamgym.envs.webshop import pages
from dreamgym.envs.webshop.experts import expert_action
from dreamgym.envs.webshop.shop import DATA_VARIABLE, open_shop
from dreamgym.envs.webshop.site import ShopSite, page_html
from dreamgym.http_server import HttpServer


@pytest.fixture
async def site(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[tuple[ShopSite, str]]:
    monkeypatch.delenv(DATA_VARIABLE, raising=False)
    made = ShopSite(open_shop(None, None, "auto"))
    server = HttpServer(made.app())
    await server.start()
    yield made, server.url
    await server.aclose()


async def test_the_experts_actions_as_forms_buy_the_wanted_product(site: tuple[ShopSite, str]) -> None:
    shop_site, url = site
    async with aiohttp.ClientSession() as client:
        for goal in open_shop(None, None, "auto").goals[:5]:
            session = shop_site.open(goal)
            while session.visit.score is None:
                verb, _, words = expert_action(session.visit, None).rstrip("]").partition("[")
                shown = set(session.visit.page.clickable)
                async with client.get(url + session.path) as page:
                    offered = re.findall(r'name=click value="(.*?)"', await page.text())
                assert set(map(unescape, offered)) == shown
                async with client.post(url + session.path, data={verb: words}) as reply:
                    assert (reply.status, reply.method) == (200, "GET")
            assert pages.THANKS in await _text(client, url + session.path)
            assert shop_site.close(session).score is not None
            score = shop_site.close(session).score
            assert score is not None
            assert score.reward == 1
    assert shop_site.sessions == 0


async def test_unknown_sessions_and_actions_are_refused_and_change_nothing(
    site: tuple[ShopSite, str],
) -> None:
    shop_site, url = site
    session = shop_site.open(open_shop(None, None, "auto").goals[0])
    before = session.visit.page
    async with aiohttp.ClientSession() as client:
        for body, status in (
            (b"click=buy+now", 400),
            (b"click=%ff", 400),
            (b"\xff", 400),
            (b"a=1&b=2&c=3&d=4&e=5", 400),
            (b"search=" + b"a" * 5000, 413),
        ):
            async with client.post(url + session.path, data=body) as reply:
                assert reply.status == status
        async with client.get(f"{url}/other") as reply:
            assert reply.status == 404
        shop_site.close(session)
        async with client.get(url + session.path) as reply:
            assert reply.status == 404
    assert session.visit.page == before


def test_texts_of_products_are_escaped() -> None:
    product = replace(open_shop(None, None, "auto").products[0], title='<script>alert("x")</script>')
    for page in (pages.results_page([product], 1, 1), pages.item_page(product, {}, pages.TABS)):
        text = page_html(page, "<b>")
        assert "<script>" not in text
        assert "<b>" not in text.replace("<b>$", "")


async def _text(client: aiohttp.ClientSession, address: str) -> str:
    async with client.get(address) as reply:
        assert "default-src 'none'" in reply.headers["content-security-policy"]
        return await reply.text()
