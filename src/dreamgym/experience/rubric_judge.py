"""The paper's judge of imagined transitions: a language model scores four rubrics, each 0, 1 or 2."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from dreamgym.protocols import LanguageModel
from dreamgym.structured import ask_structured, fill_template, parse_json, quote
from dreamgym.types import CompletionRequest, Task, Transition

RUBRICS = ("consistency", "diversity", "informativeness", "hallucination")

_HISTORY = 4
"""Transitions before the judged one in the prompt."""
_TEXT_LIMIT = 2_000
_Score = Annotated[int, Field(ge=0, le=2)]


class Scores(BaseModel):
    """The scores of one transition. 2 is best, also for hallucination, where it means none."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    consistency: _Score
    diversity: _Score
    informativeness: _Score
    hallucination: _Score


class RubricJudge:
    """Scores transitions with any language model."""

    def __init__(self, model: LanguageModel, *, name: str, attempts: int = 3, max_tokens: int = 100) -> None:
        """`name` is the judging model and its version: part of every result."""
        self.name = name
        self._model = model
        self._attempts = attempts
        self._max_tokens = max_tokens

    async def score(self, task: Task, history: Sequence[Transition], transition: Transition) -> Scores:
        request = CompletionRequest(
            prompt=self._prompt(task, history, transition),
            max_tokens=self._max_tokens,
            schema=Scores.model_json_schema(),
        )
        return await ask_structured(
            self._model,
            request,
            lambda completion: parse_scores(completion.text),
            name=f"judge {self.name}",
            attempts=self._attempts,
        )

    def _prompt(self, task: Task, history: Sequence[Transition], transition: Transition) -> str:
        def text(value: str) -> str:
            return quote(value, _TEXT_LIMIT)

        recent = history[-_HISTORY:]
        past = [f"- {text(each.action)} led to {text(each.outcome.next_state.text)}" for each in recent]
        outcome = transition.outcome
        return fill_template(
            __package__,
            "rubric-judge.md",
            task=text(task.instruction),
            history="\n".join(past) or "(none)",
            state=text(transition.state.text),
            action=text(transition.action),
            next_state=text(outcome.next_state.text),
            end="success" if outcome.success else "yes" if outcome.terminated else "no",
        )


def parse_scores(text: str) -> Scores:
    """
    >>> parse_scores('{"consistency": 2, "diversity": 1, "informativeness": 2, "hallucination": 0}').diversity
    1
    """
    return parse_json(Scores, text)
