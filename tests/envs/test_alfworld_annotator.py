"""The programmatic annotator: its changes keep a sheet true to what the real engine says later."""

from __future__ import annotations

import re
from itertools import islice

from dreamgym.data.datasets import builtin_dataset
from dreamgym.data.trajectories import read_trajectories
from dreamgym.envs.alfworld.annotator import AGENT, HouseholdAnnotator
from tests.envs.current_sheet import current_sheet

_LISTING = re.compile(r"(?:On the (\w+ \d+)|The (\w+ \d+) is open\. In it), you see (.+?)\.")


async def test_the_annotated_sheet_agrees_with_every_listing_of_the_simulator() -> None:
    compared = 0
    for trajectory in islice(read_trajectories(builtin_dataset()), 0, 1000, 5):
        annotation = await HouseholdAnnotator().annotate(trajectory)
        assert len(annotation.notes) == len(trajectory)
        assert trajectory.sheet is not None
        sheet = trajectory.sheet
        for note, transition in zip(annotation.notes, trajectory.transitions, strict=True):
            sheet = current_sheet(sheet, (note,))
            text = transition.outcome.next_state.text
            for on, inside, things in _LISTING.findall(text):
                seen = set(re.findall(r"\ba (\w+ \d+)", things))
                facts_there = {f[1] for f in sheet.facts if f[0] == "inreceptacle" and f[2] == (on or inside)}
                assert seen == facts_there, (transition.action, text)
                compared += 1
            if transition.action == "inventory" and text != "Nothing happens.":
                held = {fact[2] for fact in sheet.facts if fact[:2] == ("holds", AGENT)}
                assert held == set(re.findall(r"\ba (\w+ \d+)", text))
    assert compared > 2000


async def test_the_reasoning_states_done_only_when_the_task_is_done() -> None:
    for trajectory in islice(read_trajectories(builtin_dataset()), 60):
        annotation = await HouseholdAnnotator().annotate(trajectory)
        for transition, note in zip(trajectory.transitions, annotation.notes, strict=True):
            assert ("the task is done" in note.reasoning) == transition.outcome.success
            refused = transition.outcome.next_state.text == "Nothing happens."
            assert note.reasoning.endswith("not possible.") == refused
            if refused:
                assert not note.change.ended
                assert not note.change.begun


async def test_a_put_down_is_success_exactly_when_every_question_to_the_goal_is_answered_yes() -> None:
    """The reasoning leads to the verdict: nothing else than these small questions decides."""
    successes = 0
    for trajectory in islice(read_trajectories(builtin_dataset()), 400):
        annotation = await HouseholdAnnotator().annotate(trajectory)
        for transition, note in zip(trajectory.transitions, annotation.notes, strict=True):
            if not transition.action.startswith("move") or note.reasoning.endswith("not possible."):
                continue
            answers = re.findall(r": (yes|no)\b", note.reasoning)
            expected = bool(answers) and "no" not in answers
            assert expected == transition.outcome.success, (transition, note)
            successes += transition.outcome.success
    assert successes > 50


async def test_what_is_refused_fails_one_of_the_checks_and_what_is_done_fails_none() -> None:
    """Two rules stand in no sheet: what can be cut where, and what holds what."""
    refusals = 0
    for trajectory in read_trajectories(builtin_dataset("alfworld-mistakes")):
        annotation = await HouseholdAnnotator().annotate(trajectory)
        for transition, note in zip(trajectory.transitions, annotation.notes, strict=True):
            refused = transition.outcome.next_state.text == "Nothing happens."
            unknown = note.reasoning == "not possible."  # no action at all: "go 6 shelf 7"
            failed = unknown or bool(
                re.search(r"(: no|is [^:]+|cannot [^:]+)\. not possible", note.reasoning)
            )
            if not transition.action.startswith(("slice", "move")):
                assert failed == refused, (transition.action, note.reasoning)
            refusals += refused
    assert refusals > 1000
