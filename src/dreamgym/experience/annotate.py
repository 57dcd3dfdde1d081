"""Lets any language model explain recorded trajectories, for the experience model to learn from.

The annotator is shown the instruction, the steps and whether they succeeded, and answers in strict JSON: the
paper's tutorial, and one plan per transition. A reply that does not fit is sent back once with what is wrong
with it, then asked for anew with another seed; after that the trajectory is a typed, counted failure. How an
episode ended is for the annotator alone: nothing here reaches the experience model but the notes.
"""

from __future__ import annotations

import asyncio
import hashlib
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from importlib.resources import files
from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, StringConstraints, ValidationError

from dreamgym.errors import EpisodeFailedError
from dreamgym.experience.annotation_store import AnnotationStore
from dreamgym.protocols import Annotator, LanguageModel
from dreamgym.structured import extract_json
from dreamgym.types import (
    Annotation,
    Change,
    CompletionRequest,
    Fact,
    FailureKind,
    JsonValue,
    Note,
    Trajectory,
    Transition,
)

_LONGEST = 200_000
"""Characters of a reply; more is refused unread."""
_SLOT = re.compile(r"\{\{(\w+)\}\}")

_Sentence = Annotated[str, StringConstraints(strip_whitespace=True, min_length=1, max_length=2000)]


def _writable(fact: list[str]) -> list[str]:
    """A fact that the reply form of the experience model can write, and read back as the same."""
    predicate, *arguments = fact
    if not re.fullmatch(r"[^\s,;]+", predicate):
        raise ValueError("expected a predicate without spaces, commas and semicolons")
    if any(not word.strip() or word != word.strip() or re.search(r"[,;\r\n]", word) for word in arguments):
        raise ValueError("expected arguments without commas, semicolons and line breaks")
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


class _MisfitError(Exception):
    """A reply that is not what was asked for; says why, in words a language model can act on."""


@dataclass(slots=True, kw_only=True)
class Cost:
    """What was asked of a language model. Tokens are counted where the model tells them."""

    requests: int = 0
    prompt_characters: int = 0
    reply_characters: int = 0
    prompt_tokens: int = 0
    reply_tokens: int = 0

    def since(self, before: Cost) -> Cost:
        return Cost(**{name: getattr(self, name) - getattr(before, name) for name in Cost.__slots__})


class LanguageModelAnnotator:
    """An annotator over any language model."""

    def __init__(
        self,
        model: LanguageModel,
        *,
        name: str,
        chunk: int = 12,
        retries: int = 1,
        text_limit: int = 1500,
        max_tokens: int = 4096,
    ) -> None:
        """
        Args:
            chunk: steps explained in one request; longer trajectories take several, in order.
            retries: how often a chunk is asked for anew after the repair failed too.
            text_limit: characters of any one state that the annotator is shown.
        """
        self.name = name
        self.cost = Cost()
        self._model = model
        self._chunk = chunk
        self._retries = retries
        self._text_limit = text_limit
        self._max_tokens = max_tokens

    async def annotate(self, trajectory: Trajectory) -> Annotation:
        """
        Raises:
            EpisodeFailedError: no readable reply came (`PARSE_ERROR`).
        """
        tutorial: _Tutorial | None = None
        notes: list[Note] = []
        for first in range(0, max(len(trajectory), 1), self._chunk):
            steps = trajectory.transitions[first : first + self._chunk]
            question = self._question(trajectory, first, steps, tutorial)
            explanation = await self._explained(question, trajectory.id, first + 1, len(steps))
            tutorial = explanation.tutorial  # the last one has seen the whole trajectory
            notes += [
                Note(reasoning=step.plan, change=_change(step.changes)) for step in explanation.transitions
            ]
        assert tutorial is not None
        return Annotation(
            plan=tutorial.plan,
            success_mode=tutorial.success_mode,
            failure_mode=tutorial.failure_mode,
            notes=tuple(notes),
        )

    async def _explained(self, question: str, trajectory_id: str, first: int, count: int) -> _Explanation:
        asked = question
        schema = _schema(first, count)
        for attempt in range(2 + self._retries):
            reply = await self._ask(asked, attempt, schema)
            try:
                return _parse(reply, first, count)
            except _MisfitError as misfit:
                problem = str(misfit)
            asked = question
            if attempt == 0:
                asked = _filled(
                    "annotate-repair.md", question=question, reply=_sound(reply)[:_LONGEST], problem=problem
                )
        raise EpisodeFailedError(
            FailureKind.PARSE_ERROR,
            f"{self.name}, trajectory {trajectory_id!r}, {2 + self._retries} attempts: {problem}",
        )

    async def _ask(self, prompt: str, attempt: int, schema: dict[str, JsonValue]) -> str:
        """Greedy at first and for the repair; a new try must be able to differ, the same way every time."""
        seed = int.from_bytes(hashlib.sha256(f"{attempt}\0{prompt}".encode()).digest()[:4])
        completion = await self._model.complete(
            CompletionRequest(
                prompt=prompt,
                max_tokens=self._max_tokens,
                temperature=0.0 if attempt < 2 else 0.7,
                seed=seed,
                schema=schema,
            )
        )
        cost = self.cost
        cost.requests += 1
        cost.prompt_characters += len(prompt)
        cost.reply_characters += len(completion.text)
        cost.prompt_tokens += len(completion.prompt_token_ids)
        cost.reply_tokens += len(completion.token_ids)
        return completion.text

    def _question(
        self, trajectory: Trajectory, first: int, steps: tuple[Transition, ...], tutorial: _Tutorial | None
    ) -> str:
        before = "This is the beginning of the episode."
        if tutorial is not None:
            done = (f"{n}. {past.action[:500]}" for n, past in enumerate(trajectory.transitions[:first], 1))
            before = "\n".join(["Actions so far:", *done, "", f"Your plan so far: {tutorial.plan}"])
        return _filled(
            "annotate.md",
            environment=trajectory.task.environment,
            instruction=trajectory.task.instruction,
            success="yes" if trajectory.success else "no",
            before=before,
            trajectory="\n\n".join(self._told(trajectory, first, steps)),
            count=str(len(steps)),
            first=str(first + 1),
            last=str(first + len(steps)),
        )

    def _told(self, trajectory: Trajectory, first: int, steps: tuple[Transition, ...]) -> Iterator[str]:
        state = steps[0].state if steps else trajectory.start
        yield f"State before step {first + 1}:\n{state.text[: self._text_limit]}"
        for number, step in enumerate(steps, first + 1):
            end = " (the episode ends here)" if step.outcome.terminated else ""
            seen = step.outcome.next_state.text[: self._text_limit]
            yield f"Step {number}, action: {step.action[:500]}\nNext state{end}:\n{seen}"


@dataclass(slots=True, kw_only=True)
class AnnotateReport:
    """What a run of annotation did, apart from what was there before."""

    already_there: int = 0
    annotated: int = 0
    failures: Counter[str] = field(default_factory=Counter)
    cost: Cost = field(default_factory=Cost)


OnProgress = Callable[[AnnotateReport], None]


async def annotate_all(
    trajectories: Iterable[Trajectory],
    annotator: Annotator,
    folder: Path,
    *,
    concurrency: int = 8,
    on_progress: OnProgress | None = None,
) -> AnnotateReport:
    """Annotate whatever `folder` does not hold yet from this annotator; run it again to go on after a stop.

    A trajectory that the annotator failed on is counted by kind and left out; the next run tries it again.

    Raises:
        StoreError: the folder cannot be written, or another process is writing there.
        DataError: a row in it is damaged.
    """
    report = AnnotateReport()
    spent = annotator.cost if isinstance(annotator, LanguageModelAnnotator) else Cost()
    before = replace(spent)
    places, writing = asyncio.Semaphore(concurrency), asyncio.Lock()
    seen: set[str] = set()

    def tell() -> None:
        report.cost = spent.since(before)
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
            places.release()
        tell()

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
                    await places.acquire()
                    group.create_task(explain(trajectory))
        except ExceptionGroup as several:
            raise several.exceptions[0] from None  # the others were cancelled because of the first
    tell()
    return report


def _schema(first: int, count: int) -> dict[str, JsonValue]:
    """Of an explanation of so many steps, each with its number."""
    schema = _Explanation.model_json_schema()
    step = schema["$defs"]["_Step"]
    numbered = [
        step | {"properties": step["properties"] | {"step": {"type": "integer", "enum": [number]}}}
        for number in range(first, first + count)
    ]
    exactly = {"prefixItems": numbered, "minItems": count, "maxItems": count}
    schema["properties"]["transitions"] |= exactly
    return schema


def _parse(text: str, first: int, count: int) -> _Explanation:
    if len(text) > _LONGEST:
        raise _MisfitError(f"expected at most {_LONGEST} characters, got {len(text)}")
    try:
        explanation = _Explanation.model_validate_json(extract_json(text))
    except ValidationError as error:
        problems = error.errors(include_url=False, include_context=False, include_input=False)[:5]
        told = (f"{'.'.join(map(str, p['loc'])) or 'reply'}: {p['msg']}" for p in problems)
        raise _MisfitError(_sound("; ".join(told))) from None
    except UnicodeError:
        raise _MisfitError("expected text, got characters that are none") from None
    numbers = [step.step for step in explanation.transitions]
    if numbers != list(range(first, first + count)):
        raise _MisfitError(
            f"expected {count} transitions, for steps {first} to {first + count - 1} in order, "
            f"got {len(numbers)}, for steps {numbers[:50]}"
        )
    return explanation


def _change(changes: _Changes) -> Change:
    def facts(listed: list[list[str]]) -> tuple[Fact, ...]:
        return tuple(tuple(fact) for fact in listed)

    return Change(ended=facts(changes.ended), begun=facts(changes.begun))


def _filled(name: str, **slots: str) -> str:
    """A prompt with its slots filled, in one pass: what fills a slot can open no other."""
    text = files("dreamgym.experience").joinpath("prompts", name).read_text(encoding="utf-8")
    return _SLOT.sub(lambda found: slots[found[1]], text)


def _sound(text: str) -> str:
    """The text without half characters (lone surrogates), which no encoder takes."""
    return text.encode("utf-8", "replace").decode("utf-8")
