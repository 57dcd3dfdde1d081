"""WebShop's hidden facts: what an action does to them agrees with the shop."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

import dreamgym as dg
from dreamgym.envs.scripted_policies import make_policy
from dreamgym.envs.synthetic import SyntheticEnvironment
from dreamgym.envs.webshop import SPEC, WebShopFactory
from dreamgym.envs.webshop.annotator import WebShopAnnotator, explain
from dreamgym.envs.webshop.facts import (
    VisitFacts,
    can_succeed,
    dreamt_actions,
    facts_for,
    goal_met,
    state_texts,
)
from dreamgym.envs.webshop.pages import REFUSALS
from dreamgym.envs.webshop.shop import DATA_VARIABLE, open_shop
from dreamgym.errors import EpisodeFailedError
from dreamgym.experience.dataset import examples
from dreamgym.experience.model import ReasoningExperienceModel
from dreamgym.experience.reply_format import PromptSettings
from dreamgym.experience.rewards import SheetCheck
from dreamgym.experience.world_sheet import violation
from dreamgym.testing import ScriptedLanguageModel
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
    for number, task in enumerate(await factory.tasks("train", 16)):
        found = await play(factory, task, ("expert", "expert:heuristic")[number % 2], number)
        assert found.sheet is not None
        sheet = found.sheet
        assert can_succeed(task, sheet)
        for transition in found.transitions:
            step = VisitFacts(sheet.facts).step(transition.action)
            assert step.refusal is None
            assert violation(step.change, sheet, transition.action) is None
            sheet = sheet.after(step.change)
            assert transition.outcome.next_state.text in state_texts(task, sheet).values()
            assert transition.outcome.next_state.admissible_actions == dreamt_actions(task, sheet)
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
        assert facts_for(sheet, action)[1:] == ["at agent, search page"]


async def test_another_search_shows_the_list_of_the_most_similar_one(factory: WebShopFactory) -> None:
    (task,) = await factory.tasks("train", 1)
    environment = factory.make(task)
    await environment.start()
    sheet = await environment.world_sheet()
    words = VisitFacts(sheet.facts).searches["list 2"]
    assert facts_for(sheet, f"search[{words} please]")[0] == "search: page 1 of list 2"
    assert facts_for(sheet, "search[zzzz]")[0] == "search: nothing"


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
    at_tab = (
        ("at", "agent", "p"),
        ("id", "p", "p1"),
        ("reads", "agent", "tab 9"),
        ("tab", "tab 9", "secrets"),
    )
    for hostile in (sheet, WorldSheet(facts=at_tab), WorldSheet(facts=())):
        assert set(state_texts(task, hostile).values()) <= {
            *REFUSALS,
            (await factory.make(task).start()).text,
        }
        for action in ("click[next >]", "click[< prev]", "click[p]", "click[buy now]", "start", "\x00"):
            assert facts_for(hostile, action)
    assert not goal_met(task, sheet)
    assert not can_succeed(task, WorldSheet(facts=()))
    state = State(text="?")
    unknown = Transition(
        state=state,
        action="click[p1]",
        outcome=dg.Outcome(next_state=state, reward=0.0, terminated=False),
    )
    assert explain(task, WorldSheet(facts=()), unknown).reasoning == "the facts do not have this page."


SETTINGS = PromptSettings(
    actor=SPEC.actor, select_facts=SPEC.select_facts, state_texts=SPEC.state_texts, demonstrations=0
)


@pytest.mark.parametrize("view", ["elements", "text"])
async def test_replies_that_name_pages_give_the_real_pages_in_the_dream(view: str) -> None:
    shop = dg.make("webshop", view=view)
    assert isinstance(shop, WebShopFactory)
    for number, task in enumerate(await shop.tasks("train", 6)):
        found = await play(shop, task, ("expert", "noisy:0.3")[number % 2], number)
        taught = [e async for e in examples([found], WebShopAnnotator(), settings=SETTINGS)]
        assert len(taught) == 1 + len(found.transitions)
        assert all("next: =" in each.reply and len(each.reply) < 400 for each in taught)
        replies = {each.prompt: each.reply for each in taught}
        model = ScriptedLanguageModel(lambda request, replies=replies: replies[request.prompt])  # type: ignore[misc]
        experience = ReasoningExperienceModel(
            model, name="taught", settings=SETTINGS, grader=SheetCheck(goal_met), refusals=REFUSALS
        )
        assert found.sheet is not None
        dream = SyntheticEnvironment(
            task, experience, found.sheet, horizon=15, admissible_actions=SPEC.dreamt_actions
        )
        assert await dream.start() == found.start
        for transition in found.transitions:
            outcome = await dream.step(transition.action)
            assert outcome.next_state == transition.outcome.next_state
            assert outcome.success == transition.outcome.success


@pytest.mark.parametrize("named", ["=product 3", "=page 1", "a page", "==product 1"])
async def test_a_name_that_the_facts_do_not_have_is_a_failure_and_never_a_text(
    factory: WebShopFactory, named: str
) -> None:
    (task,) = await factory.tasks("train", 1)
    environment = factory.make(task)
    start = await environment.start()
    model = ScriptedLanguageModel(lambda request: f"think: so.\nchange:\nnext: {named}\nend: no")
    experience = ReasoningExperienceModel(model, name="wrong", settings=SETTINGS, refusals=REFUSALS)
    with pytest.raises(EpisodeFailedError, match="expected "):
        await experience.predict(task, await environment.world_sheet(), [], start, "click[p1]")


@pytest.mark.skipif(REAL_DATA is None, reason=f"{DATA_VARIABLE} is not set")
async def test_the_script_finds_nine_of_ten_targets_in_the_real_catalogue() -> None:
    shop = open_shop(Path(str(REAL_DATA)), 1000, "synthetic")
    assert len(shop.goals) == 6_910
    real = dg.make("webshop", data=Path(str(REAL_DATA)), products=1000, goals="synthetic")
    assert isinstance(real, WebShopFactory)
    episodes = [await play(real, task, "expert", 0) for task in await real.tasks("test", 100)]
    assert sum(episode.success for episode in episodes) >= 90
