"""The prompted experience model: any language model predicts the environment (the paper's Eq. 4), without
fine-tuning. A reply that does not parse, or contradicts the facts, is repaired or sampled again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from dreamgym.config import PromptedConfig
from dreamgym.errors import ConfigError, EpisodeFailedError
from dreamgym.experience.model import ModelVerdict, make_prediction, retrieve
from dreamgym.experience.prompt_formats import PromptContext, PromptFormat
from dreamgym.experience.recorded_rules import RecordedRules
from dreamgym.experience.reply_format import ParsedReply
from dreamgym.protocols import Grader, LanguageModel, Retriever
from dreamgym.structured import ask_structured
from dreamgym.types import (
    Change,
    Completion,
    CompletionRequest,
    FailureKind,
    Prediction,
    State,
    Task,
    Transition,
    WorldSheet,
)


class PromptedExperienceModel:
    """Implements `ExperienceModel` over any language model."""

    def __init__(
        self,
        model: LanguageModel,
        *,
        name: str,
        format: PromptFormat,  # noqa: A002
        settings: PromptedConfig | None = None,
        k: int = 8,
        max_characters: int | None = None,
        grader: Grader | None = None,
        retriever: Retriever | None = None,
        refusals: Sequence[str] = (),
        rules: RecordedRules | None = None,
        starts: Mapping[str, State] | None = None,
    ) -> None:
        """A prompt longer than `max_characters` loses the least similar demonstrations, then the oldest
        history. First states that `starts` lacks are imagined."""
        if grader is None and not format.reports_success:
            raise ConfigError(
                f"{name}: this format predicts only states; name a grader, a language model or the "
                "sheet (--reward or train.reward)"
            )
        self.name = name
        self._model = model
        self._format = format
        self._settings = settings or PromptedConfig()
        self._k = k
        self._max_characters = max_characters
        self._grader = grader or ModelVerdict()
        self._retriever = retriever
        self._refusals = tuple(refusals)
        self._rules = rules
        self._starts = starts or {}

    async def imagine_start(self, task: Task, sheet: WorldSheet) -> State:
        if task.id in self._starts:
            return self._starts[task.id]
        request = self._format.start_request(task, sheet)
        if request is None:
            raise EpisodeFailedError(
                FailureKind.INVALID_TASK,
                f"{self.name}: the first state of task {task.id!r} is unknown, and this format imagines none",
            )
        return await ask_structured(
            self._model,
            replace(request, max_tokens=self._settings.max_tokens),
            lambda completion: State(text=self._format.parse_start(completion.text)),
            name=self.name,
            attempts=self._settings.attempts,
        )

    async def predict(
        self, task: Task, sheet: WorldSheet, history: Sequence[Transition], state: State, action: str
    ) -> Prediction:
        settings = self._settings
        context = PromptContext(
            task=task,
            sheet=sheet if settings.sheet else None,
            history=tuple(history[-settings.history :]) if settings.history else (),
            state=state.text,
            action=action,
            demonstrations=tuple(await retrieve(self._retriever, task, state, action, k=self._k)),
            text_limit=settings.text_limit,
        )
        request, context = self._fit(context)

        def parse(completion: Completion) -> ParsedReply:
            reply = self._format.parse(completion.text)
            _check_facts(reply, context.sheet)
            # Where no facts are known, none can be checked.
            return reply if sheet.facts else replace(reply, change=Change())

        reply = await ask_structured(
            self._model,
            replace(request, max_tokens=settings.max_tokens),
            parse,
            name=self.name,
            attempts=settings.attempts,
            repair=request.schema is not None,
        )
        return await make_prediction(
            *(reply, task, sheet, state, action),
            grader=self._grader,
            refusals=self._refusals,
            demonstrations=context.demonstrations,
            history=history,
            rules=self._rules,
        )

    def _fit(self, context: PromptContext) -> tuple[CompletionRequest, PromptContext]:
        """The request, with demonstrations and history left out until it fits."""
        limit = self._max_characters
        request = self._format.request(context)
        while limit is not None and _length(request) > limit:
            if context.demonstrations:
                context = replace(context, demonstrations=context.demonstrations[:-1])
            elif context.history:
                context = replace(context, history=context.history[1:])
            else:
                raise EpisodeFailedError(
                    FailureKind.BUDGET,
                    f"{self.name}: the prompt has {_length(request)} characters without demonstrations and "
                    f"history, {limit} fit; raise the endpoint's context, or lower prompted.text_limit",
                )
            request = self._format.request(context)
        return request, context


def _length(request: CompletionRequest) -> int:
    return len(request.system) + len(request.prompt) + sum(len(a) + len(b) for a, b in request.turns)


def _check_facts(reply: ParsedReply, sheet: WorldSheet | None) -> None:
    if sheet is None or not sheet.facts:  # without facts, ending one does nothing
        return
    unknown = [fact for fact in reply.change.ended if fact not in sheet.facts]
    if unknown:
        raise EpisodeFailedError(
            FailureKind.CONTRADICTION, f"ended holds {list(unknown[0])}, which is none of the facts given"
        )
