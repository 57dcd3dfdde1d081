"""Who writes variations: any language model by the paper's two prompts, or weights that were taught to.

Model text is hostile: what does not have the form counts as unreadable, and is never guessed at or raised.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from string import Template
from typing import Annotated, Protocol

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from dreamgym.protocols import LanguageModel
from dreamgym.structured import extract_json
from dreamgym.types import CompletionRequest, Task

_LONGEST = 8_000
"""Characters of a reply; more is refused unread."""
_TEXT_LIMIT = 2_000
"""Characters of any one text in a prompt."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """Which candidate was preferred, and why."""

    index: int
    reason: str


class TaskProposer(Protocol):
    """Writes candidates, and says which of the valid ones it prefers."""

    @property
    def name(self) -> str: ...

    async def write(self, task: Task, *, count: int, seed: int) -> list[str | None]:
        """Candidate instructions; None stands for an answer that cannot be read.

        Raises:
            EpisodeFailedError: the language model gave no answer.
        """
        ...

    async def select(self, task: Task, candidates: Sequence[str], *, seed: int) -> Choice | None:
        """The best of several valid candidates; None where it has no say or cannot be understood."""
        ...


class PromptedTaskProposer:
    """Any language model, asked by the paper's two prompts: generate, then select."""

    def __init__(
        self,
        model: LanguageModel,
        *,
        name: str,
        world: Callable[[Task], str] = lambda task: "",
        examples: Sequence[str] = (),
        temperature: float = 1.0,
        max_tokens: int = 600,
    ) -> None:
        """
        Args:
            name: which model it is, with its version: part of every generated task's lineage.
            world: what there is in the world of a task, in words.
            examples: instructions that show how tasks are worded.
        """
        self.name = name
        self._model = model
        self._world = world
        self._examples = tuple(examples)
        self._temperature = temperature
        self._max_tokens = max_tokens

    async def write(self, task: Task, *, count: int, seed: int) -> list[str | None]:
        shown = [f"- {_quoted(example)}" for example in self._examples]
        question = _template("generate").substitute(
            environment=task.environment,
            task=_quoted(task.instruction),
            world=_quoted(self._world(task)),
            examples="\n".join(shown) or "(none)",
            count=count,
        )
        found = parse_variations(await self._ask(question, seed, self._temperature, _Variations))
        return [None] if found is None else list(found[:count])

    async def select(self, task: Task, candidates: Sequence[str], *, seed: int) -> Choice | None:
        listed = [f"{number}. {_quoted(each)}" for number, each in enumerate(candidates, 1)]
        question = _template("select").substitute(
            environment=task.environment, task=_quoted(task.instruction), candidates="\n".join(listed)
        )
        return parse_choice(await self._ask(question, seed, 0.0, _Selection), len(candidates))

    async def _ask(self, question: str, seed: int, temperature: float, form: type[BaseModel]) -> str:
        request = CompletionRequest(
            prompt=question,
            max_tokens=self._max_tokens,
            temperature=temperature,
            seed=seed,
            schema=form.model_json_schema(),
        )
        return (await self._model.complete(request)).text


class FineTunedTaskProposer:
    """Weights that were taught to vary tasks: the experience model's own, as in the paper's Eq. 6.

    It knows one question and one form of answer: variety comes from sampling, and it is not asked to select.
    """

    def __init__(
        self,
        model: LanguageModel,
        *,
        name: str,
        ask: Callable[[Task], str | None],
        read: Callable[[str], str | None],
        temperature: float = 1.0,
        max_tokens: int = 60,
    ) -> None:
        """
        Args:
            ask: the question for a variation of a task, as taught; None where there is none to ask.
            read: the instruction in a reply, or None.
        """
        self.name = name
        self._model = model
        self._ask = ask
        self._read = read
        self._temperature = temperature
        self._max_tokens = max_tokens

    async def write(self, task: Task, *, count: int, seed: int) -> list[str | None]:
        question = self._ask(task)
        if question is None:
            return []
        requests = [
            CompletionRequest(
                prompt=question,
                max_tokens=self._max_tokens,
                temperature=self._temperature,
                stop=("\n",),
                seed=derive_seed(seed, number),
            )
            for number in range(count)
        ]
        replies = await asyncio.gather(*map(self._model.complete, requests))
        # Samples of one question repeat one another; saying so twice would only count as known.
        return list(dict.fromkeys(self._read(reply.text) for reply in replies))

    async def select(self, task: Task, candidates: Sequence[str], *, seed: int) -> Choice | None:
        return None


class _Variations(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")

    variations: Annotated[list[str], Field(min_length=1, max_length=64)]


class _Selection(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")

    choice: int
    reason: str = ""


def parse_variations(text: str) -> list[str] | None:
    """The candidates in a reply to the prompt that generates, or None if it has not the form.

    >>> parse_variations('{"variations": ["put a cup in sink"]}')
    ['put a cup in sink']
    """
    try:
        return _Variations.model_validate_json(_inside(text)).variations
    except (ValidationError, UnicodeEncodeError):
        return None


def parse_choice(text: str, count: int) -> Choice | None:
    """The choice in a reply to the prompt that selects among `count`, or None.

    >>> parse_choice('{"choice": 2, "reason": "It takes two steps more."}', 3)
    Choice(index=1, reason='It takes two steps more.')
    """
    try:
        found = _Selection.model_validate_json(_inside(text))
    except (ValidationError, UnicodeEncodeError):
        return None
    reason = "".join(letter if letter.isprintable() else " " for letter in found.reason[:_TEXT_LIMIT])
    return Choice(index=found.choice - 1, reason=reason) if 1 <= found.choice <= count else None


def derive_seed(*parts: object) -> int:
    """A seed for each thing that is asked for, the same in every run."""
    return int.from_bytes(hashlib.sha256("\0".join(map(str, parts)).encode()).digest()[:4])


def _inside(text: str) -> str:
    """The JSON in a reply; an overlong one is nothing."""
    return extract_json(text) if len(text) <= _LONGEST else ""


def _quoted(text: str) -> str:
    """As a JSON string, so that no text can pass for a part of the question."""
    return json.dumps(text[:_TEXT_LIMIT], ensure_ascii=False)


@cache
def _template(name: str) -> Template:
    return Template(files("dreamgym.curriculum").joinpath(f"prompts/{name}.md").read_text(encoding="utf-8"))
