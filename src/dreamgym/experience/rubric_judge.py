"""The paper's judge of imagined transitions: four rubrics, each scored 0, 1 or 2 by a language model.

The reply is strict JSON. One that is not is asked for again with another seed; after the last attempt it is a
typed failure, for the caller to count.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from functools import cache
from importlib.resources import files
from string import Template
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from dreamgym.errors import EpisodeFailedError
from dreamgym.protocols import LanguageModel
from dreamgym.structured import extract_json
from dreamgym.types import CompletionRequest, FailureKind, Task, Transition

RUBRICS = ("consistency", "diversity", "informativeness", "hallucination")

_LONGEST = 2_000
"""Characters of a reply; more is refused unread."""

_Score = Annotated[int, Field(ge=0, le=2)]


class Scores(BaseModel):
    """What a judge gave one transition. 2 is best, also for hallucination, where it means none."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    consistency: _Score
    diversity: _Score
    informativeness: _Score
    hallucination: _Score


class RubricJudge:
    """Scores transitions with any language model."""

    def __init__(
        self,
        model: LanguageModel,
        *,
        name: str,
        attempts: int = 3,
        max_tokens: int = 100,
        remembered: int = 4,
        text_limit: int = 2_000,
    ) -> None:
        """
        Args:
            name: which model judges, with its version: it is part of every result.
            remembered: how many of the newest transitions before this one the judge is shown.
            text_limit: characters of any one state.
        """
        self.name = name
        self._model = model
        self._attempts = attempts
        self._max_tokens = max_tokens
        self._remembered = remembered
        self._text_limit = text_limit

    async def score(self, task: Task, history: Sequence[Transition], transition: Transition) -> Scores:
        """
        Raises:
            EpisodeFailedError: no readable scores in all attempts.
        """
        question = self._question(task, history, transition)
        for attempt in range(self._attempts):
            seed = int.from_bytes(hashlib.sha256(f"{attempt}\0{question}".encode()).digest()[:4])
            request = CompletionRequest(
                prompt=question,
                max_tokens=self._max_tokens,
                temperature=0.0 if attempt == 0 else 0.7,
                seed=seed,
                schema=Scores.model_json_schema(),
            )
            try:
                return parse_scores((await self._model.complete(request)).text)
            except EpisodeFailedError as error:
                if error.kind is not FailureKind.PARSE_ERROR:
                    raise
                problem = error
        raise EpisodeFailedError(problem.kind, f"judge {self.name}, {self._attempts} attempts: {problem}")

    def _question(self, task: Task, history: Sequence[Transition], transition: Transition) -> str:
        """Texts enter as JSON strings, so that none of them can pass for a part of the question."""

        def quoted(text: str) -> str:
            return json.dumps(text[: self._text_limit], ensure_ascii=False)

        recent = history[-self._remembered :] if self._remembered else ()
        told = [f"- {quoted(past.action)} led to {quoted(past.outcome.next_state.text)}" for past in recent]
        return _template().substitute(
            task=quoted(task.instruction),
            history="\n".join(told) or "(none)",
            state=quoted(transition.state.text),
            action=quoted(transition.action),
            next_state=quoted(transition.outcome.next_state.text),
            end="success" if transition.outcome.success else "yes" if transition.outcome.terminated else "no",
        )


def parse_scores(text: str) -> Scores:
    """Read a judge's reply.

    >>> parse_scores('{"consistency": 2, "diversity": 1, "informativeness": 2, "hallucination": 0}').diversity
    1

    Raises:
        EpisodeFailedError: it is not one JSON object with the four rubrics as integers from 0 to 2.
    """
    problem = f"more than {_LONGEST} characters"
    if len(text) <= _LONGEST:
        try:
            return Scores.model_validate_json(extract_json(text))
        except (ValidationError, UnicodeEncodeError) as error:
            problem = str(error).splitlines()[0]
    raise EpisodeFailedError(
        FailureKind.PARSE_ERROR,
        f"expected JSON with {', '.join(RUBRICS)} as integers from 0 to 2, got {text[:200]!r} ({problem})",
    )


@cache
def _template() -> Template:
    return Template(files("dreamgym.experience").joinpath("prompts/judge.md").read_text(encoding="utf-8"))
