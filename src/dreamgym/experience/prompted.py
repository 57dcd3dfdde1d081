"""The prompted experience model: any language model plays the environment, without being taught to.

It is asked with the task, the facts that the action touches, history and demonstrations (the paper's Eq. 4),
in one of the forms of `forms`. The first question is greedy; a reply that cannot be read, or contradicts what
it was told, is sent back once with what is wrong with it, then asked for anew with another seed; after that
it is a typed failure, which costs one episode. The same question always gets the same seeds.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from dreamgym.errors import ConfigError, EpisodeFailedError
from dreamgym.experience.postprocess import Told, conclude, demonstrations
from dreamgym.experience.prompt_formats import Form, Question, Situation, filled
from dreamgym.experience.rewards import ModelVerdict
from dreamgym.protocols import Grader, LanguageModel, Retriever
from dreamgym.types import (
    Completion,
    CompletionRequest,
    FailureKind,
    Prediction,
    State,
    Task,
    Transition,
    WorldSheet,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptedSettings:
    """What is asked with, and how often."""

    history: int = 20
    """The newest transitions of the episode that are told."""
    demonstrations: int = 8
    sheet: bool = True
    text_limit: int = 2_000
    """Characters of any one state."""
    max_tokens: int = 2_048
    """Of a reply, thoughts included."""
    attempts: int = 3
    characters: int | None = None
    """Of a whole question; demonstrations, least similar first, then the oldest history make room."""


class PromptedExperienceModel:
    """Implements `ExperienceModel` over any language model."""

    def __init__(
        self,
        model: LanguageModel,
        *,
        name: str,
        form: Form,
        settings: PromptedSettings | None = None,
        grader: Grader | None = None,
        retriever: Retriever | None = None,
        refusals: Collection[str] = (),
        starts: Mapping[str, State] | None = None,
    ) -> None:
        """
        Args:
            grader: by default the model's own word, where the form has one.
            retriever: where demonstrations come from; without it none are shown.
            starts: first states by the ids of their tasks, where they are known; others are imagined.

        Raises:
            ConfigError: the form tells nothing of success, and no other grader is given.
        """
        if grader is None and not form.tells_success:
            raise ConfigError(
                f"{name}: this form of reply tells states alone; name a grader, a language model or the "
                "sheet (--reward or train.reward)"
            )
        self.name = name
        self._model = model
        self._form = form
        self._settings = settings or PromptedSettings()
        self._grader = grader or ModelVerdict()
        self._retriever = retriever
        self._refusals = frozenset(refusals)
        self._starts = starts or {}

    async def imagine_start(self, task: Task, sheet: WorldSheet) -> State:
        """
        Raises:
            EpisodeFailedError: no readable reply, or (`INVALID_TASK`) the form imagines no first states.
        """
        if task.id in self._starts:
            return self._starts[task.id]
        question = self._form.start_question(task, sheet)
        if question is None:
            raise EpisodeFailedError(
                FailureKind.INVALID_TASK,
                f"{self.name}: task {task.id!r} has no known first state, and this form imagines none",
            )
        for attempt in range(self._settings.attempts):
            reply = await self._ask(question, attempt)
            try:
                return State(text=self._form.read_start(reply.text))
            except EpisodeFailedError as error:
                problem = self._cut_off(error, reply)
        raise self._given_up(problem)

    async def predict(
        self, task: Task, sheet: WorldSheet, history: Sequence[Transition], state: State, action: str
    ) -> Prediction:
        """
        Raises:
            EpisodeFailedError: what went wrong, by kind.
        """
        settings = self._settings
        shown = await demonstrations(
            *(self._retriever, task, state, action),
            k=settings.demonstrations,
        )
        situation = Situation(
            task=task,
            sheet=sheet if settings.sheet else None,
            history=tuple(history[-settings.history :]) if settings.history else (),
            state=state.text,
            action=action,
            demonstrations=tuple(shown),
            limit=settings.text_limit,
        )
        question, fitting = self._fitted(situation)
        told = await self._told(question, sheet)
        return await conclude(
            *(told, task, sheet, state, action),
            grader=self._grader,
            refusals=self._refusals,
            shown=fitting.demonstrations,
        )

    def _fitted(self, situation: Situation) -> tuple[Question, Situation]:
        most = self._settings.characters
        question = self._form.question(situation)
        while most is not None and len(question) > most:
            if situation.demonstrations:
                situation = replace(situation, demonstrations=situation.demonstrations[:-1])
            elif situation.history:
                situation = replace(situation, history=situation.history[1:])
            else:
                raise EpisodeFailedError(
                    FailureKind.BUDGET,
                    f"{self.name}: the question alone has {len(question)} characters, and {most} fit what "
                    "the model reads; raise the endpoint's context, or lower prompted.text_limit",
                )
            question = self._form.question(situation)
        return question, situation

    async def _told(self, question: Question, sheet: WorldSheet) -> Told:
        asked = question
        for attempt in range(self._settings.attempts):
            reply = await self._ask(asked, attempt)
            try:
                told = self._form.read(reply.text)
                _check_known(told, sheet, self._settings.sheet)
                return told
            except EpisodeFailedError as error:
                problem = self._cut_off(error, reply)
            asked = question
            if attempt == 0 and question.schema is not None:
                repair = filled(
                    "dream-repair.md",
                    question=question.prompt,
                    reply=_sound(reply.text)[: self._settings.text_limit],
                    problem=str(problem),
                )
                asked = replace(question, prompt=repair)
        raise self._given_up(problem)

    async def _ask(self, question: Question, attempt: int) -> Completion:
        """Greedy at first and for the repair; a new try must be able to differ, the same way every time."""
        seed = int.from_bytes(
            hashlib.sha256(f"{attempt}\0{question.prompt}".encode(errors="replace")).digest()[:4]
        )
        return await self._model.complete(
            CompletionRequest(
                prompt=question.prompt,
                system=question.system,
                turns=question.turns,
                schema=question.schema,
                max_tokens=self._settings.max_tokens,
                temperature=0.0 if attempt < 2 else 0.7,
                seed=seed,
            )
        )

    def _cut_off(self, problem: EpisodeFailedError, reply: Completion) -> EpisodeFailedError:
        """The same problem, with its cause where the reply was not finished."""
        if reply.finish_reason != "length":
            return problem
        limit = self._settings.max_tokens
        return EpisodeFailedError(
            problem.kind, f"the reply was cut off at prompted.max_tokens={limit}: {problem}"
        )

    def _given_up(self, problem: EpisodeFailedError) -> EpisodeFailedError:
        attempts = self._settings.attempts
        return EpisodeFailedError(problem.kind, f"{self.name}, {attempts} attempts: {problem}")


def _check_known(told: Told, sheet: WorldSheet, shown: bool) -> None:
    """
    Raises:
        EpisodeFailedError: `CONTRADICTION`: it ends what is not so.
    """
    if not shown or not sheet.facts:  # where nothing is known, ending something does nothing
        return
    unknown = [fact for fact in told.change.ended if fact not in sheet.facts]
    if unknown:
        raise EpisodeFailedError(
            FailureKind.CONTRADICTION, f"ended holds {list(unknown[0])}, which is none of the facts given"
        )


def _sound(text: str) -> str:
    """The text without half characters (lone surrogates), which no encoder takes."""
    return text.encode("utf-8", "replace").decode("utf-8")
