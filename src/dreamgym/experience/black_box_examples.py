"""Training examples of an experience model that knows its environment by recorded replies alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from random import Random

from dreamgym.experience.black_box import BlackBoxKnowledge, black_box_prompt
from dreamgym.experience.dataset import START, Example
from dreamgym.experience.known_replies import (
    explain,
    newest_counts,
    recorded_replies,
    references,
    select,
    training_replies,
)
from dreamgym.experience.near_misses import is_near_miss
from dreamgym.experience.recorded_patterns import action_kind
from dreamgym.experience.reply_format import PromptSettings, refer, reply_text, start_prompt, start_text
from dreamgym.seeding import derive_seed
from dreamgym.types import Annotation, Demonstration, Note, State, Trajectory, WorldSheet

_BARE = 0.2
"""Share of the transitions that are also learnt without history, as imagined replies are."""
_UNREASONED = 0.3
"""Share of the examples without their reasoning, so that held-out recordings can tell whether it helps."""


def black_box_examples(
    trajectory: Trajectory,
    annotation: Annotation,
    settings: PromptSettings,
    demonstrations: Iterator[Sequence[Demonstration]],
    *,
    knowledge: BlackBoxKnowledge,
    plain: bool,
) -> Iterator[Example]:
    """The examples of one trajectory, whose sheet holds the replies of the other recordings of its task.
    With `plain`, the reasoning is the cause that can be seen instead of the annotation's."""
    last = len(trajectory) - 1 if is_near_miss(trajectory) else 0
    if not last:
        yield Example(
            prompt=start_prompt(trajectory.task, WorldSheet(facts=()), settings),
            reply=start_text(trajectory.start.text),
            trajectory_id=trajectory.id,
            position=START,
        )
    for position, step in enumerate(trajectory.transitions):
        retrieved = next(demonstrations)
        if not step.outcome.graded or position < last:
            continue
        note = None if plain else annotation.notes[position]
        bare = Random(derive_seed("bare", trajectory.id, position)).random() < _BARE
        for without_history in (False, True)[: 1 + bare]:
            yield _example(trajectory, position, note, retrieved, settings, knowledge, without_history)


def _example(
    trajectory: Trajectory,
    position: int,
    note: Note | None,
    demonstrations: Sequence[Demonstration],
    settings: PromptSettings,
    knowledge: BlackBoxKnowledge,
    without_history: bool,
) -> Example:
    step = trajectory.transitions[position]
    _, history, state = knowledge.context(trajectory.transitions[:position], step.state.text)
    step = replace(step, state=replace(step.state, text=state))
    known = training_replies(trajectory, position, knowledge.inert, knowledge.certain)
    if without_history:  # as an imagined reply is asked for
        history = []
        state = trajectory.start.text if action_kind(step.action) in knowledge.persistent else state
        recorded = recorded_replies(trajectory.sheet or WorldSheet(facts=()))
        known = [fact for fact in recorded if fact[2] != step.action]
    counts = newest_counts(knowledge.counters, history, state)
    selected = replace(select(known, state, step.action, knowledge.counters), counts=counts)
    named = references(selected, state, demonstrations[: settings.demonstrations])
    text = refer(step.outcome.next_state.text, named)
    unreasoned = Random(derive_seed("unreasoned", trajectory.id, position)).random() < _UNREASONED
    return Example(
        prompt=black_box_prompt(
            *(trajectory.task, selected, history, state, step.action, demonstrations),
            settings=settings,
            start=knowledge.start(trajectory.start.text),
        ),
        reply=reply_text(
            note or Note(reasoning=explain(step, selected, named)),
            replace(step.outcome, next_state=State(text=text)),
            reasoning=settings.reasoning and not unreasoned,
        ),
        trajectory_id=trajectory.id,
        position=position,
    )
