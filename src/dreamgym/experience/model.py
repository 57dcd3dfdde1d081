"""The reasoning experience model: a language model that plays the environment, one strict reply at a time.

It is asked with the task, the facts that the action touches, the newest history and the nearest
demonstrations, and answers with reasoning, what changes, the next state and whether the episode ends (the
paper's Eq. 4). Comparisons in its reasoning are checked, and it goes on from the right verdict. A reply that
does not parse is asked again with another seed; after the last attempt it is a typed failure, which costs one
episode. The same question always gets the same answer.
"""

from __future__ import annotations

import asyncio
import hashlib
import math
from collections.abc import Collection, Sequence

from dreamgym.errors import EpisodeFailedError
from dreamgym.experience.postprocess import Told, conclude, demonstrations
from dreamgym.experience.reasoning_checks import corrected, told_facts
from dreamgym.experience.reply_format import (
    PromptSettings,
    Reply,
    parse_reply,
    parse_start,
    prompt,
    start_prompt,
)
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

_CORRECTIONS = 8
"""Of one reply, at most; each is another question to the model."""
_UNTHOUGHT = "think: \nchange:"
"""Put into the mouth of a model that shall answer without reasoning, however it was taught."""


class ReasoningExperienceModel:
    """Implements `ExperienceModel` over any language model."""

    def __init__(
        self,
        model: LanguageModel,
        *,
        name: str,
        settings: PromptSettings,
        grader: Grader | None = None,
        retriever: Retriever | None = None,
        refusals: Collection[str] = (),
        attempts: int = 3,
        max_tokens: int = 400,
        remembered: int = 0,
    ) -> None:
        """
        Args:
            retriever: where demonstrations come from; without it none are shown.
            refusals: the texts by which the environment says no: whatever else the reply claims then, nothing
                changes and nothing is earned.
            attempts: how often an unreadable reply is asked for again, in all.
            remembered: replies kept for whoever asks the same again; rollouts of one task often do. Only for
                weights that do not change meanwhile.
        """
        self.name = name
        self._model = model
        self._settings = settings
        self._grader = grader or ModelVerdict()
        self._retriever = retriever
        self._refusals = frozenset(refusals)
        self._attempts = attempts
        self._max_tokens = max_tokens
        self._remembered = remembered
        self.corrections = 0
        """Verdicts and quotes that were put right, see `comparisons`."""
        self._replies: dict[tuple[str, int], asyncio.Future[Completion]] = {}

    @property
    def language_model(self) -> LanguageModel:
        """The weights that it speaks with; they can also be asked for variations of tasks."""
        return self._model

    async def imagine_start(self, task: Task, sheet: WorldSheet) -> State:
        question = start_prompt(task, sheet, actor=self._settings.actor, tell_facts=self._settings.tell_facts)
        for attempt in range(self._attempts):
            completion = await self._ask(question, attempt)
            text = parse_start(completion.text)
            if text is not None:
                return State(text=text)
        raise EpisodeFailedError(
            FailureKind.PARSE_ERROR,
            f"{self.name}: expected a first state for task {task.id!r}, "
            f"got none in {self._attempts} attempts",
        )

    async def predict(
        self, task: Task, sheet: WorldSheet, history: Sequence[Transition], state: State, action: str
    ) -> Prediction:
        shown = await demonstrations(
            *(self._retriever, task, state, action),
            k=self._settings.demonstrations,
        )
        question = prompt(task, sheet, history, state.text, action, shown, settings=self._settings)
        reply, completion = await self._reply(question)
        told = Told(
            next_state=reply.next_state,
            reasoning=reply.reasoning,
            change=reply.change,
            terminated=reply.terminated,
            success=reply.success,
            confidence=_confidence(completion),
        )
        return await conclude(
            *(told, task, sheet, state, action),
            grader=self._grader,
            refusals=self._refusals,
            shown=shown,
        )

    async def _reply(self, question: str) -> tuple[Reply, Completion]:
        begun = "" if self._settings.reasoning else _UNTHOUGHT
        for attempt in range(self._attempts):
            text, completion = await self._put_right(question, begun, attempt)
            try:
                return parse_reply(text), completion
            except EpisodeFailedError as error:
                problem = error
        raise EpisodeFailedError(problem.kind, f"{self.name}, {self._attempts} attempts: {problem}")

    async def _put_right(self, question: str, begun: str, attempt: int) -> tuple[str, Completion]:
        """A whole reply, its comparisons and quotes correct."""
        facts = told_facts(question)
        for _ in range(_CORRECTIONS):
            completion = await self._ask(question + begun, attempt)
            text = begun + completion.text
            better = corrected(text, facts)
            if better is None:
                break
            self.corrections += 1
            begun = better
        return text, completion

    async def _ask(self, question: str, attempt: int) -> Completion:
        if not self._remembered:
            return await self._complete(question, attempt)
        key = (question, attempt)
        reply = self._replies.get(key)
        if reply is None:
            if len(self._replies) >= self._remembered:
                self._replies.pop(next(iter(self._replies)))
            reply = self._replies[key] = asyncio.ensure_future(self._complete(question, attempt))
        try:
            return await asyncio.shield(reply)  # others may be waiting for it
        except BaseException:
            self._replies.pop(key, None)
            raise

    async def _complete(self, question: str, attempt: int) -> Completion:
        """Greedy at first; a second attempt must be able to differ, and still be the same every time."""
        seed = int.from_bytes(hashlib.sha256(f"{attempt}\0{question}".encode()).digest()[:4])
        return await self._model.complete(
            CompletionRequest(
                prompt=question,
                max_tokens=self._max_tokens,
                temperature=0.0 if attempt == 0 else 0.7,
                seed=seed,
            )
        )


def _confidence(completion: Completion) -> float | None:
    """The probability that the model gave its own words, where it tells: low when it was torn."""
    return math.exp(sum(completion.logprobs)) if completion.logprobs else None
