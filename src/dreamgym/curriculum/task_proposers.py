"""Models that propose variations of a task: any language model by prompt, or the fine-tuned experience
model."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated, Protocol

from pydantic import BaseModel, ConfigDict, Field

from dreamgym.errors import EpisodeFailedError
from dreamgym.protocols import LanguageModel
from dreamgym.seeding import derive_seed
from dreamgym.structured import fill_template, parse_json, quote
from dreamgym.types import CompletionRequest, Task

_TEXT_LIMIT = 2_000
"""Characters of any one text in a prompt."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """The index of the selected candidate, and the reason."""

    index: int
    reason: str


class TaskProposer(Protocol):
    """Proposes variations of a task, and selects one of the valid ones."""

    @property
    def name(self) -> str: ...

    async def propose(self, task: Task, *, count: int, seed: int) -> list[str | None]:
        """Candidate instructions, None for a reply that cannot be parsed; raises `EpisodeFailedError`."""
        ...

    async def select(self, task: Task, candidates: Sequence[str], *, seed: int) -> Selection | None:
        """The best of several valid candidates; None if it selects none or its reply cannot be parsed."""
        ...


class PromptedTaskProposer:
    """Any language model with the paper's two prompts: generate, then select."""

    def __init__(
        self,
        model: LanguageModel,
        *,
        name: str,
        objects: Callable[[Task], str] = lambda task: "",
        examples: Sequence[str] = (),
    ) -> None:
        """`objects` says what a task can be about; `examples` show how tasks are worded."""
        self.name = name
        self._model = model
        self._objects = objects
        self._examples = tuple(examples)

    async def propose(self, task: Task, *, count: int, seed: int) -> list[str | None]:
        examples = [f"- {quote(example, _TEXT_LIMIT)}" for example in self._examples]
        prompt = fill_template(
            "dreamgym.curriculum",
            "generate.md",
            environment=task.environment,
            task=quote(task.instruction, _TEXT_LIMIT),
            objects=quote(self._objects(task), _TEXT_LIMIT),
            examples="\n".join(examples) or "(none)",
            count=count,
        )
        found = parse_variations(await self._reply(prompt, seed, 1.0, _Variations))
        return [None] if found is None else list(found[:count])

    async def select(self, task: Task, candidates: Sequence[str], *, seed: int) -> Selection | None:
        listed = [f"{number}. {quote(each, _TEXT_LIMIT)}" for number, each in enumerate(candidates, 1)]
        prompt = fill_template(
            "dreamgym.curriculum",
            "select.md",
            environment=task.environment,
            task=quote(task.instruction, _TEXT_LIMIT),
            candidates="\n".join(listed),
        )
        return parse_selection(await self._reply(prompt, seed, 0.0, _Selection), len(candidates))

    async def _reply(self, prompt: str, seed: int, temperature: float, schema: type[BaseModel]) -> str:
        request = CompletionRequest(
            prompt=prompt,
            max_tokens=600,
            temperature=temperature,
            seed=seed,
            schema=schema.model_json_schema(),
        )
        return (await self._model.complete(request)).text


class FineTunedTaskProposer:
    """The experience model, also fine-tuned to vary tasks (the paper's Eq. 6): samples of one prompt, no
    selection."""

    def __init__(
        self,
        model: LanguageModel,
        *,
        name: str,
        prompt: Callable[[Task], str | None],
        parse: Callable[[str], str | None],
    ) -> None:
        self.name = name
        self._model = model
        self._prompt = prompt
        self._parse = parse

    async def propose(self, task: Task, *, count: int, seed: int) -> list[str | None]:
        prompt = self._prompt(task)
        if prompt is None:
            return []
        requests = [
            CompletionRequest(
                prompt=prompt,
                max_tokens=60,
                temperature=1.0,
                stop=("\n",),
                seed=derive_seed(seed, number) % 2**32,
            )
            for number in range(count)
        ]
        replies = await asyncio.gather(*map(self._model.complete, requests))
        # Samples of one prompt repeat: a repetition is no candidate.
        return list(dict.fromkeys(self._parse(reply.text) for reply in replies))

    async def select(self, task: Task, candidates: Sequence[str], *, seed: int) -> Selection | None:
        return None


class _Variations(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")

    variations: Annotated[list[str], Field(min_length=1, max_length=64)]


class _Selection(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")

    choice: int
    reason: str = ""


def parse_variations(text: str) -> list[str] | None:
    """The candidates in a reply to the first prompt, or None if it cannot be parsed.

    >>> parse_variations('{"variations": ["put a cup in sink"]}')
    ['put a cup in sink']
    """
    try:
        return parse_json(_Variations, text).variations
    except EpisodeFailedError:
        return None


def parse_selection(text: str, count: int) -> Selection | None:
    """The selection in a reply to the second prompt, among `count` candidates, or None.

    >>> parse_selection('{"choice": 2, "reason": "It takes two steps more."}', 3)
    Selection(index=1, reason='It takes two steps more.')
    """
    try:
        found = parse_json(_Selection, text)
    except EpisodeFailedError:
        return None
    reason = "".join(letter if letter.isprintable() else " " for letter in found.reason[:_TEXT_LIMIT])
    return Selection(index=found.choice - 1, reason=reason) if 1 <= found.choice <= count else None
