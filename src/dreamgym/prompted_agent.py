"""An agent over a language model that was not trained here: told in words how to act, it answers in JSON.

The episode is told as to any other agent (`agent.prompt`), so results can be set side by side.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from importlib.resources import files

from pydantic import BaseModel, ConfigDict

from dreamgym.agents import LONGEST_ACTION, one_line, prompt
from dreamgym.config import AgentConfig
from dreamgym.errors import EpisodeFailedError
from dreamgym.experience.prompt_formats import fill, parsed
from dreamgym.protocols import Environment, LanguageModel
from dreamgym.rollout_groups import PolicyFactory
from dreamgym.types import CompletionRequest, Decision, FailureKind, State, Task, Transition

_MAX_TOKENS = 400
"""At least; a thought needs room."""


class _Reply(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    thought: str
    action: str


class PromptedAgent:
    """The policy of one episode."""

    def __init__(
        self,
        model: LanguageModel,
        *,
        settings: AgentConfig,
        seed: int = 0,
        name: str = "agent",
        attempts: int = 3,
    ) -> None:
        """
        Args:
            attempts: how often an unreadable reply is asked for again, in all.
        """
        self.name = name
        self._model = model
        self._settings = settings
        self._seed = seed
        self._attempts = attempts

    async def act(self, task: Task, history: Sequence[Transition], state: State) -> Decision:
        """
        Raises:
            EpisodeFailedError: no readable reply in all attempts.
        """
        settings = self._settings
        schema = _Reply.model_json_schema()
        if settings.enforce_actions and state.admissible_actions:
            schema["properties"]["action"] = {"type": "string", "enum": list(state.admissible_actions)}
        told = prompt(task, history, state, settings=settings)
        for attempt in range(self._attempts):
            completion = await self._model.complete(
                CompletionRequest(
                    prompt=told.rpartition("\n")[0],
                    system=fill(_instructions(), environment=task.environment),
                    max_tokens=max(settings.max_tokens, _MAX_TOKENS),
                    temperature=settings.temperature if attempt == 0 else max(0.7, settings.temperature),
                    seed=self._seed + 1_000_003 * len(history) + 7_919 * attempt,
                    schema=schema,
                )
            )
            try:
                reply = parsed(_Reply, completion.text)
            except EpisodeFailedError as error:
                problem = error
                continue
            action = one_line(reply.action)[:LONGEST_ACTION]
            if action:
                # Without the completion: no learner trains on it, and the next prompt would tell its JSON.
                return Decision(action=action, thought=one_line(reply.thought))
            problem = EpisodeFailedError(FailureKind.PARSE_ERROR, "expected an action, got an empty one")
        raise EpisodeFailedError(problem.kind, f"{self.name}, {self._attempts} attempts: {problem}")


def prompted_members(model: LanguageModel, settings: AgentConfig, *, name: str) -> PolicyFactory:
    """Makes the agent of each episode."""

    def member(environment: Environment, conversation: str, seed: int) -> PromptedAgent:
        return PromptedAgent(model, settings=settings, seed=seed, name=name)

    return member


@cache
def _instructions() -> str:
    return files("dreamgym").joinpath("prompts", "agent.md").read_text(encoding="utf-8")
