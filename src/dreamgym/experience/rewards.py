"""Graders other than the experience model's own verdict (`model.ModelVerdict`): another language model that
must quote evidence, or a check of the task on the world sheet. A loop that also trains its grader learns to
satisfy the grader."""

from __future__ import annotations

import re

from pydantic import BaseModel, ConfigDict

from dreamgym.errors import EpisodeFailedError
from dreamgym.experience.world_sheet import MAX_FACTS, TaskCheck
from dreamgym.protocols import LanguageModel
from dreamgym.structured import ask_structured, fill_template, parse_json, quote, quote_json
from dreamgym.types import CompletionRequest, FailureKind, Task, Transition, Verdict, WorldSheet

_TEXT_LIMIT = 4_000
"""Characters of each state in the prompt of a judge."""
_COMPARED = 200
"""Characters of a piece of evidence that are compared with the action."""
_WORD = re.compile(r"\w+")
_ESCAPE = re.compile(r"\\(?:u([0-9a-fA-F]{4})|.)")


class SheetCheck:
    """A programmatic check of the task on the world sheet: as reliable as the sheet."""

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


class _Finding(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    evidence: str
    done: bool


class EvidenceJudge:
    """Another language model decides, and must quote the evidence: a fact, or words of the next state, that
    are not the action's own. It is asked only where the experience model claims success: elsewhere each error
    would be a reward for nothing."""

    def __init__(self, model: LanguageModel, *, attempts: int = 3) -> None:
        self._model = model
        self._attempts = attempts

    async def verdict(
        self, task: Task, sheet: WorldSheet, transition: Transition, *, claimed: bool
    ) -> Verdict:
        success = claimed and await self._is_done(task, sheet, transition)
        return Verdict(reward=float(success), success=success, source="judge")

    async def _is_done(self, task: Task, sheet: WorldSheet, transition: Transition) -> bool:
        facts = [" ".join(fact) for fact in sheet.facts[:MAX_FACTS]]
        after = transition.outcome.next_state.text[:_TEXT_LIMIT]
        prompt = fill_template(
            __package__,
            "evidence-judge.md",
            environment=quote(task.environment),
            task=quote(task.instruction, _TEXT_LIMIT),
            facts=quote_json(facts) if facts else "(none are known)",
            state=quote(transition.state.text, _TEXT_LIMIT),
            action=quote(transition.action, _TEXT_LIMIT),
            next_state=quote(after),
        )
        found = await ask_structured(
            self._model,
            CompletionRequest(prompt=prompt, max_tokens=400, schema=_Finding.model_json_schema()),
            lambda completion: parse_json(_Finding, completion.text),
            name="judge",
            attempts=self._attempts,
        )
        evidence, action = found.evidence, transition.action
        shown = _contains(after, evidence) and not _is_quoted_from(evidence, action)
        held = any(_contains(fact, evidence) for fact in facts) and _adds_to(evidence, action)
        return found.done and (shown or held)


def _contains(text: str, evidence: str) -> bool:
    """Whether the text contains these words, regardless of spacing and case.

    >>> _contains("The safe is open.", "safe  is open"), _contains("The safe is open.", "")
    (True, False)
    """
    quoted = " ".join(evidence.split()).strip(" \"'.…").lower()
    return len(quoted) > 2 and quoted in " ".join(text.split()).lower()


def _is_quoted_from(evidence: str, action: str) -> bool:
    """Whether more than half of a piece of evidence is a quotation of the action.

    >>> _is_quoted_from("the safe is open", "say: The safe is open!")
    True
    >>> _is_quoted_from("You pick up the mug 1 from the desk 1.", "take mug 1 from desk 1")
    False
    """
    text = _words(evidence)[:_COMPARED]
    half = len(text) // 2 + 1
    parts = {text[start : start + half] for start in range(len(text) - half + 1)}
    return not text or any(part in said for said in _readings(action) for part in parts)


def _adds_to(evidence: str, action: str) -> bool:
    """Whether a piece of evidence has a word that the action lacks.

    >>> _adds_to("opened safe 1", "open safe 1"), _adds_to("safe 1", "open safe 1")
    (True, False)
    """
    words = _words(evidence).split()
    return all(not set(said.split()).issuperset(words) for said in _readings(action))


def _readings(action: str) -> tuple[str, str]:
    r"""The words of an action, as they are and with JSON's escapes undone.

    >>> _readings(r"say \u0059ou\nwon")
    ('say u0059ou nwon', 'say you won')
    """
    undone = _ESCAPE.sub(lambda found: chr(int(found[1], 16)) if found[1] else " ", action)
    return _words(action), _words(undone)


def _words(text: str) -> str:
    return " ".join(_WORD.findall(text[:_TEXT_LIMIT].lower()))
