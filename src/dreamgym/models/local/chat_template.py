"""A chat model in the role of a language model: the prompt is a user's message in the model's own template.

Only the template's own text may hold special tokens. Those named in a message are spelt out like other words,
so a state that an environment shows can end no turn and open none.
"""

from __future__ import annotations

import re
from contextlib import suppress
from dataclasses import replace
from typing import Any

from dreamgym.models.local.language_model import LocalLanguageModel, with_system
from dreamgym.models.local.tokenization import TextCodec
from dreamgym.protocols import LanguageModel
from dreamgym.types import Completion, CompletionRequest

_HERE, _SYSTEM_HERE = "MESSAGE-STANDS-HERE", "INSTRUCTIONS-STAND-HERE"


class ChatLanguageModel:
    """Asks a local model by its chat template, one message at a time."""

    def __init__(self, model: LocalLanguageModel, tokenizer: Any) -> None:
        self._model = model
        self._codec = TextCodec(tokenizer)
        message = {"role": "user", "content": _HERE}
        self._before, self._after = _parts(tokenizer, [message], _HERE)
        self._around_system: list[list[int]] | None = None
        with suppress(Exception):  # templates without a place for a system message say so in many ways
            system = {"role": "system", "content": _SYSTEM_HERE}
            self._around_system = _parts(tokenizer, [system, message], _SYSTEM_HERE, _HERE)

    async def complete(self, request: CompletionRequest) -> Completion:
        more = self._codec.more
        if request.system and self._around_system is not None:
            first, middle, last = self._around_system
            asked = with_system(replace(request, system="")).prompt
            tokens = (*first, *more(request.system), *middle, *more(asked), *last)
        else:
            tokens = (*self._before, *more(with_system(request).prompt), *self._after)
        return await self._model.complete(replace(request, prompt_token_ids=tokens, system="", turns=()))


def _parts(tokenizer: Any, messages: list[dict[str, str]], *places: str) -> list[list[int]]:
    """The template's own tokens before, between and after these places."""
    told = str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))
    parts = re.split("|".join(places), told)
    if len(parts) != len(places) + 1:
        raise ValueError(f"expected each of {places} once, in {told!r}")
    return [list(tokenizer(part, add_special_tokens=False).input_ids) for part in parts]


def as_taught(model: LocalLanguageModel) -> LanguageModel:
    """The model, asked by its chat template if it has one."""
    tokenizer = model.tokenizer
    return ChatLanguageModel(model, tokenizer) if getattr(tokenizer, "chat_template", None) else model
