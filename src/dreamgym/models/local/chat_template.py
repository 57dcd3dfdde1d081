"""A chat model as a language model: the prompt becomes a user message in the model's chat template.

Only the template's own text may contain special tokens. Special tokens named in a message are tokenized as
plain text, so a state of an environment can neither end nor open a turn.
"""

from __future__ import annotations

import re
from contextlib import suppress
from dataclasses import replace
from typing import Any

from dreamgym.models.local.language_model import LocalLanguageModel, with_system
from dreamgym.models.local.tokens import TextCodec
from dreamgym.protocols import LanguageModel
from dreamgym.types import Completion, CompletionRequest

_HERE, _SYSTEM_HERE = "MESSAGE-PLACEHOLDER", "SYSTEM-PLACEHOLDER"


class ChatLanguageModel:
    """Wraps a local model with its chat template, one message per request."""

    def __init__(self, model: LocalLanguageModel, tokenizer: Any) -> None:
        self._model = model
        self._codec = TextCodec(tokenizer)
        message = {"role": "user", "content": _HERE}
        self._before, self._after = _parts(tokenizer, [message], _HERE)
        self._around_system: list[list[int]] | None = None
        with suppress(Exception):  # templates without a system message raise many kinds of errors
            system = {"role": "system", "content": _SYSTEM_HERE}
            self._around_system = _parts(tokenizer, [system, message], _SYSTEM_HERE, _HERE)

    async def complete(self, request: CompletionRequest) -> Completion:
        more = self._codec.more
        if request.system and self._around_system is not None:
            first, middle, last = self._around_system
            prompt = with_system(replace(request, system="")).prompt
            tokens = (*first, *more(request.system), *middle, *more(prompt), *last)
        else:
            tokens = (*self._before, *more(with_system(request).prompt), *self._after)
        return await self._model.complete(replace(request, prompt_token_ids=tokens, system="", turns=()))


def _parts(tokenizer: Any, messages: list[dict[str, str]], *places: str) -> list[list[int]]:
    """The template's own tokens before, between and after these placeholders."""
    rendered = str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))
    parts = re.split("|".join(places), rendered)
    if len(parts) != len(places) + 1:
        raise ValueError(f"expected each of {places} once, in {rendered!r}")
    return [list(tokenizer(part, add_special_tokens=False).input_ids) for part in parts]


def with_chat_template(model: LocalLanguageModel) -> LanguageModel:
    """The model, wrapped with its chat template if it has one."""
    tokenizer = model.tokenizer
    return ChatLanguageModel(model, tokenizer) if getattr(tokenizer, "chat_template", None) else model
