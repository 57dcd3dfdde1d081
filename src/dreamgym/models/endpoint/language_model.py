"""A language model at an OpenAI-compatible endpoint, behind the same role as a local one.

How to get one, whatever is named (``hf:NAME_OR_PATH``, ``endpoint:NAME`` of an ``[endpoints.NAME]`` section,
or ``endpoint:MODEL@URL``):

    from dreamgym.models.registry import LanguageModels
    from dreamgym.models.usage import stage

    async with LanguageModels(config, folder=run) as models:       # one per command: shares governors, budget
        model = models.open("endpoint:strong", role="experience")  # -> protocols.LanguageModel
        with stage("practice"):                                    # where its cost is counted
            completion = await model.complete(
                CompletionRequest(prompt=..., system=..., schema=Reply.model_json_schema(), max_tokens=512)
            )
        models.context("endpoint:strong")                          # tokens that it reads
        models.spending.to_dict()                                  # tokens, seconds, money by stage and role

`schema` is held to by servers that can; whoever asks still parses strictly. What goes wrong is an
`EpisodeFailedError` with a kind (`timeout`, `rate_limited`, `server_down`, `refused`, `parse_error`), an
`EndpointError` where no request can ever succeed, or a `BudgetSpentError`, which ends a run.
"""

from __future__ import annotations

from dreamgym.models.endpoint.client import Endpoint
from dreamgym.types import Completion, CompletionRequest


class EndpointLanguageModel:
    """What one role asks of an endpoint. Roles share the endpoint, and are metered apart.

    Log-probs, where `settings.logprobs` asks for them and the server has them, are the server's own: whether
    they are those at temperature 1 is up to it. `conversation` is ignored: servers find common prefixes
    themselves.
    """

    def __init__(self, endpoint: Endpoint, *, role: str) -> None:
        self._endpoint = endpoint
        self._role = role

    @property
    def endpoint(self) -> Endpoint:
        return self._endpoint

    async def complete(self, request: CompletionRequest) -> Completion:
        """
        Raises:
            EpisodeFailedError: no answer that could be read, after all attempts.
            EndpointError: key, model or address are wrong.
            BudgetSpentError: it might have cost more than is left of the budget.
        """
        return await self._endpoint.ask(request, role=self._role)
