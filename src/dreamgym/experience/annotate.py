"""Annotators: they explain recorded trajectories, as targets for fine-tuning an experience model. Only the
plans of the transitions reach it, so how an episode ended does not."""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, StringConstraints

from dreamgym.errors import EpisodeFailedError
from dreamgym.experience.annotation_store import AnnotationStore
from dreamgym.experience.known_replies import holds_replies
from dreamgym.experience.reply_format import has_plain_number
from dreamgym.experience.world_sheet import changed_in
from dreamgym.protocols import Annotator, LanguageModel
from dreamgym.structured import (
    RequestCounts,
    ask_structured,
    fill_template,
    one_line,
    parse_error,
    parse_json,
)
from dreamgym.types import (
    Annotation,
    Change,
    CompletionRequest,
    Fact,
    JsonValue,
    Note,
    Trajectory,
    Transition,
)

_MAX_ACTION = 500
_MAX_PLAIN_NOTE = 200
_Sentence = Annotated[str, StringConstraints(strip_whitespace=True, min_length=1, max_length=2000)]


def _writable(fact: list[str]) -> list[str]:
    """A fact that `reply_format` can write and parse back."""
    predicate, *arguments = fact
    if not re.fullmatch(r"[^\s,;]+", predicate):
        raise ValueError("expected a predicate without spaces, commas and semicolons")
    if any(not word or word != one_line(word) or re.search(r"[,;]", word) for word in arguments):
        raise ValueError("expected arguments without commas, semicolons and line breaks")
    if not all(map(has_plain_number, arguments)):
        raise ValueError("expected numbers of at most 9 digits")
    return fact


_Fact = Annotated[list[str], Field(min_length=1, max_length=8), AfterValidator(_writable)]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class _Tutorial(_Strict):
    plan: _Sentence
    success_mode: _Sentence
    failure_mode: _Sentence


class _Changes(_Strict):
    ended: list[_Fact] = Field(default_factory=list)
    begun: list[_Fact] = Field(default_factory=list)


class _Step(_Strict):
    step: int
    plan: _Sentence
    changes: _Changes = Field(default_factory=_Changes)


class _Explanation(_Strict):
    tutorial: _Tutorial
    transitions: list[_Step]


class LanguageModelAnnotator:
    """An `Annotator` over any language model."""

    def __init__(
        self,
        model: LanguageModel,
        *,
        name: str,
        chunk: int = 12,
        attempts: int = 3,
        text_limit: int = 1500,
        max_tokens: int = 4096,
    ) -> None:
        """A request holds `chunk` steps, with `text_limit` characters of each state."""
        self.name = name
        self.counts = RequestCounts()
        self._model = model
        self._chunk = chunk
        self._attempts = attempts
        self._text_limit = text_limit
        self._max_tokens = max_tokens

    async def annotate(self, trajectory: Trajectory) -> Annotation:
        tutorial: _Tutorial | None = None
        notes: list[Note] = []
        for first in range(0, max(len(trajectory), 1), self._chunk):
            steps = trajectory.transitions[first : first + self._chunk]
            prompt = self._prompt(trajectory, first, steps, tutorial)
            reply = await self._ask(prompt, trajectory.id, first, steps)
            tutorial = reply.tutorial  # the last one has seen the whole trajectory
            notes += [Note(reasoning=step.plan, change=_change(step.changes)) for step in reply.transitions]
        assert tutorial is not None
        return Annotation(
            plan=tutorial.plan,
            success_mode=tutorial.success_mode,
            failure_mode=tutorial.failure_mode,
            notes=tuple(notes),
        )

    async def _ask(
        self, prompt: str, trajectory_id: str, first: int, steps: Sequence[Transition]
    ) -> _Explanation:
        numbers = range(first + 1, first + 1 + len(steps))
        return await ask_structured(
            self._model,
            CompletionRequest(prompt=prompt, max_tokens=self._max_tokens, schema=_schema(numbers)),
            lambda completion: _parse(completion.text, numbers),
            name=f"{self.name}, trajectory {trajectory_id!r}",
            attempts=self._attempts,
            repair=True,
            counts=self.counts,
        )

    def _prompt(
        self, trajectory: Trajectory, first: int, steps: Sequence[Transition], tutorial: _Tutorial | None
    ) -> str:
        before = "This is the beginning of the episode."
        if tutorial is not None:
            done = (
                f"{number}. {one_line(past.action)[:_MAX_ACTION]}"
                for number, past in enumerate(trajectory.transitions[:first], 1)
            )
            before = "\n".join(["Actions so far:", *done, "", f"Your plan so far: {tutorial.plan}"])
        return fill_template(
            __package__,
            "annotate.md",
            environment=trajectory.task.environment,
            instruction=trajectory.task.instruction,
            success="yes" if trajectory.success else "no" if trajectory.graded else "unknown",
            before=before,
            trajectory="\n\n".join(self._step_texts(trajectory, first, steps)),
            count=len(steps),
            first=first + 1,
            last=first + len(steps),
        )

    def _step_texts(self, trajectory: Trajectory, first: int, steps: Sequence[Transition]) -> Iterator[str]:
        state = steps[0].state if steps else trajectory.start
        yield f"State before step {first + 1}:\n{state.text[: self._text_limit]}"
        for number, step in enumerate(steps, first + 1):
            end = " (the episode ends here)" if step.outcome.terminated else ""
            seen = step.outcome.next_state.text[: self._text_limit]
            action = one_line(step.action)[:_MAX_ACTION]
            yield f"Step {number}, action: {action}\nNext state{end}:\n{seen}"


class PlainAnnotator:
    """States which lines of a state are new, without a language model; facts are those of `changed_in`."""

    name = "plain"

    async def annotate(self, trajectory: Trajectory) -> Annotation:
        # Known replies hold all that later states show: the phrases of household games are not read.
        read = not holds_replies(trajectory.sheet)
        return Annotation(
            plan=trajectory.task.instruction,
            success_mode="not explained",
            failure_mode="not explained",
            notes=tuple(
                Note(
                    reasoning=_new_lines(step),
                    change=changed_in(step.outcome.next_state) if read else Change(),
                )
                for step in trajectory.transitions
            ),
        )


def _new_lines(step: Transition) -> str:
    before, after = (
        [line.strip() for line in state.text.splitlines() if line.strip()]
        for state in (step.state, step.outcome.next_state)
    )
    new = [line for line in after if line not in before]
    if not new:
        return "nothing changes." if before == after else "less is to be seen."
    if len(new) == len(after):
        return "all that is to be seen is new."  # listing it would repeat the next state
    return f"new: {'; '.join(new)}"[:_MAX_PLAIN_NOTE]


@dataclass(slots=True, kw_only=True)
class AnnotateReport:
    """The result of one call of `annotate_all`."""

    already_there: int = 0
    """Annotations that the directory already had."""
    annotated: int = 0
    failures: Counter[str] = field(default_factory=Counter)
    counts: RequestCounts = field(default_factory=RequestCounts)


OnProgress = Callable[[AnnotateReport], None]


async def annotate_all(
    trajectories: Iterable[Trajectory],
    annotator: Annotator,
    folder: Path,
    *,
    concurrency: int = 8,
    on_progress: OnProgress | None = None,
) -> AnnotateReport:
    """Annotate what `folder` has no annotation of by this annotator. A trajectory that failed is counted
    by kind; the next call tries it again."""
    report = AnnotateReport()
    counts = annotator.counts if isinstance(annotator, LanguageModelAnnotator) else RequestCounts()
    before = replace(counts)
    slots, writing = asyncio.Semaphore(concurrency), asyncio.Lock()
    seen: set[str] = set()

    def notify() -> None:
        report.counts = counts.since(before)
        if on_progress is not None:
            on_progress(report)

    async def explain(trajectory: Trajectory) -> None:
        try:
            annotation = await annotator.annotate(trajectory)
        except EpisodeFailedError as error:
            report.failures[error.kind] += 1
        else:
            async with writing:
                await asyncio.to_thread(store.append, trajectory.id, annotator.name, annotation)
            report.annotated += 1
        finally:
            slots.release()
        notify()

    with AnnotationStore(folder) as store:
        try:
            async with asyncio.TaskGroup() as group:
                for trajectory in trajectories:
                    if trajectory.id in seen:
                        continue
                    seen.add(trajectory.id)
                    if store.holds(trajectory, annotator.name):
                        report.already_there += 1
                        continue
                    await slots.acquire()
                    group.create_task(explain(trajectory))
        except ExceptionGroup as several:
            raise several.exceptions[0] from None  # the others were cancelled because of the first
    notify()
    return report


def _schema(numbers: range) -> dict[str, JsonValue]:
    """Of an explanation with exactly these step numbers."""
    schema = _Explanation.model_json_schema()
    step = schema["$defs"]["_Step"]
    numbered = [
        step | {"properties": step["properties"] | {"step": {"type": "integer", "enum": [number]}}}
        for number in numbers
    ]
    exactly = {"prefixItems": numbered, "minItems": len(numbers), "maxItems": len(numbers)}
    schema["properties"]["transitions"] |= exactly
    return schema


def _parse(text: str, numbers: range) -> _Explanation:
    explanation = parse_json(_Explanation, text)
    found = [step.step for step in explanation.transitions]
    if found != list(numbers):
        raise parse_error(
            f"expected {len(numbers)} transitions, for steps {numbers.start} to {numbers.stop - 1} in order, "
            f"got {len(found)}, for steps {found[:50]}"
        )
    return explanation


def _change(changes: _Changes) -> Change:
    def facts(listed: list[list[str]]) -> tuple[Fact, ...]:
        return tuple(tuple(fact) for fact in listed)

    return Change(ended=facts(changes.ended), begun=facts(changes.begun))
