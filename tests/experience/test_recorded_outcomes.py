"""Outcomes that recordings of a task agree on are repeated instead of predicted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from dreamgym.experience.black_box import BlackBoxExperienceModel, BlackBoxKnowledge
from dreamgym.experience.known_replies import (
    recorded_replies,
    task_sheets,
    training_replies,
    with_known_replies,
)
from dreamgym.experience.recorded_outcomes import RECORDED, determined
from dreamgym.experience.recorded_patterns import no_effect
from dreamgym.experience.reply_format import PromptSettings
from dreamgym.types import Completion, CompletionRequest, Outcome, Prediction, State, Trajectory, Transition
from tests.experience.test_known_replies import episode


def machine(name: str, task: str, actions: Sequence[str], *, product: str, broken: int = 0) -> Trajectory:
    """Buying takes a coin; what falls can be taken, which wins. A slot that is `broken` says another thing
    each time."""
    coins, tray, steps = 0, "", []
    for number, action in enumerate(actions):
        if action == "insert coin":
            coins += 1
            reply = f"Coins: {coins}."
        elif action == "press A":
            reply, tray = (f"The {product} falls.", product) if coins else ("The display blinks.", tray)
        elif action == "shake it":
            reply = f"Noise {broken}{number}."
        else:
            reply = f"You take the {tray}." if tray else "The tray is empty."
        steps.append((action, reply))
    recorded = episode(name, task, *steps)
    *before, last = recorded.transitions
    if not last.outcome.next_state.text.startswith("You take"):
        return recorded
    won = replace(last.outcome, reward=1.0, terminated=True, success=True)
    return replace(recorded, transitions=(*before, replace(last, outcome=won)))


PLANS = (
    ("press A", "insert coin", "shake it", "press A", "take it"),
    ("insert coin", "press A", "shake it", "take it"),
    ("take it", "press A", "insert coin", "press A", "shake it", "take it"),
)
RECORDED_EPISODES = [
    machine(f"{task}{number}", task, plan, product=product, broken=number)
    for task, product in zip("abcdef", ("nuts", "gum", "soda", "cake", "figs", "mints"), strict=True)
    for number, plan in enumerate(PLANS)
]


class Asked:
    """A language model that counts its requests."""

    def __init__(self) -> None:
        self.prompts: list[str] = []

    async def complete(self, request: CompletionRequest) -> Completion:
        self.prompts.append(request.prompt)
        return Completion(text="think: \nchange:\nnext: Something.\nend: no", logprobs=(-0.1,))


async def predicted(model: Asked, actions: Sequence[str], task: str = "a") -> list[Prediction]:
    """The predictions of an episode of these actions, given all recordings."""
    recorded = RECORDED_EPISODES
    inert = no_effect(recorded)
    knowledge = BlackBoxKnowledge(inert=inert, certain=determined(recorded, inert))
    settings = PromptSettings(facts="replies", history=8, text_limit=400, demonstrations=0, imagine=False)
    dream = BlackBoxExperienceModel(model, name="test", settings=settings, knowledge=knowledge)
    sheet = task_sheets(recorded)[task]
    source = next(each for each in recorded if each.task.id == task)
    history: list[Transition] = []
    found: list[Prediction] = []
    state = source.start
    for action in actions:
        prediction = await dream.predict(source.task, sheet, history, state, action)
        found.append(prediction)
        turn = replace(source.transitions[0], state=state, action=action, outcome=prediction.outcome)
        history.append(turn)
        state = prediction.outcome.next_state
    return found


def test_kinds_whose_outcomes_differ_in_equal_situations_are_not_determined() -> None:
    found = determined(RECORDED_EPISODES, no_effect(RECORDED_EPISODES))
    assert "shake it" not in found
    assert "insert coin" in found
    assert "press A" in found
    assert min(found.agreement.values()) >= 0.98


async def test_a_recorded_success_is_repeated_without_asking_the_model() -> None:
    model = Asked()
    found = await predicted(model, ("insert coin", "press A"))
    assert [each.outcome.next_state.text for each in found] == ["Coins: 1.", "The nuts falls."]
    assert {each.outcome.reward_source for each in found} == {RECORDED}
    assert all(each.outcome.info["supported"] for each in found)
    assert model.prompts == []


async def test_another_task_has_other_outcomes() -> None:
    found = await predicted(Asked(), ("insert coin", "press A"), task="b")
    assert found[-1].outcome.next_state.text == "The gum falls."


async def test_what_no_recording_knows_is_left_to_the_model() -> None:
    model = Asked()
    [*_, found] = await predicted(model, ("insert coin", "insert coin"))
    assert found.outcome.next_state.text == "Something."
    assert model.prompts, "no recording inserts two coins"


def test_a_longer_situation_is_used_where_the_state_alone_is_ambiguous() -> None:
    # `Hm.` is said in two rooms; what `go on` finds depends on the room.
    recorded = [
        episode(f"{task}{number}", task, ("enter", room), ("wait", "Hm."), ("go on", f"Behind: {room}"))
        for task in "abcdef"
        for number, room in enumerate(("red room", "blue room", "red room", "blue room"))
    ]
    found = determined(recorded, no_effect([]))
    assert found.lengths["go/2"] > 0
    assert "enter" not in found, "which room one enters is chance"


def test_a_held_out_recording_does_not_know_its_own_outcomes() -> None:
    recorded = RECORDED_EPISODES
    inert = no_effect(recorded)
    certain = determined(recorded, inert)
    lonely = episode("z", "z", ("insert coin", "Coins: 1."))
    [*_, found] = with_known_replies([*recorded, lonely])
    assert found.sheet is not None
    assert certain.find(found.sheet, (), inert, "start", "insert coin") is None


def test_fine_tuning_never_shows_a_reply_that_practice_would_repeat() -> None:
    recorded = with_known_replies(RECORDED_EPISODES)
    inert = no_effect(RECORDED_EPISODES)
    certain = determined(RECORDED_EPISODES, inert)
    shown = [
        fact
        for each in recorded
        for fact in training_replies(each, 0, inert, certain)
        if fact[1:3] == (each.start.text, each.transitions[0].action)
    ]
    assert recorded_replies(recorded[0].sheet)  # type: ignore[arg-type]
    assert shown == []


def test_an_outcome_without_a_known_reward_is_not_repeated() -> None:
    unknown = [
        replace(
            each,
            transitions=tuple(
                replace(
                    turn,
                    outcome=Outcome(
                        next_state=State(text=turn.outcome.next_state.text),
                        reward=0.0,
                        terminated=False,
                        reward_source="unknown",
                    ),
                )
                for turn in each.transitions
            ),
        )
        for each in RECORDED_EPISODES
    ]
    assert determined(unknown, no_effect(unknown)).lengths == {}
