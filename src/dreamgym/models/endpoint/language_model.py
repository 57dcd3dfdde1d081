"""A language model behind an OpenAI-compatible endpoint, in the same role as a local one.

Models are opened by name (``hf:NAME_OR_PATH``, ``endpoint:NAME`` for a section ``[endpoints.NAME]``, or
``endpoint:MODEL@URL``):

    from dreamgym.models.registry import LanguageModels
    from dreamgym.models.usage import stage

    async with LanguageModels(config, folder=run) as models:       # one per command: shared limits and budget
        model = models.open("endpoint:strong", role="experience")  # -> protocols.LanguageModel
        with stage("training"):                                    # usage is counted per stage and role
            completion = await model.complete(
                CompletionRequest(prompt=..., system=..., schema=Reply.model_json_schema(), max_tokens=512)
            )
        models.context_length("endpoint:strong")                   # tokens of prompt and reply together
        models.usage.to_dict()                                     # tokens, seconds, money by stage and role

Not every server follows `schema`, so the caller still parses the text. A failure is an `EpisodeFailedError`
with a kind (`timeout`, `rate_limited`, `server_down`, `refused`, `parse_error`), an `EndpointError` if no
request can succeed, or a `BudgetSpentError`, which ends a run.
"""

from __future__ import annotations

from dreamgym.models.endpoint.client import Endpoint
from dreamgym.types import Completion, CompletionRequest


class EndpointLanguageModel:
    """One role's view of an endpoint. Roles share the endpoint; usage is counted per role.

    With `settings.logprobs`, log-probs are the server's own: whether they are taken at temperature 1 depends
    on the server. `conversation` is ignored: servers find common prefixes themselves.
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
            EpisodeFailedError: no readable reply after all attempts.
            EndpointError: key, model or address are wrong.
            BudgetSpentError: the request might cost more than the rest of the budget.
        """
        return await self._endpoint.complete(request, role=self._role)
