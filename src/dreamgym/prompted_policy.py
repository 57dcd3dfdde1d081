"""A policy over any chat model: instructions in the system message, the action as a JSON reply.

The episode is rendered as for a trained agent (`agents.render_prompt`), so results can be compared.
"""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import BaseModel, ConfigDict

from dreamgym.agents import MAX_ACTION_LENGTH, render_prompt
from dreamgym.config import AgentConfig
from dreamgym.protocols import Environment, LanguageModel
from dreamgym.rollouts import PolicyFactory
from dreamgym.seeding import derive_seed
from dreamgym.structured import ask_structured, fill_template, one_line, parse_error, parse_json
from dreamgym.types import Completion, CompletionRequest, Decision, State, Task, Transition

_MAX_TOKENS = 400
"""At least; a thought is longer than an action."""


class _Reply(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    thought: str
    action: str


class PromptedPolicy:
    """The policy of one episode. Implements `Policy`."""

    def __init__(
        self,
        model: LanguageModel,
        config: AgentConfig,
        *,
        seed: int = 0,
        name: str = "agent",
        attempts: int = 3,
    ) -> None:
        """
        Args:
            attempts: requests until one reply can be parsed.
        """
        self.name = name
        self._model = model
        self._config = config
        self._seed = seed
        self._attempts = attempts

    async def act(self, task: Task, history: Sequence[Transition], state: State) -> Decision:
        """
        Raises:
            EpisodeFailedError: no reply could be parsed.
        """
        config = self._config
        schema = _Reply.model_json_schema()
        if config.enforce_actions and state.admissible_actions:
            schema["properties"]["action"] = {"type": "string", "enum": list(state.admissible_actions)}
        request = CompletionRequest(
            prompt=render_prompt(task, history, state, config).rpartition("\n")[0],
            system=fill_template("dreamgym", "agent.md", environment=task.environment),
            max_tokens=max(config.max_tokens, _MAX_TOKENS),
            temperature=config.temperature,
            seed=derive_seed(self._seed, len(history)),
            schema=schema,
        )
        return await ask_structured(self._model, request, _parse, name=self.name, attempts=self._attempts)


def _parse(completion: Completion) -> Decision:
    reply = parse_json(_Reply, completion.text)
    action = one_line(reply.action)[:MAX_ACTION_LENGTH]
    if not action:
        raise parse_error("expected an action, got an empty one")
    # Without the completion: no learner trains on it, and the next prompt would contain its JSON.
    return Decision(action=action, thought=one_line(reply.thought))


def prompted_policy_factory(model: LanguageModel, config: AgentConfig, *, name: str) -> PolicyFactory:
    """Makes the policy of each episode."""

    def make_policy(environment: Environment, conversation: str, seed: int) -> PromptedPolicy:
        return PromptedPolicy(model, config, seed=seed, name=name)

    return make_policy
