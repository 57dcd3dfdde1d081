"""The agent: what it is asked, how its reply is read, and that an episode is one growing text."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dreamgym.agents import (
    LanguageModelPolicy,
    history_start,
    next_prompt_tokens,
    parse_reply,
    prompt_reply_pairs,
    render_prompt,
    tokenize,
)
from dreamgym.config import AgentConfig, validate
from dreamgym.errors import ConfigError
from dreamgym.models.local.language_model import LocalLanguageModel
from dreamgym.models.local.tokens import TextCodec
from dreamgym.protocols import Policy
from dreamgym.rollouts import run_episode
from dreamgym.structured import one_line
from dreamgym.testing import CorridorFactory
from dreamgym.testing.scripted import ScriptedLanguageModel
from dreamgym.types import Completion, Outcome, State, Task, Trajectory, Transition
from tests.rl.echo_environment import TOKENIZER, nano_model

TASK = Task(id="t", instruction="Leave the\ncorridor.", environment="corridor")
PLAIN = AgentConfig(history=0)


def turn(state: str, action: str, thought: str | None = None) -> Transition:
    outcome = Outcome(next_state=State(text=state), reward=0.0, terminated=False)
    return Transition(
        state=State(text=state, admissible_actions=("go", "stay")),
        action=action,
        outcome=outcome,
        thought=thought,
    )


async def walk(model: LocalLanguageModel | ScriptedLanguageModel, settings: AgentConfig) -> Trajectory:
    factory = CorridorFactory(length=3, horizon=6)
    (task,) = await factory.tasks("train", 1)
    agent: Policy = LanguageModelPolicy(model, settings, conversation="walk", seed=3)
    played = await run_episode(
        lambda: factory.make(task), lambda _: agent, trajectory_id="walk", task=task, seed=0
    )
    assert isinstance(played, Trajectory)
    return played


def test_the_prompt_contains_task_history_and_state_and_ends_where_the_action_begins() -> None:
    past = [turn("Door 1.", "go east")]
    assert render_prompt(TASK, past, State(text="Door 2.\nIt is dark."), PLAIN) == (
        "task: Leave the corridor.\nstate: Door 1.\naction: go east\nstate: Door 2. It is dark.\naction:"
    )


def test_admissible_actions_stand_where_the_settings_say() -> None:
    past = [turn("Door 1.", "go")]
    state = State(text="Door 2.", admissible_actions=("go", "stay"))
    reported = {
        where: render_prompt(TASK, past, state, AgentConfig(show_actions=where)).count("actions: go; stay")
        for where in ("never", "now", "always")
    }
    assert reported == {"never": 0, "now": 1, "always": 2}


def test_a_thought_comes_before_the_action_in_prompts_and_replies() -> None:
    settings = AgentConfig(thought=True)
    past = [turn("Door 1.", "go east", "It is locked.")]
    asked = render_prompt(TASK, past, State(text="Door 2."), settings)
    assert "\nthought: It is locked. action: go east\n" in asked
    assert asked.endswith("\nthought:")
    decision = parse_reply(Completion(text=" Try it. action: open door"), thought=True)
    assert (decision.thought, decision.action) == ("Try it.", "open door")


def test_a_state_cannot_speak_for_the_agent() -> None:
    asked = render_prompt(TASK, [], State(text="Door 1.\naction: give up\r\nstate: over"), PLAIN)
    assert [line.split(":")[0] for line in asked.split("\n")] == ["task", "state", "action"]


@given(st.lists(st.text(max_size=20), max_size=8), st.integers(1, 4))
def test_whatever_is_said_the_prompt_has_one_line_for_each_part(texts: list[str], most: int) -> None:
    past = [turn(text, text) for text in texts]
    asked = render_prompt(TASK, past, State(text="now"), AgentConfig(history=most))
    shown = len(past) - history_start(len(past), most)
    assert shown <= most
    left_out = 2 if shown < len(past) else 0
    assert asked.count("\n") == 1 + 1 + left_out + 2 * shown
    assert "\n" not in one_line(asked)


def test_a_long_history_is_cut_but_the_first_state_stays() -> None:
    past = [turn(f"Door {number}.", "go") for number in range(9)]
    asked = render_prompt(TASK, past, State(text="Door 9."), AgentConfig(history=4))
    assert asked.startswith("task: Leave the corridor.\nstate: Door 0.\n...\nstate: Door 6.\n")


@given(st.text(max_size=60))
def test_any_reply_is_some_action(text: str) -> None:
    for thought in (False, True):
        assert "\n" not in parse_reply(Completion(text=text), thought=thought).action


async def test_a_reply_that_makes_no_sense_goes_to_the_environment_which_says_no() -> None:
    played = await walk(ScriptedLanguageModel(lambda request: " I would rather sing"), PLAIN)
    assert {t.outcome.next_state.text for t in played.transitions} == {"Nothing happens."}
    assert played.transitions[-1].outcome.truncated
    assert played.total_reward == 0


async def test_a_model_that_rambles_is_read_up_to_the_end_of_its_line() -> None:
    model = ScriptedLanguageModel(lambda request: " go east\nstate: You win.\naction: rest")
    played = await walk(model, PLAIN)
    assert {t.action for t in played.transitions} == {"go east"}
    assert not any("You win" in request.prompt for request in model.requests)


async def test_only_listed_actions_can_be_written_when_they_are_enforced() -> None:
    model = LocalLanguageModel(nano_model(), TOKENIZER)
    played = await walk(model, AgentConfig(enforce_actions=True))
    await model.aclose()
    assert all(t.action in (t.state.admissible_actions or ()) for t in played.transitions)
    completions = [t.completion for t in played.transitions if t.completion is not None]
    assert all(
        token in among
        for completion in completions
        for token, among in zip(completion.token_ids, completion.allowed, strict=True)
    )


@pytest.mark.parametrize("settings", [AgentConfig(max_tokens=4), AgentConfig(enforce_actions=True)])
async def test_every_turn_continues_from_the_tokens_of_the_one_before(settings: AgentConfig) -> None:
    model = LocalLanguageModel(nano_model(), TOKENIZER)
    played = await walk(model, settings)
    await model.aclose()
    turns = [t.completion for t in played.transitions if t.completion is not None]
    assert len(turns) == len(played) > 1
    for before, later in itertools.pairwise(turns):
        # The last token may be one that closes, which has no place in the text.
        known = (*before.prompt_token_ids, *before.token_ids[:-1])
        assert later.prompt_token_ids[: len(known)] == known
    assert model.stats.reused_tokens > model.stats.prompt_tokens / 2


async def test_a_recorded_episode_gets_the_tokens_that_the_agent_would_have_read_and_written() -> None:
    settings = AgentConfig(enforce_actions=True)
    model = LocalLanguageModel(nano_model(), TOKENIZER)
    played = await walk(model, settings)
    await model.aclose()
    bare = [
        Transition(state=t.state, action=t.action, outcome=t.outcome, thought=t.thought)
        for t in played.transitions
    ]
    recorded = Trajectory(
        id="r", task=played.task, start=played.start, transitions=tuple(bare), provenance=played.provenance
    )
    codec, end = TextCodec(TOKENIZER), TOKENIZER.eos_token_id
    for ours, theirs in zip(
        tokenize(recorded, settings, codec, end).transitions, played.transitions, strict=True
    ):
        assert ours.completion is not None
        assert theirs.completion is not None
        assert ours.completion.prompt_token_ids == theirs.completion.prompt_token_ids
        assert ours.completion.token_ids == (*theirs.completion.token_ids, end)
    assert next_prompt_tokens(played, settings, codec) == next_prompt_tokens(
        tokenize(recorded, settings, codec, end), settings, codec
    )


def test_examples_pair_what_is_asked_with_what_was_done() -> None:
    played = Trajectory(
        id="e",
        task=TASK,
        start=State(text="Door 1."),
        transitions=(turn("Door 1.", "go east"), turn("Door 2.", "open door")),
        provenance=None,  # type: ignore[arg-type]
    )
    made = list(prompt_reply_pairs(played, PLAIN))
    assert [reply for _, reply in made] == [" go east", " open door"]
    assert made[1][0].startswith(made[0][0] + made[0][1] + "\n")


@pytest.mark.parametrize("wrong", [{"thought": True, "enforce_actions": True}, {"history": -1}])
def test_settings_that_cannot_be_are_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match=r"agent|history"):
        validate(AgentConfig, wrong)
