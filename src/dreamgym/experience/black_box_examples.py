"""Training examples of an experience model that knows its environment by recorded replies alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from random import Random

from dreamgym.experience.black_box import black_box_prompt
from dreamgym.experience.dataset import START, Example
from dreamgym.experience.known_replies import action_kind, explain, recorded_replies, select, training_replies
from dreamgym.experience.reply_format import PromptSettings, reply_text, start_prompt, start_text
from dreamgym.seeding import derive_seed
from dreamgym.types import Annotation, Demonstration, Note, Trajectory, WorldSheet

_BARE = 0.2
"""Share of the transitions that are also learnt without history, as imagined replies are."""


def black_box_examples(
    trajectory: Trajectory,
    annotation: Annotation,
    settings: PromptSettings,
    demonstrations: Iterator[Sequence[Demonstration]],
    *,
    persistent: frozenset[str],
    plain: bool,
) -> Iterator[Example]:
    """The examples of one trajectory, whose sheet holds the replies of the other recordings of its task.
    With `plain`, the reasoning is the cause that can be seen instead of the annotation's."""
    yield Example(
        prompt=start_prompt(trajectory.task, WorldSheet(facts=()), settings),
        reply=start_text(trajectory.start.text),
        trajectory_id=trajectory.id,
        position=START,
    )
    for position, step in enumerate(trajectory.transitions):
        retrieved = next(demonstrations)
        if not step.outcome.graded:
            continue
        history = trajectory.transitions[:position]
        selected = select(training_replies(trajectory, position), step.state.text, step.action)
        reasoning = explain(step, selected, history) if plain else annotation.notes[position].reasoning
        asked = (step.action, retrieved)
        example = Example(
            prompt=black_box_prompt(
                trajectory.task, selected, history, step.state.text, *asked, settings=settings
            ),
            reply=reply_text(Note(reasoning=reasoning), step.outcome, reasoning=settings.reasoning),
            trajectory_id=trajectory.id,
            position=position,
        )
        yield example
        if Random(derive_seed("bare", trajectory.id, position)).random() >= _BARE:
            continue
        where = (trajectory.start if action_kind(step.action) in persistent else step.state).text
        known = [
            fact
            for fact in recorded_replies(trajectory.sheet or WorldSheet(facts=()))
            if fact[2] != step.action
        ]
        selected = select(known, where, step.action)
        reasoning = explain(step, selected, ()) if plain else reasoning
        yield replace(
            example,
            prompt=black_box_prompt(trajectory.task, selected, (), where, *asked, settings=settings),
            reply=reply_text(Note(reasoning=reasoning), step.outcome, reasoning=settings.reasoning),
        )
