"""WebArena-Verified's own package: its tasks, its splits, and its evaluators on pages of ours in Chromium."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import pytest_asyncio
from tests.envs.webarena_pages import Pages

import dreamgym as dg
from dreamgym.envs.browser.process import find_browser
from dreamgym.envs.webarena import WebArenaOptions, list_tasks, open_benchmark
from dreamgym.envs.webarena.sites import SITES
from dreamgym.errors import ConfigError, EpisodeFailedError
from dreamgym.http_server import HttpServer
from dreamgym.types import Outcome, Task

TODOS, WISH, BEST_SELLERS = 44, 465, 4
try:
    find_browser(None)
    reason = ""
except ConfigError as missing:
    reason = str(missing)
needs_browser = pytest.mark.skipif(bool(reason), reason=reason)


@pytest.fixture(autouse=True)
def no_sites(monkeypatch: pytest.MonkeyPatch) -> None:
    for site in SITES:
        monkeypatch.delenv(site.upper(), raising=False)
        monkeypatch.delenv(f"WA_{site.upper()}", raising=False)


def test_the_paper_trains_on_647_tasks_and_evaluates_on_165() -> None:
    benchmark = open_benchmark(WebArenaOptions())
    tasks = list_tasks(benchmark, WebArenaOptions())
    assert {split: len(each) for split, each in tasks.items()} == {"train": 647, "test": 165}
    assert not {each.id for each in tasks["train"]} & {each.id for each in tasks["test"]}
    first = tasks["test"][0]
    assert (first.id, first.family) == ("webarena-4", "shopping_admin")
    assert first.instruction.startswith("Get the top-3 best-selling product name(s) in Jan 2023\n")
    assert "Jan 2023" in first.parameters["values"]  # type: ignore[operator]


def test_the_benchmarks_hard_tasks_are_another_evaluation() -> None:
    options = WebArenaOptions(evaluation="hard")
    tasks = list_tasks(open_benchmark(options), options)
    assert {split: len(each) for split, each in tasks.items()} == {"train": 554, "test": 258}


def test_only_tasks_of_the_sites_that_a_user_has() -> None:
    options = WebArenaOptions(sites=("gitlab",))
    tasks = list_tasks(open_benchmark(options), options)
    assert {task.family for each in tasks.values() for task in each} == {"gitlab"}
    assert sum(map(len, tasks.values())) == 180


def test_without_addresses_the_variables_are_named() -> None:
    with pytest.raises(ConfigError, match="WA_GITLAB, WA_MAP, WA_REDDIT, WA_SHOPPING, WA_SHOPPING_ADMIN"):
        dg.make("webarena")


def test_a_configuration_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nowhere"):
        dg.make("webarena", config=tmp_path / "nowhere.json")


@asynccontextmanager
async def served(home: str) -> AsyncIterator[tuple[Pages, str]]:
    found = Pages(home)
    server = HttpServer(found.app())
    await server.start()
    yield found, server.url
    await server.aclose()


@pytest_asyncio.fixture
async def factory(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Any]:
    async with served("shop") as (_, shop), served("gitlab") as (_, gitlab):
        monkeypatch.setenv("WA_GITLAB", gitlab)
        monkeypatch.setenv("SHOPPING", shop)
        monkeypatch.setenv("WA_SHOPPING_ADMIN", f"{shop}/admin")
        made: Any = dg.make("webarena", sites=["gitlab", "shopping", "shopping_admin"])
        yield made
        await made.aclose()


async def task_of(factory: Any, number: int) -> Task:
    every = [each for split in factory.splits for each in await factory.tasks(split)]
    return next(each for each in every if each.parameters["task"] == number)


async def play(factory: Any, number: int, clicks: list[str], answer: str) -> Outcome:
    """Clicks the elements whose lines have these words, then answers."""
    episode = factory.make(await task_of(factory, number))
    try:
        state = await episode.start()
        for words in clicks:
            found = re.search(rf"\[(\d+)\] [^\n]*{words}", state.text)
            assert found is not None, state.text
            outcome = await episode.step(f"click('{found[1]}')")
            assert not outcome.over
            state = outcome.next_state
        return await episode.step(f"send_msg_to_user({answer!r})")
    finally:
        await episode.aclose()


def answer(kind: str, data: object = None, status: str = "SUCCESS") -> str:
    return json.dumps({"task_type": kind, "status": status, "retrieved_data": data})


@needs_browser
async def test_a_page_that_was_asked_for_is_a_success_only_once_it_was_opened(
    factory: Any,
) -> None:
    opened = await play(factory, TODOS, ["To-Do List"], answer("NAVIGATE"))
    assert (opened.reward, opened.terminated, opened.success) == (1.0, True, True)
    only_said = await play(factory, TODOS, [], answer("NAVIGATE"))
    assert (only_said.reward, only_said.terminated, only_said.success) == (0.0, True, False)


@needs_browser
async def test_a_change_is_judged_by_the_request_that_made_it(factory: Any) -> None:
    done = await play(factory, WISH, ["Add to Wish List"], answer("MUTATE"))
    assert (done.reward, done.success) == (1.0, True)
    not_done = await play(factory, WISH, ["Reviews"], answer("MUTATE"))
    assert (not_done.reward, not_done.success) == (0.0, False)


@needs_browser
@pytest.mark.parametrize(
    "given",
    [
        answer("RETRIEVE", ["A thing"]),
        answer("RETRIEVE", None, "NOT_FOUND_ERROR"),
        "I am done!",
        "{",
        '{"task_type": 3, "status": [], "retrieved_data": {}}',
    ],
)
async def test_an_answer_that_is_wrong_or_none_is_no_success(factory: Any, given: str) -> None:
    outcome = await play(factory, BEST_SELLERS, [], given)
    assert (outcome.reward, outcome.terminated, outcome.success) == (0.0, True, False)


@needs_browser
async def test_the_benchmarks_own_answer_is_a_success(factory: Any) -> None:
    expected = open_benchmark(WebArenaOptions()).get_task(BEST_SELLERS).expected_agent_response
    data = [each[0] if isinstance(each, list | tuple) else each for each in expected.retrieved_data]
    outcome = await play(factory, BEST_SELLERS, [], answer("RETRIEVE", data))
    assert (outcome.reward, outcome.terminated, outcome.success) == (1.0, True, True)


@needs_browser
async def test_a_task_of_another_benchmark_fails_its_episode(factory: Any) -> None:
    episode = factory.make(
        Task(id="other", instruction="?", environment="webarena", parameters={"task": 5000})
    )
    with pytest.raises(EpisodeFailedError, match="5000"):
        await episode.start()
    await episode.aclose()


@needs_browser
async def test_logins_reach_the_site_as_cookies_and_headers(
    tmp_path: Path,
) -> None:
    login, config = {"username": "admin", "password": "secret"}, tmp_path / "config.json"
    async with served("shop") as (found, url):
        cookie = {"name": "login", "value": "ada", "domain": urlsplit(url).hostname, "path": "/"}
        (tmp_path / "shopping_admin_state.json").write_text(json.dumps({"cookies": [cookie], "origins": []}))
        site = {"urls": [f"{url}/admin"], "use_header_login": True, "credentials": login}
        config.write_text(json.dumps({"environments": {"__SHOPPING_ADMIN__": site}}))
        factory: Any = dg.make("webarena", sites=["shopping_admin"], config=config, logins=tmp_path)
        episode = factory.make(await task_of(factory, BEST_SELLERS))
        state = await episode.start()
        await episode.aclose()
        await factory.aclose()
    assert "Lily Potter | $39.64" in state.text
    assert found.requests[0]["cookie"] == "login=ada"
    assert found.requests[0]["x-m2-admin-auto-login"] == "admin:secret"
