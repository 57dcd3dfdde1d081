"""The smallest task: repeat the word of the state. One turn, or several."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from dreamgym.agents import LanguageModelPolicy, next_prompt_tokens
from dreamgym.config import AgentConfig
from dreamgym.models.local.language_model import LocalLanguageModel
from dreamgym.models.local.tokens import TextCodec
from dreamgym.models.tiny import make_model, make_tokenizer
from dreamgym.protocols import Environment
from dreamgym.rl.packing import NextPrompt
from dreamgym.rollouts import GroupSettings, run_groups
from dreamgym.types import Outcome, RolloutGroup, State, Task

torch.set_num_threads(1)

WORDS = ("apple", "stone", "river", "cloud")
TOKENIZER = make_tokenizer([f"task: say it.\nstate: {word}\naction: {word}\nyes\nno" for word in WORDS], 300)


class Echo:
    """Reward 1 if the word of the state is said in every one of `turns` turns."""

    def __init__(self, task: Task, *, turns: int, listed: bool) -> None:
        self.task = task
        self._word = str(task.parameters["word"])
        self._left = turns
        self._actions = WORDS if listed else None

    async def start(self) -> State:
        return State(text=self._word, admissible_actions=self._actions)

    async def step(self, action: str) -> Outcome:
        self._left -= 1
        right = action == self._word
        won = right and not self._left
        return Outcome(
            next_state=State(text=self._word, admissible_actions=self._actions),
            reward=float(won),
            terminated=won or not right,
            success=won,
        )

    async def aclose(self) -> None:
        """Nothing is held open."""


class EchoFactory:
    name = "echo"
    splits = ("train",)

    def __init__(self, *, turns: int = 1, listed: bool = True) -> None:
        self._turns = turns
        self._listed = listed

    async def tasks(self, split: str, count: int | None = None, *, seed: int = 0) -> Sequence[Task]:
        return [
            Task(id=word, instruction="say it.", environment=self.name, parameters={"word": word})
            for word in WORDS[:count]
        ]

    def make(self, task: Task, *, seed: int = 0) -> Echo:
        return Echo(task, turns=self._turns, listed=self._listed)

    async def aclose(self) -> None:
        """Nothing is held open."""


CHOOSING = AgentConfig(enforce_actions=True)


def nano_model(seed: int = 0) -> Any:
    return make_model("nano", TOKENIZER, seed=seed)


def after(settings: AgentConfig = CHOOSING) -> NextPrompt:
    codec = TextCodec(TOKENIZER)
    return lambda trajectory: next_prompt_tokens(trajectory, settings, codec)


async def play(
    language_model: LocalLanguageModel,
    *,
    step: int = 0,
    size: int = 8,
    factory: Any = None,
    settings: AgentConfig = CHOOSING,
) -> list[RolloutGroup]:
    """One group for each word (or task of the factory)."""
    factory = factory or EchoFactory()

    def member(environment: Environment, name: str, seed: int) -> LanguageModelPolicy:
        return LanguageModelPolicy(language_model, settings, conversation=name, seed=seed)

    report = await run_groups(
        factory,
        member,
        await factory.tasks("train", 4),
        name=f"echo-{step}",
        seed=step,
        settings=GroupSettings(size=size),
    )
    assert not report.dropped
    return report.groups


def mean_return(groups: Sequence[RolloutGroup]) -> float:
    returns = [t.total_reward for group in groups for t in group.trajectories]
    return sum(returns) / len(returns)
