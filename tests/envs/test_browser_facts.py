"""World sheets of sites: what visits of their own find predicts real episodes, in words and in success."""

from __future__ import annotations

from collections.abc import AsyncIterator
from importlib.util import find_spec
from typing import Any

import pytest
import pytest_asyncio
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import HTMLResponse
from starlette.routing import Route

import dreamgym as dg
from dreamgym.envs.browser import Site, Visit, facts
from dreamgym.envs.browser.annotator import SiteAnnotator
from dreamgym.envs.browser.environment import BrowserFactory, BrowserOptions, site_spec
from dreamgym.envs.browser.facts import SiteFacts, Step, page_rows, tree_of
from dreamgym.envs.browser.perform import NO_SUCH_ELEMENT, NOT_POSSIBLE, REFUSALS
from dreamgym.envs.browser.process import BrowserProcess, find_browser
from dreamgym.envs.browser.snapshot import Node, render_tree
from dreamgym.envs.registry import find_environment
from dreamgym.envs.scripted_policies import make_policy
from dreamgym.envs.synthetic import SyntheticEnvironment
from dreamgym.envs.webshop import site_facts
from dreamgym.envs.webshop.facts import goal_met as bought
from dreamgym.errors import ConfigError
from dreamgym.experience.dataset import examples
from dreamgym.experience.model import ReasoningExperienceModel
from dreamgym.experience.reply_format import PromptSettings
from dreamgym.experience.rewards import SheetCheck
from dreamgym.experience.world_sheet import environment_texts, violation
from dreamgym.protocols import find_world_sheet
from dreamgym.testing import ScriptedLanguageModel
from dreamgym.types import JsonValue, Provenance, State, Task, Trajectory, Transition, WorldSheet

SPEC = find_environment("miniwob")
SETTINGS = PromptSettings(
    actor=SPEC.actor, select_facts=SPEC.select_facts, state_texts=SPEC.state_texts, demonstrations=0
)
TASK = Task(id="t", instruction="Tick it.", environment="site")
in_module_loop = pytest.mark.asyncio(loop_scope="module")


def page() -> Node:
    root = Node("", "RootWebArea", "Form")
    for node in (
        Node("1", "textbox", "Name", value="Ada", states=("focused",), actionable=True, tag="input"),
        Node("2", "checkbox", "Agree", states=("checked",), actionable=True, tag="input"),
        Node("3", "button", "Send", states=("disabled",), tag="button"),
    ):
        node.parent = root
        root.children.append(node)
    return root


def test_a_page_that_was_taken_apart_and_put_together_again_is_the_same() -> None:
    shown = page_rows(page())
    assert (shown.focus, set(shown.checked), shown.values) == ("1", {"2"}, (("1", "Ada"),))
    assert render_tree(tree_of(shown)) == render_tree(page())
    assert page_rows(tree_of(shown)) == shown


def test_pages_that_differ_only_in_what_was_typed_and_ticked_are_one_page() -> None:
    other = page()
    other.children[0].value, other.children[0].states = "", ()
    other.children[1].states = ("focused",)
    assert page_rows(other).page == page_rows(page()).page


def sheet_of_form(*visit: tuple[str, ...]) -> WorldSheet:
    return WorldSheet(
        facts=(
            ("at", "page 1"),
            *visit,
            ("does", "page 1", "fill element 1", "any", "focus element 1", "hold"),
            ("does", "page 1", "click element 2", "any", "focus element 2", "toggle element 2"),
            ("does", "page 1", "click element 3", "right", "success"),
            ("does", "page 1", "click element 3", "wrong", "over"),
            ("wanted", "page 1", "element 1", "text 1"),
            ("wanted", "page 1", "element 2", "checked"),
            ("text", "text 1", "Bo"),
            ("page", "page 1", page_rows(page()).page),
        )
    )


def test_a_form_succeeds_only_as_the_expert_had_filled_it() -> None:
    for actions, success in (
        (("fill('1', 'Bo')", "click('2')", "click('3')"), True),
        (("click('2')", "fill('1', 'Ada')", "fill('1', 'Bo')", "click('3')"), True),
        (("fill('1', 'Bo')", "click('3')"), False),
        (("fill('1', 'Bob')", "click('2')", "click('3')"), False),
        (("fill('1', 'Bo')", "click('2')", "click('2')", "click('3')"), False),
        (("fill('1', 'Bo')", "click('2')", "clear('1')", "click('3')"), False),
    ):
        sheet, step = sheet_of_form(), Step("")
        for action in actions:
            assert not step.over
            step = SiteFacts(sheet.facts).step(action)
            assert step.refusal is None
            sheet = sheet.after(step.change)
        assert step.over
        assert facts.goal_met(TASK, sheet) == success
        assert not facts.can_succeed(TASK, sheet)


def test_what_is_not_known_is_refused_and_changes_nothing() -> None:
    sheet = sheet_of_form()
    for action, refusal in (
        ("click('9')", NO_SUCH_ELEMENT),
        ("click('1')", NOT_POSSIBLE),
        ("fill('2', 'Bo')", NOT_POSSIBLE),
        ("hover('3')", NOT_POSSIBLE),
    ):
        step = SiteFacts(sheet.facts).step(action)
        assert (step.refusal, step.change) == (refusal, type(step.change)())
        assert facts.facts_for(sheet, action) == [f"next: ={facts.REFUSAL_NAMES[refusal]}"]


def test_an_end_that_only_a_reply_claims_is_no_success() -> None:
    claimed = sheet_of_form(("ended", "page 1", "click element 3"), ("ended", "page 2", "click element 3"))
    assert not facts.goal_met(TASK, claimed)
    filled = (("holds", "element 1", "text 1"), ("checked", "element 2"))
    assert facts.goal_met(TASK, sheet_of_form(*filled, ("ended", "page 1", "click element 3")))
    assert not facts.goal_met(TASK, sheet_of_form(*filled, ("ended", "page 1", "click element 2")))


def test_facts_that_make_no_sense_give_no_state_and_no_success() -> None:
    for sheet in (
        WorldSheet(facts=()),
        WorldSheet(facts=(("at", "page 7"), ("ended", "page 7", "x"), ("does", "page 7"))),
        WorldSheet(facts=(("view", "elements", "²"), ("holds", "element 1", "text 9"))),
    ):
        assert set(facts.state_texts(TASK, sheet).values()) == set(REFUSALS)
        assert not facts.goal_met(TASK, sheet)
        assert not facts.can_succeed(TASK, sheet)
        for action in ("start", "click('1')", "fill('1', 'x')", "\x00"):
            assert facts.facts_for(sheet, action)


class CodeSite(Site):
    """Two pages: a code opens the door; a wrong one shows a word and lets one try again."""

    name, experts, horizon, explored = "code", ("script",), 8, True

    def tasks(self) -> dict[str, list[Task]]:
        given: dict[str, JsonValue] = {"values": ["1234", "9999"], "start": "/"}
        return {"train": [Task(id="1", instruction="Enter 1234.", environment="code", parameters=given)]}

    def app(self) -> Any:
        async def show(request: Request) -> HTMLResponse:
            if request.query_params.get("code") == "1234":
                return HTMLResponse("<h1>Hall</h1><a href='/?'>Back</a> <button>Sit down</button>")
            wrong = "<p>Wrong.</p>" if "code" in request.query_params else ""
            return HTMLResponse(f"{wrong}<form><label>Code <input name=code></label><button>Open")

        return Starlette(routes=[Route("/", show)])

    async def check(self, visit: Visit) -> bool:
        return bool(await visit.find("button[data-sat], h1")) and visit.actions[-1] == self._sit(visit)

    def _sit(self, visit: Visit) -> str:
        return next((f"click('{n.id}')" for n in visit.tree.walk() if n.name == "Sit down" and n.id), "")

    async def expert_action(self, visit: Visit, expert: str | None) -> str:
        if sit := self._sit(visit):
            return sit
        (box,), (button,) = await visit.find("input"), await visit.find("button")
        return f"click('{button.id}')" if box.value == "1234" else f"fill('{box.id}', '1234')"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def process() -> AsyncIterator[BrowserProcess]:
    """One browser for all tests of this file."""
    pytest.importorskip("playwright", reason="the extra 'browser' is not installed")
    try:
        find_browser(None)
    except ConfigError as missing:
        pytest.skip(str(missing))
    shared = BrowserProcess(None, pages=2)
    yield shared
    await shared.aclose()


async def play(factory: Any, task: Task, policy: str, seed: int = 0) -> Trajectory:
    environment = factory.make(task)
    start = state = await environment.start()
    player = make_policy(policy, environment, seed=seed)
    history: list[Transition] = []
    while not history or not history[-1].outcome.over:
        action = (await player.act(task, history, state)).action
        history.append(Transition(state=state, action=action, outcome=await environment.step(action)))
        state = history[-1].outcome.next_state
    sheet = await factory.world_sheet(task)
    await environment.aclose()
    made = Provenance(source="real", policy=policy)
    return Trajectory(
        id=task.id, task=task, start=start, transitions=tuple(history), provenance=made, sheet=sheet
    )


async def check_dream(found: Trajectory, annotator: Any, settings: PromptSettings, goal: Any) -> None:
    """Replies that follow the facts give the real states and the real success, word for word."""
    taught = [each async for each in examples([found], annotator, settings=settings)]
    assert len(taught) == 1 + len(found.transitions)
    assert all("next: =" in each.reply and len(each.reply) < 500 for each in taught)
    replies = {each.prompt: each.reply for each in taught}
    model = ScriptedLanguageModel(lambda request: replies[request.prompt])
    experience = ReasoningExperienceModel(
        model, name="taught", settings=settings, grader=SheetCheck(goal), refusals=REFUSALS
    )
    assert found.sheet is not None
    dream = SyntheticEnvironment(found.task, experience, found.sheet, horizon=len(found.transitions))
    assert await dream.start() == State(text=found.start.text)
    history: list[Transition] = []
    for transition in found.transitions:
        texts = environment_texts(found.task, history, transition.state.text)
        step = annotator.step(found.task, dream.sheet, transition.action)
        assert violation(step.change, dream.sheet, transition.action, texts=texts) is None
        outcome = await dream.step(transition.action)
        assert outcome.next_state.text == transition.outcome.next_state.text
        assert (outcome.success, outcome.terminated) == (
            transition.outcome.success,
            transition.outcome.terminated,
        )
        history.append(transition)


@in_module_loop
@pytest.mark.slow
async def test_a_site_of_ones_own_is_explored_from_its_expert_on(process: BrowserProcess) -> None:
    spec = site_spec(CodeSite, "code")
    assert spec.annotator is SiteAnnotator
    factory = BrowserFactory(CodeSite(), BrowserOptions(explore=16), name="code")
    factory.process = process
    (task,) = await factory.tasks("train")
    sheet = await factory.world_sheet(task)
    assert await factory.world_sheet(task) is sheet
    assert int(next(fact[1] for fact in sheet.facts if fact[0] == "explored")) <= 16
    for policy, seed in (("expert", 0), ("random", 1), ("random", 2)):
        found = await play(factory, task, policy, seed)
        predicted = sheet
        for transition in found.transitions:
            step = SiteFacts(predicted.facts).step(transition.action)
            if step.refusal is not None:
                break  # what was not explored is refused, and never told otherwise
            predicted = predicted.after(step.change)
            assert transition.outcome.next_state.text in facts.state_texts(task, predicted).values()
            assert facts.goal_met(task, predicted) == transition.outcome.success
    assert factory._server is not None
    await factory._server.aclose()


@in_module_loop
@pytest.mark.slow
@pytest.mark.parametrize("kind", ["login-user", "click-tab-2-hard"])
async def test_what_was_explored_of_miniwob_predicts_its_episodes(process: BrowserProcess, kind: str) -> None:
    if find_spec("miniwob") is None:
        pytest.skip("the package 'miniwob' is not installed")
    factory: Any = dg.make("miniwob", kinds=(kind,), instances={"train": 1, "test": 1})
    factory.process = process
    (task,) = await factory.tasks("train")
    for policy in ("expert", "random"):
        found = await play(factory, task, policy, 3)
        assert found.success or policy == "random"
        await check_dream(found, SiteAnnotator(), SETTINGS, facts.goal_met)
    hidden = find_environment("black-box:miniwob").open(factory.options)
    (unknown,) = await hidden.tasks("train")
    assert find_world_sheet(hidden.make(unknown)) is None
    await hidden.aclose()
    await factory._server.aclose()


@in_module_loop
@pytest.mark.slow
async def test_the_facts_of_the_shop_determine_the_pages_of_its_site(
    process: BrowserProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("WEBSHOP_DATA", raising=False)
    factory: Any = dg.make("webshop-site")
    factory.process = process
    spec = find_environment("webshop-site")
    settings = PromptSettings(
        actor=spec.actor, select_facts=spec.select_facts, state_texts=spec.state_texts, demonstrations=0
    )
    (task,) = await factory.tasks("train", 1)
    for policy, seed in (("expert", 0), ("noisy:0.5", 1), ("random", 4)):
        found = await play(factory, task, policy, seed)
        await check_dream(found, site_facts.ShopSiteAnnotator(), settings, bought)
    await factory._server.aclose()
