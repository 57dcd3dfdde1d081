"""A language model chooses the elements of a state, as in the paper; the lines are written by the rules.

    factory = dg.make("miniwob")
    factory.mapper = ModelMapper(model)

Ids are exact whatever the model replies: one that is not on the page is a wrong reply, and the model is asked
again.
"""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field

from dreamgym.envs.browser.mapping import TABLES, useful_elements
from dreamgym.envs.browser.snapshot import Node, render_tree
from dreamgym.protocols import LanguageModel
from dreamgym.structured import ask_structured, fill_template, parse_error, parse_json, quote
from dreamgym.types import Completion, CompletionRequest, Task

_TREE = 60_000
"""Characters of a page in the prompt."""
_ACTIONS = 20
"""Earlier actions in the prompt."""


class Choice(BaseModel):
    """The model's reply."""

    model_config = ConfigDict(extra="forbid", strict=True)

    page: str = Field(max_length=1000)
    progress: str = Field(max_length=500)
    next: str = Field(max_length=500)
    elements: list[str] = Field(min_length=1, max_length=100)


class ModelMapper:
    """Asks a language model once for each page."""

    def __init__(self, model: LanguageModel, *, max_tokens: int = 400, attempts: int = 3) -> None:
        self._model = model
        self._max_tokens = max_tokens
        self._attempts = attempts

    async def choose(self, root: Node, task: Task, actions: list[str], limit: int) -> list[Node]:
        """The chosen elements, in document order.

        Raises:
            EpisodeFailedError: no reply could be used.
        """
        known = useful_elements(root)
        if not known:
            return []
        numbers = {node.id for node in known}

        def parse(completion: Completion) -> list[str]:
            chosen = parse_json(Choice, completion.text).elements[:limit]
            if strange := [each for each in chosen if each not in numbers]:
                raise parse_error(f"elements: there is no element {strange[0][:20]!r} that can be acted on")
            return chosen

        prompt = fill_template(
            "dreamgym.envs.browser",
            "elements.md",
            limit=limit,
            instruction=quote(task.instruction),
            actions=quote("\n".join(actions[-_ACTIONS:])),
            tree=quote(render_tree(root), _TREE),
        )
        request = CompletionRequest(
            prompt=prompt, max_tokens=self._max_tokens, schema=Choice.model_json_schema()
        )
        chosen = await ask_structured(
            self._model, request, parse, name="state mapping", attempts=self._attempts, repair=True
        )
        tables = [node for node in root.walk() if node.role in TABLES]
        whole = {each.id for table in tables for each in table.walk() if _has(table, chosen)}
        return [node for node in known if node.id in chosen or node.id in whole]


def _has(table: Node, chosen: list[str]) -> bool:
    return any(node.id in chosen for node in table.walk() if node.id)
