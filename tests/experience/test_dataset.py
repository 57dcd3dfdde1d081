"""Training examples: the prompts of dream time, without leaks, split by task."""

from __future__ import annotations

from dataclasses import replace
from itertools import islice
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dreamgym.data.datasets import builtin_dataset
from dreamgym.data.trajectories import read_trajectories
from dreamgym.envs.alfworld.annotator import AGENT, HouseholdAnnotator
from dreamgym.experience.dataset import (
    VARIATION,
    Example,
    examples,
    held_out,
    limit_repeats,
    oversample,
    variations,
)
from dreamgym.experience.reply_format import (
    PromptSettings,
    parse_reply,
    parse_start,
    parse_variation,
    variation_text,
)
from dreamgym.replay.buffer import ReplayBuffer
from dreamgym.structured import unify_line_breaks
from dreamgym.types import Annotation, Trajectory

SETTINGS = PromptSettings(actor=AGENT, history=2, demonstrations=2, text_limit=400)


@pytest.fixture(scope="module")
def recorded() -> list[Trajectory]:
    return list(islice(read_trajectories(builtin_dataset()), 20))


async def test_every_transition_and_every_start_becomes_one_readable_example(
    recorded: list[Trajectory],
) -> None:
    made = [example async for example in examples(recorded, HouseholdAnnotator(), settings=SETTINGS)]
    assert len(made) == sum(1 + len(trajectory) for trajectory in recorded)
    for example in made:
        trajectory = next(each for each in recorded if each.id == example.trajectory_id)
        if example.position < 0:
            assert parse_start(example.reply) == trajectory.start.text
        else:
            outcome = trajectory.transitions[example.position].outcome
            reply = parse_reply(example.reply)
            assert (reply.next_state, reply.success) == (outcome.next_state.text, outcome.success)
            assert f"action: {trajectory.transitions[example.position].action}\n" in example.prompt


async def test_demonstrations_never_come_from_the_examples_own_task(
    recorded: list[Trajectory], tmp_path: Path
) -> None:
    """The episode itself is in the buffer, and would be its own best demonstration."""
    with ReplayBuffer.open(tmp_path / "replay.sqlite") as buffer:
        for trajectory in recorded[:4]:
            await buffer.add(trajectory)
        alone = [
            example
            async for example in examples(
                recorded[:1], HouseholdAnnotator(), settings=SETTINGS, retriever=buffer
            )
        ]
        own = {t.outcome.next_state.text for t in recorded[0].transitions}
        others = {t.outcome.next_state.text for each in recorded[1:4] for t in each.transitions}
        shown = [
            line.split(" => ", 1)[1].replace("\\n", "\n")
            for example in alone
            for line in example.prompt.splitlines()
            if line.startswith("like: ")
        ]
        assert len(shown) == 2 * len(recorded[0])
        assert not {text for text in shown if text in own - others}


async def test_reasoning_and_sheet_can_be_left_out(recorded: list[Trajectory]) -> None:
    bare = SETTINGS.model_copy(update={"sheet": False, "reasoning": False, "history": 0})
    made = [example async for example in examples(recorded[:2], HouseholdAnnotator(), settings=bare)]
    steps = [example for example in made if example.position >= 0]
    assert all("fact:" not in each.prompt and "then:" not in each.prompt for each in steps)
    assert all(each.reply.startswith("think: \n") for each in steps)


async def test_an_annotator_that_returns_too_few_notes_is_refused(recorded: list[Trajectory]) -> None:
    class Forgetful(HouseholdAnnotator):
        async def annotate(self, trajectory: Trajectory) -> Annotation:
            annotation = await super().annotate(trajectory)
            return replace(annotation, notes=annotation.notes[:-1])

    with pytest.raises(ValueError, match="notes for trajectory"):
        async for _ in examples(recorded[:1], Forgetful(), settings=SETTINGS):
            pass


def test_the_validation_part_is_made_of_whole_tasks(recorded: list[Trajectory]) -> None:
    assert {held_out("a task", 0.3) for _ in range(5)} == {held_out("a task", 0.3)}
    assert not any(held_out(trajectory.task.id, 0.0) for trajectory in recorded)
    assert all(held_out(trajectory.task.id, 1.0) for trajectory in recorded)


def test_variations_are_other_tasks_of_the_same_room_and_name_what_is_there(
    recorded: list[Trajectory],
) -> None:
    """The task generator shares the experience model's weights (Eq. 6)."""
    same = [replace(recorded[0], id=each.id, task=each.task) for each in recorded]  # one room for all
    made = list(variations(same))
    tasks = {each.task.instruction for each in recorded}
    assert len(made) == len(tasks)
    for example in made:
        assert example.position == VARIATION
        reported = parse_variation(example.reply)
        assert reported in tasks
        assert f"task: {reported}\n" not in example.prompt
        assert "fact: here: agent1, armchair, box," in example.prompt
    assert [*variations(same)] == made


@given(st.text())
def test_no_reply_however_hostile_becomes_an_empty_task(text: str) -> None:
    assert parse_variation(text) != ""
    assert parse_variation(variation_text(text)) in (unify_line_breaks(text).strip(), None)


async def test_a_long_reply_that_comes_too_often_is_thinned_out_and_nothing_else(
    recorded: list[Trajectory],
) -> None:
    made = [example async for example in examples(recorded, HouseholdAnnotator(), settings=SETTINGS)]
    assert list(limit_repeats(made)) == made
    longest = max((example for example in made), key=lambda example: len(example.reply))
    kept = list(limit_repeats([longest] * 50 + made, characters=10 * len(longest.reply)))
    assert kept.count(longest) == 10
    assert {example.reply for example in kept} == {example.reply for example in made}


def test_what_is_rarely_said_no_to_is_read_more_often() -> None:
    def example(action: str, next_state: str, number: int) -> Example:
        return Example(
            prompt=f"state: You are here.\naction: {action}\n",
            reply=f"think: it is there.\nchange:\nnext: {next_state}\nend: no",
            trajectory_id=str(number),
            position=0,
        )

    made = [example("open desk 1", "You open the desk 1.", number) for number in range(90)]
    made += [example("open desk 2", "Nothing happens.", number) for number in range(10)]
    made += [example("slice egg 1", "Nothing happens.", 0)]
    read = oversample(made)
    counts = [sum(each.prompt == one.prompt for each in read) for one in (made[0], made[90], made[100])]
    assert counts == [90, 30, 4]
    assert list(dict.fromkeys(read)) == made
    assert oversample([]) == []
