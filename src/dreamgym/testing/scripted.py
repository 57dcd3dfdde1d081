"""A language model whose replies are given by a function, for tests of code that uses one."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from dreamgym.types import Completion, CompletionRequest

Script = Callable[[CompletionRequest], str]


class ScriptedLanguageModel:
    """Answers each request with `script(request)` and records the requests.

    >>> model = ScriptedLanguageModel(lambda request: request.prompt.upper())
    >>> asyncio.run(model.complete(CompletionRequest(prompt="hello"))).text
    'HELLO'
    """

    def __init__(self, script: Script) -> None:
        self._script = script
        self.requests: list[CompletionRequest] = []

    async def complete(self, request: CompletionRequest) -> Completion:
        self.requests.append(request)
        await asyncio.sleep(0)  # other tasks run, as with a real model
        return Completion(text=self._script(request))
