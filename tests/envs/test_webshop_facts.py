"""WebShop's hidden facts: what an action does to them agrees with the shop."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

import dreamgym as dg
from dreamgym.envs.scripted_policies import make_policy
from dreamgym.envs.webshop import WebShopFactory
from dreamgym.envs.webshop.annotator import WebShopAnnotator, explain
from dreamgym.envs.webshop.facts import VisitFacts, can_succeed, facts_for, goal_met
from dreamgym.envs.webshop.pages import REFUSALS
from dreamgym.envs.webshop.shop import DATA_VARIABLE, open_shop
from dreamgym.experience.world_sheet import apply_change, violation
from dreamgym.types import Provenance, State, Task, Trajectory, Transition, WorldSheet

REAL_DATA = os.environ.get(DATA_VARIABLE)


@pytest.fixture(autouse=True)
def _own_catalogue(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(DATA_VARIABLE, raising=False)


@pytest.fixture
async def factory() -> AsyncIterator[WebShopFactory]:
    made = dg.make("webshop", view="elements")
    assert isinstance(made, WebShopFactory)
    yield made
    await made.aclose()


async def play(factory: WebShopFactory, task: Task, policy: str, seed: int) -> Trajectory:
    environment = factory.make(task)
    start = state = await environment.start()
    player = make_policy(policy, environment, seed=seed)
    history: list[Transition] = []
    while not history or not history[-1].outcome.over:
        action = (await player.act(task, history, state)).action
        history.append(Transition(state=state, action=action, outcome=await environment.step(action)))
        state = history[-1].outcome.next_state
    return Trajectory(
        id=task.id,
        task=task,
        start=start,
        transitions=tuple(history),
        provenance=Provenance(source="real", policy=policy),
        sheet=await environment.world_sheet(),
    )


async def test_facts_predict_refusals_pages_and_success_of_experts(factory: WebShopFactory) -> None:
    for number, task in enumerate(await factory.tasks("train", 40)):
        found = await play(factory, task, ("expert", "expert:heuristic")[number % 2], number)
        assert found.sheet is not None
        sheet = found.sheet
        assert can_succeed(task, sheet)
        for transition in found.transitions:
            step = VisitFacts(sheet.facts).step(transition.action)
            assert step.refusal is None
            shown = " ".join(facts_for(sheet, transition.action))
            for line in transition.outcome.next_state.text.splitlines():
                if "] item: " in line:
                    label, _, description = line.partition("] item: ")
                    assert f"{label[1:]}: {description}" in shown
            assert violation(step.change, sheet, transition.action) is None
            sheet = apply_change(sheet, step.change)
            assert goal_met(task, sheet) == transition.outcome.success
        assert not can_succeed(task, sheet)


async def test_a_refused_action_is_refused_with_the_same_words(factory: WebShopFactory) -> None:
    (task,) = await factory.tasks("train", 1)
    environment = factory.make(task)
    await environment.start()
    sheet = await environment.world_sheet()
    for action in ("dance", "click[buy now]", "click[p101]", "search[]", "search[a]]", "click[search page]"):
        outcome = await environment.step(action)
        assert outcome.next_state.text == VisitFacts(sheet.facts).step(action).refusal
        assert outcome.next_state.text in REFUSALS
        assert facts_for(sheet, action) == ["agent: on search page"]


async def test_another_search_shows_the_list_of_the_most_similar_one(factory: WebShopFactory) -> None:
    (task,) = await factory.tasks("train", 1)
    environment = factory.make(task)
    await environment.start()
    sheet = await environment.world_sheet()
    words = VisitFacts(sheet.facts).searches["list 2"]
    assert VisitFacts(sheet.facts).step(f"search[{words} please]").page == "page 1 of list 2"
    assert VisitFacts(sheet.facts).step("search[zzzz]").page == ""


async def test_notes_follow_the_episode_also_where_the_facts_end(factory: WebShopFactory) -> None:
    for number, task in enumerate(await factory.tasks("train", 30)):
        found = await play(factory, task, ("noisy:0.3", "clumsy:0.3", "random")[number % 3], number)
        annotation = await WebShopAnnotator().annotate(found)
        assert len(annotation.notes) == len(found.transitions)
        for note, transition in zip(annotation.notes, found.transitions, strict=True):
            if transition.outcome.next_state.text in REFUSALS:
                assert note.reasoning.endswith("not possible.")
                assert not note.change.begun


async def test_hostile_facts_do_not_break_the_prompt(factory: WebShopFactory) -> None:
    (task,) = await factory.tasks("train", 1)
    sheet = WorldSheet(
        facts=(("at", "agent", "page x of y"), ("hit", "p", "page x of y", "0"), ("wanted", "²"))
    )
    for action in ("click[next >]", "click[< prev]", "click[p]", "click[buy now]", "start", "\x00"):
        assert facts_for(sheet, action)
    assert not goal_met(task, sheet)
    assert not can_succeed(task, WorldSheet(facts=()))
    state = State(text="?")
    unknown = Transition(
        state=state,
        action="click[p1]",
        outcome=dg.Outcome(next_state=state, reward=0.0, terminated=False),
    )
    assert explain(VisitFacts(()), unknown).reasoning == "the facts do not have this page."


@pytest.mark.skipif(REAL_DATA is None, reason=f"{DATA_VARIABLE} is not set")
async def test_the_script_finds_nine_of_ten_targets_in_the_real_catalogue() -> None:
    shop = open_shop(Path(str(REAL_DATA)), 1000, "synthetic")
    assert len(shop.goals) == 6_910
    real = dg.make("webshop", data=Path(str(REAL_DATA)), products=1000, goals="synthetic")
    assert isinstance(real, WebShopFactory)
    episodes = [await play(real, task, "expert", 0) for task in await real.tasks("test", 100)]
    assert sum(episode.success for episode in episodes) >= 90
