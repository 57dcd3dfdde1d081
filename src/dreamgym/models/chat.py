"""A chat model in the role of a language model: the prompt is a user's message in the model's own template.

Only the template's own text may hold special tokens. Those named in a message are spelt out like other words,
so a state that an environment shows can end no turn and open none.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from dreamgym.models.local import LocalLanguageModel
from dreamgym.models.text import TextCodec
from dreamgym.protocols import LanguageModel
from dreamgym.types import Completion, CompletionRequest

_HERE = "MESSAGE-STANDS-HERE"


class ChatLanguageModel:
    """Asks a local model by its chat template, one message at a time."""

    def __init__(self, model: LocalLanguageModel, tokenizer: Any) -> None:
        self._model = model
        self._codec = TextCodec(tokenizer)
        message = [{"role": "user", "content": _HERE}]
        told = str(tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True))
        self._before, self._after = (
            list(tokenizer(part, add_special_tokens=False).input_ids) for part in told.split(_HERE)
        )

    async def complete(self, request: CompletionRequest) -> Completion:
        tokens = (*self._before, *self._codec.more(request.prompt), *self._after)
        return await self._model.complete(replace(request, prompt_token_ids=tokens))


def as_taught(model: LocalLanguageModel) -> LanguageModel:
    """The model, asked by its chat template if it has one."""
    tokenizer = model.tokenizer
    return ChatLanguageModel(model, tokenizer) if getattr(tokenizer, "chat_template", None) else model
