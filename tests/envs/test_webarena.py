"""WebArena without its package and sites: splits, addresses, logins, and states from recorded trees.

Tasks, evaluators and episodes are tested with the package in `integrations/webarena`.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dreamgym.envs.browser.mapping import admissible_actions, elements_text, relevant_elements
from dreamgym.envs.browser.snapshot import Node, build_tree
from dreamgym.envs.webarena import WebArenaOptions
from dreamgym.envs.webarena.sites import SITES, find_addresses, read_cookies
from dreamgym.envs.webarena.subsets import LITE
from dreamgym.errors import ConfigError
from tests.envs.webarena_pages import ORDERS, RECORDED

NO_CONFIG = SimpleNamespace(environments=None)


@pytest.fixture(autouse=True)
def no_sites(monkeypatch: pytest.MonkeyPatch) -> None:
    for site in SITES:
        monkeypatch.delenv(site.upper(), raising=False)
        monkeypatch.delenv(f"WA_{site.upper()}", raising=False)
    monkeypatch.delenv("PW_EXTRA_HEADERS", raising=False)


def recorded(name: str) -> Node:
    found: dict[str, Any] = json.loads((RECORDED / f"{name}.json").read_text(encoding="utf-8"))
    return build_tree(found["tree"], found["snapshot"])


def test_lite_has_165_of_the_812_tasks() -> None:
    assert len(LITE) == 165
    assert min(LITE) >= 0
    assert max(LITE) <= 811


def test_a_missing_site_is_named_with_its_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WA_SHOPPING", "http://127.0.0.1:7770")
    with pytest.raises(ConfigError, match=r"no address for gitlab, reddit;.* WA_GITLAB, WA_REDDIT") as error:
        find_addresses(NO_CONFIG, ["shopping", "reddit", "gitlab"])
    assert "WA_SHOPPING" not in str(error.value)


def test_addresses_come_from_the_benchmarks_variables_before_its_configuration(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    headers = tmp_path / "headers.json"
    headers.write_text('{"X-Login": "ada"}')
    monkeypatch.setenv("WA_GITLAB", "http://10.0.0.1:8023/")
    monkeypatch.setenv("GITLAB", "http://10.0.0.2:8023")
    monkeypatch.setenv("REDDIT", "https://forum.test")
    monkeypatch.setenv("PW_EXTRA_HEADERS", str(headers))
    known = {site: SimpleNamespace(active_url=f"http://{site}.test") for site in ("reddit", "map")}
    found = find_addresses(SimpleNamespace(environments=known), ["gitlab", "reddit", "map"])
    assert found.urls == {
        "gitlab": "http://10.0.0.1:8023",
        "map": "http://map.test",
        "reddit": "https://forum.test",
    }
    assert found.hosts == ["10.0.0.1:8023", "forum.test:443", "map.test:80"]
    assert found.headers == {"X-Login": "ada"}
    assert found.render("__GITLAB__/explore") == "http://10.0.0.1:8023/explore"
    with pytest.raises(ConfigError, match="start page"):
        found.render("__ELSEWHERE__/")


@pytest.mark.parametrize("wrong", ["localhost:8023", "ftp://host", "http://"])
def test_an_address_that_is_none_is_an_error(monkeypatch: pytest.MonkeyPatch, wrong: str) -> None:
    monkeypatch.setenv("WA_MAP", wrong)
    with pytest.raises(ConfigError, match=r"http://HOST:PORT as the address of map"):
        find_addresses(NO_CONFIG, ["map"])


def test_a_login_that_was_not_saved_is_an_error_that_names_the_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"gitlab\.reddit_state\.json"):
        read_cookies(tmp_path, ["reddit", "gitlab"])
    (tmp_path / "map_state.json").write_text('{"cookies": "none"}')
    with pytest.raises(ConfigError, match="storage state"):
        read_cookies(tmp_path, ["map"])


def test_an_unknown_site_is_an_error_with_the_nearest_name() -> None:
    with pytest.raises(ValueError, match="did you mean 'gitlab'"):
        WebArenaOptions(sites=("gitlb",))


@pytest.mark.parametrize(
    ("page", "intent", "line"),
    [
        ("gitlab", "Open my todos page", "[6] link: To-Do List"),
        ("shop", "Add Tide PODS Spring Meadow to my wish list", "[12] button: Add to Wish List"),
        ("forum", "Create a submission in the books forum", "[27] button: Create submission"),
        ("admin", "Get the grand total of the order of Lily Potter", "[24] button: Search"),
    ],
)
def test_a_recorded_page_becomes_its_relevant_elements(page: str, intent: str, line: str) -> None:
    root = recorded(page)
    kept = relevant_elements(root, intent, 10)
    text = elements_text(root, kept, intent)
    assert line in text.splitlines()
    ids = {node.id for node in root.walk() if node.actionable}
    assert set(re.findall(r"^ *\[(\d+)\] (?!table)", text, re.MULTILINE)) <= ids, "no id is invented"
    single = [node for node in kept if not _in_table(node)]
    assert len(single) <= 10
    number = line[1:].partition("]")[0]
    assert f"click('{number}')" in admissible_actions(kept, [])


def _in_table(node: Node) -> bool:
    return node.parent is not None and (node.parent.role in ("table", "grid") or _in_table(node.parent))


def test_a_recorded_table_is_kept_whole() -> None:
    root = recorded("admin")
    intent = "Get the grand total of the order of Lily Potter"
    text = elements_text(root, relevant_elements(root, intent, 10), intent)
    for order in ORDERS:
        assert " | ".join(order) in text
