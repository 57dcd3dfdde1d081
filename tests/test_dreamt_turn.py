"""One turn in a synthetic environment passes few modules of the package, so that a reader can follow it.

A turn: the agent acts, the environment predicts with a demonstration from the replay buffer, the outcome is
recorded. The second turn of an episode is counted, with its coroutines (`sys.setprofile`) and worker threads
(`threading.setprofile`), in which the local model generates tokens and the replay buffer searches.
"""

from __future__ import annotations

import sys
import threading
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any

from dreamgym.agents import LanguageModelPolicy
from dreamgym.config import AgentConfig
from dreamgym.envs.synthetic import EpisodeStart, SyntheticFactory
from dreamgym.experience.model import ReasoningExperienceModel
from dreamgym.experience.reply_format import PromptSettings
from dreamgym.models.local.language_model import LocalLanguageModel
from dreamgym.protocols import LanguageModel
from dreamgym.replay.buffer import ReplayBuffer
from dreamgym.rollouts import Origin, run_episode
from dreamgym.types import (
    Completion,
    CompletionRequest,
    Decision,
    Outcome,
    Provenance,
    State,
    Task,
    Trajectory,
    Transition,
    WorldSheet,
)
from tests.models import small_models

MAX_MODULES = 19
TASK = Task(id="a", instruction="open the safe", environment="house")
SHEET = WorldSheet(facts=(("openable", "safe 1"),))


class ModulesInUse:
    """Collects the modules of this package whose functions are called, in all threads."""

    def __init__(self) -> None:
        self.on = False
        self.names: set[str] = set()

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        if self.on and event == "call":
            name = frame.f_globals.get("__name__", "")
            generated = frame.f_code.co_filename == "<string>"  # constructors of dataclasses
            if name.startswith("dreamgym.") and not generated and frame.f_code.co_name != "<module>":
                self.names.add(name.removeprefix("dreamgym."))


class FixedReply:
    """A local model whose completions are computed and then replaced by a valid reply."""

    def __init__(self, inner: LanguageModel, reply: str) -> None:
        self._inner = inner
        self._reply = reply

    async def complete(self, request: CompletionRequest) -> Completion:
        return replace(await self._inner.complete(request), text=self._reply)


class SecondTurn:
    """A policy that switches the counter on for its second turn alone."""

    name = "counted"

    def __init__(self, policy: LanguageModelPolicy, modules: ModulesInUse) -> None:
        self._policy = policy
        self._modules = modules

    async def act(self, task: Task, history: Any, state: State) -> Decision:
        self._modules.on = len(history) == 1
        return await self._policy.act(task, history, state)


def recorded() -> Trajectory:
    state = State(text="You see a safe 1.")
    outcome = Outcome(next_state=State(text="It opens."), reward=1.0, terminated=True, success=True)
    return Trajectory(
        id="past",
        task=replace(TASK, id="b"),
        start=state,
        transitions=(Transition(state=state, action="open safe 1", outcome=outcome),),
        provenance=Provenance(source="real", policy="human"),
    )


async def test_a_turn_in_a_synthetic_environment_passes_at_most_nineteen_modules(tmp_path: Path) -> None:
    modules = ModulesInUse()
    threading.setprofile(modules)
    sys.setprofile(modules)
    try:
        local = LocalLanguageModel(small_models.model(), small_models.tokenizer())
        with ReplayBuffer.open(tmp_path / "replay.sqlite") as buffer:
            await buffer.add(recorded())
            model = ReasoningExperienceModel(
                FixedReply(local, "think: closed.\nchange: + opened safe 1;\nnext: A drawer 1.\nend: no"),
                name="test",
                settings=PromptSettings(demonstrations=1, max_tokens=4),
                retriever=buffer,
            )
            dream = SyntheticFactory(
                model,
                [TASK],
                lambda task, seed: EpisodeStart(sheet=SHEET, state=State(text="A safe 1.")),
                horizon=3,
            )
            played = await run_episode(
                lambda: dream.make(TASK),
                lambda environment: SecondTurn(
                    LanguageModelPolicy(FixedReply(local, " open safe 1"), AgentConfig(max_tokens=4)), modules
                ),
                trajectory_id="t",
                task=TASK,
                seed=0,
                origin=Origin(source="synthetic"),
            )
        await local.aclose()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    assert isinstance(played, Trajectory)
    assert len(played.transitions[1].outcome.info["demonstrations"]) == 1
    assert {"agents", "envs.synthetic", "experience.model"} <= modules.names
    assert {"models.local.scheduler", "replay.index"} <= modules.names  # in worker threads
    assert len(modules.names) <= MAX_MODULES, sorted(modules.names)
