"""Outcomes that recordings of other tasks determine."""

from __future__ import annotations

from dataclasses import replace

from dreamgym.experience.black_box import BlackBoxExperienceModel, BlackBoxKnowledge
from dreamgym.experience.reply_format import PromptSettings
from dreamgym.experience.shared_outcomes import SHARED, shared_outcomes
from dreamgym.types import State, Task, Trajectory, WorldSheet
from tests.experience.test_known_replies import episode
from tests.experience.test_recorded_outcomes import Asked

COLOURS = ("red", "blue", "black", "white", "pink", "grey", "brown", "gold")
THINGS = [f"{colour} {kind}" for colour in COLOURS for kind in ("mug", "pan", "cup")]


def visit(thing: str, *, refused: bool = False) -> Trajectory:
    """One task: its pages show the instruction, and only the wanted thing wins."""
    wanted = f"Find the {thing}."
    kind = thing.split()[1]
    steps = [("open shelf", f"{wanted} Shelf: mugs, pans, cups."), (f"look {kind}", f"{wanted} Two {kind}s.")]
    if refused:
        steps += [("fly", "No."), (f"look {kind}", "No.")]
    steps.append((f"take {thing}", "Taken."))
    found = episode(thing, thing, *steps, start=f"{wanted} A shelf.")
    *before, last = found.transitions
    won = replace(last.outcome, reward=1.0, terminated=True, success=True)
    task = Task(id=thing, instruction=wanted, environment="shop")
    return replace(found, task=task, transitions=(*before, replace(last, outcome=won)))


RECORDED = [visit(thing) for thing in THINGS]
NEW = Task(id="new", instruction="Find the green cup.", environment="shop")


def test_a_page_of_another_task_is_known_with_ones_own_instruction() -> None:
    known = shared_outcomes(RECORDED).find(NEW, [], "Find the green cup. A shelf.", "open shelf")
    assert known is not None
    assert known.next_state.text == "Find the green cup. Shelf: mugs, pans, cups."
    assert known.reward_source == SHARED
    assert not known.over


def test_replies_of_tasks_without_an_instruction_stay_as_they_are() -> None:
    silent = [replace(each, task=replace(each.task, instruction="")) for each in RECORDED[:3]]
    replies = shared_outcomes([*RECORDED, *silent]).replies.values()
    assert all("\0S\0" not in text for text in replies)


def test_no_success_and_no_end_is_shared() -> None:
    shared = shared_outcomes(RECORDED)
    for before in RECORDED:
        last = before.transitions[-1]
        assert shared.find(before.task, before.transitions[:-1], last.state.text, last.action) is None


def test_kinds_of_action_with_which_tasks_disagree_are_not_shared() -> None:
    different = [
        replace(
            each,
            transitions=(
                replace(
                    each.transitions[0],
                    outcome=replace(each.transitions[0].outcome, next_state=State(text=f"Shelf {number}.")),
                ),
            ),
        )
        for number, each in enumerate(RECORDED)
    ]
    assert shared_outcomes(different).replies == {}


def test_a_situation_that_hides_where_one_is_says_nothing() -> None:
    recorded = [*RECORDED, visit("green mug", refused=True), visit("green pan", refused=True)]
    hidden = replace(recorded[-1].transitions[3], action="look pan")
    told = replace(hidden, outcome=replace(hidden.outcome, next_state=State(text="Two pans.")))
    recorded += [replace(recorded[-1], id="x", transitions=(*recorded[-1].transitions[:3], told))]
    shared = shared_outcomes(recorded)
    assert shared.find(NEW, [], "No.", "look pan") is None


async def test_a_shared_outcome_needs_no_request_to_the_model() -> None:
    model = Asked()
    dream = BlackBoxExperienceModel(
        model,
        name="test",
        settings=PromptSettings(facts="replies", demonstrations=0, imagine=False),
        knowledge=BlackBoxKnowledge(shared=shared_outcomes(RECORDED)),
    )
    state = State(text="Find the green cup. A shelf.")
    found = await dream.predict(NEW, WorldSheet(facts=()), [], state, "open shelf")
    assert found.outcome.reward_source == SHARED
    assert model.prompts == []
    await dream.predict(NEW, WorldSheet(facts=()), [], state, "kick shelf")
    assert len(model.prompts) == 1
