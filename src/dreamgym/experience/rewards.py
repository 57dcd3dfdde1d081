"""Four ways to say what an action earned; the choice is recorded with every outcome.

Left to itself, a loop that trains both player and grader learns to please the grader. So the reward is a role
of its own: the experience model's word (as in the paper), another language model as judge, by one word or by
a quotation that proves it, or a check of the task on the world sheet, where the environment has one.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable

from pydantic import BaseModel, ConfigDict

from dreamgym.errors import EpisodeFailedError
from dreamgym.experience.prompt_formats import filled, parsed, told_facts
from dreamgym.protocols import LanguageModel
from dreamgym.types import CompletionRequest, FailureKind, Task, Transition, Verdict, WorldSheet

TaskCheck = Callable[[Task, WorldSheet], bool]
"""Whether a task is done on these facts."""


class ModelVerdict:
    """The experience model's own verdict, as in the paper."""

    async def verdict(
        self, task: Task, sheet: WorldSheet, transition: Transition, *, claimed: bool
    ) -> Verdict:
        return Verdict(reward=float(claimed), success=claimed, source="model")


class SheetCheck:
    """A programmatic check of the task on the world sheet: no opinion, but only as good as the sheet."""

    def __init__(self, check: TaskCheck) -> None:
        self._check = check

    async def verdict(
        self, task: Task, sheet: WorldSheet, transition: Transition, *, claimed: bool
    ) -> Verdict:
        try:
            success = self._check(task, sheet)
        except (KeyError, ValueError) as error:
            raise EpisodeFailedError(
                FailureKind.INVALID_TASK, f"task {task.id!r} cannot be checked on a sheet: {error}"
            ) from None
        return Verdict(reward=float(success), success=success, source="sheet")


class Judge:
    """Another language model decides, with one word. Asked only where the experience model claims success.

    A judge that was asked at every step would mostly be asked about steps that cannot succeed, and each of
    its errors there would be a reward for nothing.
    """

    QUESTION = (
        "task: {task}\naction: {action}\nresult: {result}\nIs the task done now? Answer yes or no.\nanswer:"
    )

    def __init__(self, model: LanguageModel) -> None:
        self._model = model

    async def verdict(
        self, task: Task, sheet: WorldSheet, transition: Transition, *, claimed: bool
    ) -> Verdict:
        success = False
        if claimed:
            question = self.QUESTION.format(
                task=task.instruction,
                action=transition.action,
                result=transition.outcome.next_state.text,
            )
            request = CompletionRequest(prompt=question, choices=(" yes", " no"), max_tokens=8)
            success = (await self._model.complete(request)).text.strip() == "yes"
        return Verdict(reward=float(success), success=success, source="judge")


class _Finding(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    evidence: str
    done: bool


class EvidenceJudge:
    """Another language model decides, and has to quote what shows it: success without a proof is none.

    Like `Judge`, it is asked only where success is claimed, or where the experience model has no word for it.
    """

    def __init__(self, model: LanguageModel, *, attempts: int = 3, text_limit: int = 4_000) -> None:
        """
        Args:
            text_limit: characters of any one state.
        """
        self._model = model
        self._attempts = attempts
        self._text_limit = text_limit

    async def verdict(
        self, task: Task, sheet: WorldSheet, transition: Transition, *, claimed: bool
    ) -> Verdict:
        """
        Raises:
            EpisodeFailedError: no readable verdict in all attempts.
        """
        success = claimed and await self._done(task, sheet, transition)
        return Verdict(reward=float(success), success=success, source="judge")

    async def _done(self, task: Task, sheet: WorldSheet, transition: Transition) -> bool:
        facts = [" ".join(fact) for fact in told_facts(sheet, transition.action, None)]
        after = transition.outcome.next_state.text[: self._text_limit]

        def quoted(text: str) -> str:
            return json.dumps(text[: self._text_limit], ensure_ascii=False)

        question = filled(
            "verdict.md",
            environment=task.environment,
            task=quoted(task.instruction),
            facts=json.dumps(facts, ensure_ascii=False) if facts else "(none are known)",
            state=quoted(transition.state.text),
            action=quoted(transition.action),
            next_state=quoted(after),
        )
        for attempt in range(self._attempts):
            seed = hashlib.sha256(f"{attempt}\0{question}".encode(errors="replace")).digest()[:4]
            request = CompletionRequest(
                prompt=question,
                max_tokens=400,
                temperature=0.0 if attempt == 0 else 0.7,
                seed=int.from_bytes(seed),
                schema=_Finding.model_json_schema(),
            )
            try:
                found = parsed(_Finding, (await self._model.complete(request)).text)
            except EpisodeFailedError as error:
                if error.kind is not FailureKind.PARSE_ERROR:
                    raise
                problem = error
                continue
            return found.done and any(_quotes(found.evidence, text) for text in (after, *facts))
        raise EpisodeFailedError(problem.kind, f"judge, {self._attempts} attempts: {problem}")


def _quotes(evidence: str, text: str) -> bool:
    """Whether the text holds these words, however they are spaced.

    >>> _quotes("safe  is open", "The safe is open."), _quotes("", "The safe is open.")
    (True, False)
    """
    said = " ".join(evidence.split()).strip(" \"'.…").lower()
    return len(said) > 2 and said in " ".join(text.split()).lower()
