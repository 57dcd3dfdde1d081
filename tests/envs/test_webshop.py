"""WebShop: its pages, search, goals, splits and reward, on the package's own catalogue and on small files."""

from __future__ import annotations

import gzip
import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import dreamgym as dg
from dreamgym.envs.scripted_policies import make_policy
from dreamgym.envs.webshop import pages
from dreamgym.envs.webshop.catalogue import Product, RawCatalogue, build_products, read_files
from dreamgym.envs.webshop.goals import make_goals, price_limit_in, split_goals, suggested_searches
from dreamgym.envs.webshop.own_catalogue import generate_catalogue
from dreamgym.envs.webshop.rewards import Goal, score, token_set_ratio
from dreamgym.envs.webshop.search import ProductSearch
from dreamgym.envs.webshop.shop import DATA_VARIABLE, Shop, Visit, open_shop
from dreamgym.errors import ConfigError
from dreamgym.protocols import Environment, find_expert
from dreamgym.types import Outcome

ITEM = {
    "asin": "B000000001",
    "name": "Brisk Steel Kettle",
    "category": "kitchen",
    "query": "Kettles ",
    "product_category": "Home › Kitchen › Kettles",
    "full_description": "Boils water.",
    "small_description": "['Quiet boil', 'Cordless base']",
    "customization_options": "{'Color': [{'value': 'Navy Blue'}, {'value': 'Red/White'}], 'Size': None}",
    "pricing": "$1,019.50 - $1,200.00",
}
ATTRIBUTES = {
    "B000000001": {
        "attributes": ["quiet boil", "cordless"],
        "instruction": "Find me cordless kettles",
        "instruction_attributes": ["cordless"],
    }
}


@pytest.fixture(autouse=True)
def _own_catalogue(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(DATA_VARIABLE, raising=False)


@pytest.fixture(scope="module")
def shop() -> Shop:
    given_data = os.environ.pop(DATA_VARIABLE, None)
    try:
        return open_shop(None, None, "auto")
    finally:
        if given_data is not None:
            os.environ[DATA_VARIABLE] = given_data


def kettle(**changes: Any) -> Product:
    (found,) = build_products(RawCatalogue([ITEM], ATTRIBUTES), "test")
    return replace(found, **changes)


@pytest.mark.parametrize("view", ["text", "elements"])
async def test_it_meets_the_contract_of_environments(view: str) -> None:
    report = await dg.check_environment("webshop", options={"view": view}, episodes=30, concurrency=8)
    assert report.passed, report.to_dict()


async def test_as_a_black_box_it_has_no_experts_and_no_hidden_facts() -> None:
    report = await dg.check_environment("black-box:webshop", episodes=10, concurrency=4)
    assert report.passed, report.to_dict()
    assert {check.detail for check in report.checks if check.status == "skip"} == {
        "the environment does not disclose hidden facts",
        "the environment has no expert",
    }


def test_the_own_catalogue_has_many_products_in_eight_categories(shop: Shop) -> None:
    assert len(shop.products) >= 200
    assert len({product.category for product in shop.products}) == 8
    assert len(shop.goals) >= 3_000  # so WebShop's own splits apply
    assert generate_catalogue() == generate_catalogue()


def test_splits_are_those_of_webshop_and_proportional_for_small_catalogues(shop: Shop) -> None:
    assert [goal.number for goal in shop.splits["test"]] == list(range(500))
    assert [goal.number for goal in shop.splits["dev"]] == list(range(500, 1_500))
    assert shop.splits["train"][0].number == 1_500
    small = split_goals(shop.goals[:60])
    assert [len(small[split]) for split in ("test", "dev", "train")] == [10, 20, 30]


def test_goals_and_prices_are_the_same_in_every_run(shop: Shop) -> None:
    again = make_goals(build_products(generate_catalogue(), "again"))
    assert again == shop.goals
    for goal in again:
        assert goal.product.price < goal.price_limit == price_limit_in(goal.instruction)


def test_a_visit_passes_search_results_item_option_tab_and_purchase(shop: Shop) -> None:
    goal = shop.goals[0]
    visit = Visit(shop, goal)
    assert visit.act("click[buy now]") == pages.NO_SUCH_BUTTON
    assert visit.act(f"search[{suggested_searches(goal.instruction)[0]}]") is None
    first = visit.page
    assert visit.act("search[again]") == pages.NO_SEARCH_HERE
    assert visit.act("click[next >]") is None
    assert "Page 2" in pages.render(visit.page, goal.instruction, "text")
    assert visit.act("click[< prev]") is None
    assert visit.page == first
    assert visit.act(f"click[{visit.results[0].id.upper()}]") is None
    option = next(iter(visit.results[0].options.values()))[0]
    assert visit.act(f"click[{option}]") is None
    assert f"[{option}] color: chosen" in pages.render(visit.page, goal.instruction, "elements")
    for tab in pages.TABS:
        assert visit.act(f"click[{tab}]") is None
        assert visit.page.clickable == ("back to search", "< prev")
        assert visit.act("click[< prev]") is None
    assert visit.chosen
    assert visit.act("click[buy now]") is None
    assert visit.score is not None


def test_a_search_finds_stems_and_an_unknown_word_finds_nothing(shop: Shop) -> None:
    assert [each.query for each in shop.search("a water bottle")[:6]] == ["water bottles"] * 6
    assert len(shop.search("color")) == 50
    assert shop.search("zzzz") == ()
    visit = Visit(shop, shop.goals[0])
    visit.act("search[zzzz]")
    assert "Page 1 (Total results: 0)" in pages.render(visit.page, "", "text")
    assert visit.page.clickable == ("back to search",)


def test_equal_scores_keep_the_order_of_the_catalogue() -> None:
    same = [kettle(id=f"k{number}") for number in range(70)]
    assert ProductSearch([*same, kettle(id="x", title="Tea Pot")]).search("brisk") == list(range(50))


def test_the_reward_is_that_of_the_paper() -> None:
    product = kettle()
    goal = Goal(
        number=0,
        product=product,
        instruction="",
        attributes=("cordless", "stay warm"),
        options=("navy blue",),
        price_limit=2_000,
    )
    assert score(goal, product, {"color": "blue"}).reward == 3 / 4
    assert score(goal, product, {}).reward == 2 / 4
    assert score(goal, product, {"color": "red | white"}).reward == 2 / 4
    dear = replace(goal, price_limit=10.0, attributes=("cordless",))
    assert score(dear, product, {"color": "navy blue"}).reward == 2 / 3
    other = kettle(title="Plum Tart", query="tarts", path=("Food",))
    assert score(goal, other, {"color": "navy blue"}).type == 0
    assert token_set_ratio("", "red") == 0


def test_files_of_webshop_are_read_with_lists_as_text_and_prices_with_commas(tmp_path: Path) -> None:
    with gzip.open(tmp_path / "items_shuffle_1000.json.gz", "wt") as file:
        json.dump([ITEM, ITEM, ITEM | {"asin": "far too long an id"}], file)
    (tmp_path / "items_ins_v2_1000.json").write_text(json.dumps(ATTRIBUTES))
    human = {
        "instruction": "i want a kettle.",
        "instruction_attributes": ["cordless"],
        "instruction_options": ["Red"],
    }
    (tmp_path / "items_human_ins.json").write_text(json.dumps({"B000000001": [human]}))
    (product,) = build_products(read_files(tmp_path), "test")
    assert product.features == ("Quiet boil", "Cordless base")
    assert product.options == {"color": ("navy blue", "red | white")}
    assert 1_019.5 <= product.price <= 1_200
    (goal,) = make_goals([product])
    assert (goal.instruction, goal.options) == ("i want a kettle", ("red",))
    assert len(make_goals([product], "synthetic")) == 2


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, "expected a folder with one of"),
        ({"items_shuffle.json": "[]"}, "expected items_ins_v2"),
        ({"items_shuffle.json": "{}", "items_ins_v2.json": "{}"}, "expected a JSON list"),
        ({"items_shuffle.json": "[{", "items_ins_v2.json": "{}"}, "cannot be read"),
        ({"items_shuffle.json": "[]", "items_ins_v2.json": "{}"}, "expected at least one product"),
        ({"items_shuffle.json": '[{"asin": "B1"}]', "items_ins_v2.json": "{}"}, "entry 0 is not a WebShop"),
    ],
)
async def test_bad_data_is_named(files: dict[str, str], message: str, tmp_path: Path) -> None:
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError, match=message):
        await dg.make("webshop", data=tmp_path).tasks("test", 1)


async def test_a_task_of_another_catalogue_is_refused() -> None:
    (task,) = await dg.make("webshop").tasks("test", 1)
    with pytest.raises(ConfigError, match="not a goal of this catalogue"):
        dg.make("webshop", products=20).make(task)


@given(st.text(max_size=60))
def test_any_text_is_answered_and_only_the_two_forms_are_actions(text: str) -> None:
    action = pages.parse_action(text)
    if action is not None:
        assert pages.parse_action(f"{action.verb}[{action.words}]") == action
    visit = Visit(open_shop(None, None, "auto"), open_shop(None, None, "auto").goals[1])
    assert visit.act(text) in (None, *pages.REFUSALS)


async def play(policy: str, environment: Environment, seed: int) -> Outcome:
    state, over, history = await environment.start(), False, ()
    player = make_policy(policy, environment, seed=seed)
    while not over:
        outcome = await environment.step((await player.act(environment.task, history, state)).action)
        state, over = outcome.next_state, outcome.over
        assert outcome.success == (outcome.reward == 1)
    return outcome


async def test_experts_stand_in_order_of_what_they_know() -> None:
    factory = dg.make("webshop")
    tasks = await factory.tasks("test", 60)
    found = {
        policy: sum(
            [(await play(policy, factory.make(task), number)).success for number, task in enumerate(tasks)]
        )
        for policy in ("expert", "expert:heuristic", "random")
    }
    assert found["expert"] >= 54
    assert found["expert"] > found["expert:heuristic"] > found["random"]


async def test_without_grades_only_a_perfect_purchase_is_rewarded() -> None:
    rewards = {}
    for graded in (False, True):
        factory = dg.make("webshop", graded=graded)
        tasks = await factory.tasks("test", 20)
        rewards[graded] = {(await play("expert:heuristic", factory.make(task), 0)).reward for task in tasks}
    assert rewards[False] == {0, 1}
    assert rewards[True] - {0, 1}


async def test_the_attributes_page_can_be_left_out() -> None:
    factory = dg.make("webshop", attributes_page=False)
    (task,) = await factory.tasks("test", 1)
    episode = factory.make(task)
    state = await episode.start()
    expert = find_expert(episode)
    assert expert is not None
    while "click[buy now]" not in (state.admissible_actions or ()):
        state = (await episode.step(await expert.expert_action())).next_state
    assert "click[reviews]" in (state.admissible_actions or ())
    assert "click[attributes]" not in (state.admissible_actions or ())
