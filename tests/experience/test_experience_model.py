"""The experience model and its environment: faithful to their replies, and never broken by them."""

from __future__ import annotations

import asyncio
from itertools import islice
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dreamgym.data.datasets import builtin_dataset
from dreamgym.data.trajectories import read_trajectories
from dreamgym.envs.alfworld.annotator import AGENT, HouseholdAnnotator
from dreamgym.envs.alfworld.goals import goal_met
from dreamgym.envs.synthetic import EpisodeStart, SyntheticEnvironment, SyntheticFactory
from dreamgym.errors import EpisodeFailedError, EpisodeOverError
from dreamgym.experience.model import ModelVerdict, ReasoningExperienceModel
from dreamgym.experience.reply_format import PromptSettings, reply_text, start_text
from dreamgym.experience.rewards import SheetCheck
from dreamgym.protocols import Environment, Grader
from dreamgym.replay.buffer import ReplayBuffer
from dreamgym.testing.scripted import ScriptedLanguageModel
from dreamgym.types import CompletionRequest, FailureKind, Note, Outcome, State, Task, Trajectory, WorldSheet

SETTINGS = PromptSettings(actor=AGENT)
TASK = Task(id="t", instruction="open the safe", environment="house")
SHEET = WorldSheet(facts=(("openable", "safe 1"),))


def start_for(task: Task, seed: int) -> EpisodeStart:
    return EpisodeStart(sheet=SHEET)


@pytest.fixture(scope="module")
def recorded() -> list[Trajectory]:
    return list(islice(read_trajectories(builtin_dataset()), 12))


async def script_of(trajectory: Trajectory) -> ScriptedLanguageModel:
    """A model that answers as the real engine did in this episode, step by step."""
    annotation = await HouseholdAnnotator().annotate(trajectory)
    replies = [start_text(trajectory.start.text)]
    replies += [
        reply_text(note, transition.outcome)
        for note, transition in zip(annotation.notes, trajectory.transitions, strict=True)
    ]
    answers = iter(replies)
    return ScriptedLanguageModel(lambda request: next(answers))


def imagined(
    model: ScriptedLanguageModel,
    grader: Grader | None = None,
    task: Task = TASK,
    sheet: WorldSheet = SHEET,
) -> SyntheticEnvironment:
    experience = ReasoningExperienceModel(model, name="test", settings=SETTINGS, grader=grader)
    return SyntheticEnvironment(task, experience, sheet, horizon=50)


@pytest.mark.parametrize("grader", [ModelVerdict(), SheetCheck(goal_met)], ids=["own word", "sheet"])
async def test_a_dream_with_true_replies_goes_as_the_real_episode_went(
    recorded: list[Trajectory], grader: Grader
) -> None:
    for trajectory in recorded:
        assert trajectory.sheet is not None
        dream = imagined(await script_of(trajectory), grader, trajectory.task, trajectory.sheet)
        assert isinstance(dream, Environment)
        assert (await dream.start()).text == trajectory.start.text
        for transition in trajectory.transitions:
            outcome = await dream.step(transition.action)
            real = transition.outcome
            assert outcome.next_state.text == real.next_state.text
            assert (outcome.reward, outcome.success) == (real.reward, real.success)
            assert (outcome.terminated, outcome.truncated) == (real.terminated, real.truncated)
            assert outcome.reasoning
        with pytest.raises(EpisodeOverError):
            await dream.step("look")


def refusing(end: str = "no") -> ScriptedLanguageModel:
    reply = f"think: it is stuck.\nchange: + opened safe 1;\nnext: It will not budge.\nend: {end}"
    return ScriptedLanguageModel(lambda r: "next: A room." if "action: start" in r.prompt else reply)


@pytest.mark.parametrize("refusal_ends", [False, True])
@pytest.mark.parametrize("end", ["no", "yes", "success"])
@pytest.mark.parametrize("grader", [ModelVerdict(), SheetCheck(lambda task, sheet: True)])
async def test_a_refused_action_changes_and_earns_nothing_and_ends_the_episode_only_by_setting(
    refusal_ends: bool, end: str, grader: Grader
) -> None:
    """Whatever else the reply claims, with every grader."""
    experience = ReasoningExperienceModel(
        refusing(end), name="test", settings=SETTINGS, grader=grader, refusals=["It will not budge."]
    )
    factory = SyntheticFactory(experience, [TASK], start_for, refusal_ends=refusal_ends)
    dream = factory.make(TASK)
    await dream.start()
    outcome = await dream.step("open safe 1")
    assert (outcome.reward, outcome.success, outcome.truncated) == (0.0, False, False)
    assert outcome.terminated is refusal_ends
    assert dream.sheet == SHEET
    assert outcome.info["refused"]
    if refusal_ends:
        with pytest.raises(EpisodeOverError):
            await dream.step("open safe 1")


async def test_an_answer_that_is_no_refusal_stands_as_it_is() -> None:
    dream = imagined(refusing("success"))
    await dream.start()
    outcome = await dream.step("open safe 1")
    assert (outcome.reward, outcome.success, outcome.terminated) == (1.0, True, True)
    assert dream.sheet.facts == (*SHEET.facts, ("opened", "safe 1"))


async def test_without_reasoning_the_model_is_made_to_answer_at_once() -> None:
    settings = PromptSettings(actor=AGENT, reasoning=False)
    model = ScriptedLanguageModel(lambda r: " + opened safe 1;\nnext: It opens.\nend: no")
    experience = ReasoningExperienceModel(model, name="test", settings=settings)
    predicted = await experience.predict(TASK, SHEET, [], State(text="A room."), "open safe 1")
    assert model.requests[0].prompt.endswith("action: open safe 1\nthink: \nchange:")
    assert (predicted.outcome.reasoning, predicted.outcome.next_state.text) == ("", "It opens.")
    assert ("opened", "safe 1") in predicted.sheet.facts


async def test_a_known_first_state_is_not_imagined() -> None:
    model = ScriptedLanguageModel(lambda r: opening())
    experience = ReasoningExperienceModel(model, name="test", settings=SETTINGS)
    known = State(text="A cellar.")
    dream = SyntheticEnvironment(TASK, experience, SHEET, horizon=5, first=known)
    assert await dream.start() == known
    assert not model.requests


def opening(end: str = "no") -> str:
    return f"think: it is closed.\nchange: + opened safe 1;\nnext: You open the safe 1.\nend: {end}"


async def test_the_sheet_follows_what_the_model_declares() -> None:
    model = ScriptedLanguageModel(lambda r: "next: A room." if "action: start" in r.prompt else opening())
    dream = imagined(model)
    await dream.start()
    await dream.step("open safe 1")
    await dream.step("examine safe 1")
    assert "fact: safe 1: openable\n" in model.requests[1].prompt
    assert "fact: safe 1: openable, opened\n" in model.requests[2].prompt
    assert (await dream.world_sheet()) == SHEET


async def test_an_unreadable_reply_is_asked_for_again_and_then_fails_this_episode_alone() -> None:
    def script(request: CompletionRequest) -> str:
        if "action: start" in request.prompt:
            return "next: A room."
        if "action: sulk" in request.prompt:
            return "I would rather not."
        return opening() if request.temperature else "think: hm"

    model = ScriptedLanguageModel(script)
    good, bad = imagined(model), imagined(model)
    await asyncio.gather(good.start(), bad.start())
    outcome, failure = await asyncio.gather(
        good.step("open safe 1"), bad.step("sulk"), return_exceptions=True
    )
    assert isinstance(outcome, Outcome)
    assert outcome.next_state.text == "You open the safe 1."
    assert isinstance(failure, EpisodeFailedError)
    assert failure.kind is FailureKind.PARSE_ERROR
    assert "3 attempts" in str(failure)
    retried = [request for request in model.requests if "action: sulk" in request.prompt]
    assert len({request.seed for request in retried}) == 3


@settings(max_examples=200, deadline=None)
@given(st.text())
def test_no_reply_however_hostile_raises_anything_but_the_typed_failure(text: str) -> None:
    async def play() -> None:
        dream = imagined(ScriptedLanguageModel(lambda r: "next: A." if "action: start" in r.prompt else text))
        await dream.start()
        try:
            outcome = await dream.step("open safe 1")
        except EpisodeFailedError:
            return
        assert outcome.next_state.text.strip()

    asyncio.run(play())


async def test_a_grader_overrules_the_models_own_success() -> None:
    def script(request: CompletionRequest) -> str:
        return "next: A room." if "action: start" in request.prompt else opening("success")

    own, judged = (
        imagined(ScriptedLanguageModel(script)),
        imagined(ScriptedLanguageModel(script), SheetCheck(lambda task, sheet: False)),
    )
    for dream in (own, judged):
        await dream.start()
    believed, doubted = await own.step("open safe 1"), await judged.step("open safe 1")
    assert (believed.reward, believed.terminated, believed.reward_source) == (1.0, True, "model")
    assert (doubted.reward, doubted.terminated, doubted.reward_source) == (0.0, False, "sheet")


async def test_demonstrations_come_from_the_buffer_and_never_from_the_same_task(
    recorded: list[Trajectory], tmp_path: Path
) -> None:
    with ReplayBuffer.open(tmp_path / "replay.sqlite") as buffer:
        for each in recorded:
            await buffer.add(each)
        trajectory = recorded[0]
        model = await script_of(trajectory)
        experience = ReasoningExperienceModel(model, name="test", settings=SETTINGS, retriever=buffer)
        assert trajectory.sheet is not None
        first = trajectory.transitions[0]
        await experience.imagine_start(trajectory.task, trajectory.sheet)
        predicted = await experience.predict(trajectory.task, trajectory.sheet, [], first.state, first.action)
        shown = [line for line in model.requests[-1].prompt.splitlines() if line.startswith("like: ")]
        assert len(shown) == len(predicted.demonstrations) == SETTINGS.demonstrations
        # The buffer holds this very transition, which would be the nearest of all.
        assert trajectory.task.id not in {each.task_id for each in predicted.demonstrations}


async def test_a_factory_dreams_the_same_world_for_every_member_of_a_group() -> None:
    model = ScriptedLanguageModel(lambda r: "next: A room." if "action: start" in r.prompt else opening())
    experience = ReasoningExperienceModel(model, name="test", settings=SETTINGS)
    factory = SyntheticFactory(experience, [TASK], start_for, horizon=2)
    members = [factory.make(TASK) for _ in range(4)]
    for member in members:
        await member.start()
    outcomes = [await member.step("open safe 1") for member in members]
    assert len(set(outcomes)) == 1
    last = await members[0].step("open safe 1")
    assert last.truncated
    assert not last.terminated
    assert [task.id for task in await factory.tasks("train", 1)] == ["t"]


def test_a_note_without_a_change_is_a_note() -> None:
    done = Outcome(next_state=State(text="x"), reward=0.0, terminated=False)
    assert "change:\n" in reply_text(Note(reasoning="nothing changes."), done)


async def test_the_same_question_is_asked_once_if_replies_are_remembered_and_a_failure_is_not() -> None:
    asked: list[str] = []

    def answer(request: CompletionRequest) -> str:
        asked.append(request.prompt)
        if len(asked) == 1:
            raise EpisodeFailedError(FailureKind.SERVER_DOWN, "down")
        return reply_text(Note(reasoning="it opens."), opened)

    opened = Outcome(next_state=State(text="You open the safe 1."), reward=0.0, terminated=False)
    experience = ReasoningExperienceModel(
        ScriptedLanguageModel(answer), name="test", settings=SETTINGS, cached_replies=1
    )

    async def predicted(action: str) -> str:
        prediction = await experience.predict(TASK, SHEET, (), State(text="A room."), action)
        return prediction.outcome.next_state.text

    with pytest.raises(EpisodeFailedError):
        await predicted("open safe 1")
    together = await asyncio.gather(*(predicted("open safe 1") for _ in range(8)))
    assert set(together) == {"You open the safe 1."}
    assert len(asked) == 2
    await predicted("close safe 1")
    await predicted("open safe 1")
    assert len(asked) == 4, "only so many are kept"


async def test_what_was_refused_is_refused_again_until_something_changes() -> None:
    """Else asking often enough would open any door."""

    def script(request: CompletionRequest) -> str:
        if request.prompt.endswith("action: take key 1\n"):
            return "think: it lies here.\nchange: + holds agent1, key 1;\nnext: You take it.\nend: no"
        stuck = "think: it is locked.\nchange:\nnext: Nothing happens.\nend: no"
        asked.append(request.prompt)
        return stuck if len(asked) == 1 else "think: so be it.\nchange:\nnext: It opens.\nend: success"

    asked: list[str] = []
    model = ReasoningExperienceModel(
        ScriptedLanguageModel(script), name="test", settings=SETTINGS, refusals=("Nothing happens.",)
    )
    sheet = WorldSheet(facts=(*SHEET.facts, ("atlocation", AGENT, "loc 1")))
    dream = SyntheticEnvironment(TASK, model, sheet, horizon=50, first=State(text="A safe 1, a key 1."))
    await dream.start()
    said = [(await dream.step("open safe 1")).next_state.text for _ in range(5)]
    assert said == ["Nothing happens."] * 5
    assert len(asked) == 1
    await dream.step("take key 1")
    assert (await dream.step("open safe 1")).success
