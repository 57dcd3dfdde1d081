"""From annotated trajectories to training examples (the paper's Eq. 5): a prompt as at prediction time and
the reply to learn. Demonstrations never come from the same task, which would contain the answer."""

from __future__ import annotations

import hashlib
import itertools
import math
import re
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import TypeAlias

from dreamgym.experience.reply_format import (
    PromptSettings,
    is_name,
    prompt,
    refer_state,
    reply_text,
    start_prompt,
    start_text,
    variation_prompt,
    variation_text,
)
from dreamgym.experience.world_sheet import layout_of
from dreamgym.protocols import Annotator, Retriever
from dreamgym.types import Annotation, Demonstration, Fact, RetrievalFilter, State, Trajectory, WorldSheet

_SEARCH_BATCH = 16
"""Trajectories whose demonstrations are retrieved in one search."""
START, VARIATION = -1, -2


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """A prompt and the reply to learn."""

    prompt: str
    reply: str
    trajectory_id: str
    position: int
    """Of its transition; START for a first state, VARIATION for a task variation."""


MakeExamples: TypeAlias = Callable[
    [Trajectory, Annotation, PromptSettings, Iterator[Sequence[Demonstration]]], Iterator["Example"]
]
"""Makes the examples of one trajectory, given the demonstrations of each of its transitions."""


async def examples(
    trajectories: Iterable[Trajectory],
    annotator: Annotator,
    *,
    settings: PromptSettings,
    retriever: Retriever | None = None,
    make: MakeExamples | None = None,
) -> AsyncIterator[Example]:
    """The examples of these trajectories, in order; `make` replaces the prompts with world sheets."""
    make = make or _examples_of
    for group in _groups(trajectories):
        demonstrations = await _demonstrations(group, settings, retriever)
        for trajectory in group:
            annotation = await annotator.annotate(trajectory)
            for example in make(trajectory, annotation, settings, demonstrations):
                yield example


def variations(trajectories: Sequence[Trajectory], *, seed: int = 0) -> Iterator[Example]:
    """Examples for the task generator, which shares these weights (Eq. 6): other tasks of the same room."""
    rooms: dict[frozenset[Fact], dict[str, Trajectory]] = {}
    for trajectory in trajectories:
        if trajectory.sheet is not None:
            known = rooms.setdefault(layout_of(trajectory.sheet), {})
            known.setdefault(trajectory.task.instruction, trajectory)
    rng = Random(seed)
    for known in rooms.values():
        for instruction, trajectory in known.items():
            others = [other for other in known if other != instruction]
            if others and trajectory.sheet is not None:
                yield Example(
                    prompt=variation_prompt(instruction, trajectory.sheet),
                    reply=variation_text(rng.choice(others)),
                    trajectory_id=trajectory.id,
                    position=VARIATION,
                )


def limit_repeats(found: Iterable[Example], *, characters: int = 500_000) -> Iterator[Example]:
    """At most this many characters of each distinct reply: a long help text in every other episode would
    take much of the training after it has been learnt."""
    seen: Counter[str] = Counter()
    for example in found:
        if seen[example.reply] * len(example.reply) < characters:
            yield example
        seen[example.reply] += 1


def oversample(found: Iterable[Example], *, most: int = 4) -> list[Example]:
    """Oversample rare kinds of reply by the square root of their rarity. Recorded actions mostly succeed;
    a model that has seen few failures predicts success too often, and a policy exploits that."""
    known = list(found)
    counts = Counter(_kind(example) for example in known)
    largest = max(counts.values(), default=0)
    return [
        example
        for example in known
        for _ in range(min(most, int(math.sqrt(largest / counts[_kind(example)]))))
    ]


def _kind(example: Example) -> tuple[str | int, ...]:
    """
    >>> _kind(Example(
    ...     prompt="state: You see a desk 1.\\naction: open desk 1\\n",
    ...     reply="think: desk 1 is here. it has no door.\\nchange:\\nnext: Nothing happens.\\nend: no",
    ...     trajectory_id="1",
    ...     position=0,
    ... ))
    ('open', 2, 'Nothing happens.', 'no')
    """
    if example.position < 0:
        return (example.position,)
    action = example.prompt.rpartition("action: ")[2].split()
    parts = dict(line.partition(": ")[::2] for line in example.reply.split("\n"))
    reasons = len(re.findall(r"[.;:](?: |$)", parts.get("think", "")))
    first_words = " ".join(parts.get("next", "").split()[:2])
    return (action[0] if action else "", reasons, first_words, parts.get("end", ""))


def held_out(task_id: str, share: float) -> bool:
    """Whether a task is held out for validation; it depends only on its id, so all runs agree.

    >>> sum(held_out(f"task {number}", 0.1) for number in range(1000))
    94
    """
    digest = hashlib.sha256(task_id.encode()).digest()
    return int.from_bytes(digest[:8]) / 2**64 < share


def _examples_of(
    trajectory: Trajectory,
    annotation: Annotation,
    settings: PromptSettings,
    demonstrations: Iterator[Sequence[Demonstration]],
) -> Iterator[Example]:
    if len(annotation.notes) != len(trajectory):
        raise ValueError(
            f"expected {len(trajectory)} notes for trajectory {trajectory.id!r}, got {len(annotation.notes)}"
        )
    sheet = trajectory.sheet or WorldSheet(facts=())
    yield Example(
        prompt=start_prompt(trajectory.task, sheet, settings),
        reply=start_text(refer_state(trajectory.start.text, trajectory.task, sheet, settings)),
        trajectory_id=trajectory.id,
        position=START,
    )
    for position, (transition, note) in enumerate(zip(trajectory.transitions, annotation.notes, strict=True)):
        retrieved = next(demonstrations)
        before, sheet = sheet, sheet.after(note.change)
        if not transition.outcome.graded:  # a reply would state an end that the record does not
            continue
        reply = refer_state(transition.outcome.next_state.text, trajectory.task, sheet, settings)
        if settings.sheet and settings.state_texts is not None and not is_name(reply):
            continue  # a state that the facts do not have
        outcome = replace(transition.outcome, next_state=State(text=reply))
        yield Example(
            prompt=prompt(
                trajectory.task,
                before,
                trajectory.transitions[:position],
                transition.state.text,
                transition.action,
                retrieved,
                settings=settings,
            ),
            reply=reply_text(note, outcome, reasoning=settings.reasoning),
            trajectory_id=trajectory.id,
            position=position,
        )


async def _demonstrations(
    group: Sequence[Trajectory], settings: PromptSettings, retriever: Retriever | None
) -> Iterator[Sequence[Demonstration]]:
    if retriever is None or not settings.demonstrations:
        return itertools.repeat(())
    steps = [(each.task, transition) for each in group for transition in each.transitions]
    queries = [(transition.state.text, transition.action) for _, transition in steps]
    wanted = [RetrievalFilter(environment=task.environment, exclude_task=task.id) for task, _ in steps]
    return iter(await retriever.search(queries, k=settings.demonstrations, filters=wanted))


def _groups(trajectories: Iterable[Trajectory]) -> Iterator[list[Trajectory]]:
    found = iter(trajectories)
    while group := list(itertools.islice(found, _SEARCH_BATCH)):
        yield group
