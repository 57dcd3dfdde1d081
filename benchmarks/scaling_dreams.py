"""Experience models for `scaling.py` and `asynchronous.py`, which compute or wait or both, and a job. Workers
import this module."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

from dreamgym.config import Config
from dreamgym.protocols import ExperienceModel
from dreamgym.testing import CorridorFactory
from dreamgym.types import CompletionRequest, Outcome, Prediction, State, Task, Transition, WorldSheet

LENGTH, HORIZON = 12, 10
CORRIDORS = CorridorFactory(length=LENGTH, horizon=HORIZON)
_ENDLESS = CorridorFactory(length=LENGTH, horizon=1000)
_TOKENS = 40


class Rules:
    """Answers by the rules of the corridor, so that all episodes are alike whatever the model writes."""

    name = "rules"

    async def imagine_start(self, task: Task, sheet: WorldSheet) -> State:
        return State(text=f"You are at door {task.parameters['start']} of {LENGTH}.")

    async def predict(
        self, task: Task, sheet: WorldSheet, history: Sequence[Transition], state: State, action: str
    ) -> Prediction:
        way_out = next(int(fact[1].split()[1]) for fact in sheet.facts if fact[0] == "unlocked")
        corridor = _ENDLESS.make(replace(task, parameters={**task.parameters, "way_out": way_out}))
        await corridor.start()
        for past in history:
            await corridor.step(past.action)
        outcome = await corridor.step(action)
        shown = State(text=outcome.next_state.text)
        return Prediction(
            outcome=Outcome(next_state=shown, reward=0.0, terminated=False, success=False, reasoning=""),
            sheet=sheet,
        )


class Computing(Rules):
    """Writes 40 tokens with an untrained local model before each answer."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._model: Any = None

    async def predict(
        self, task: Task, sheet: WorldSheet, history: Sequence[Transition], state: State, action: str
    ) -> Prediction:
        if self._model is None:
            from dreamgym.models.local.language_model import LocalLanguageModel

            self._model = LocalLanguageModel.load(self._folder)
        prompt = f"{task.instruction}\n{state.text}\n> {action}\n"
        await self._model.complete(
            CompletionRequest(prompt=prompt, max_tokens=_TOKENS, temperature=1.0, seed=0)
        )
        return await super().predict(task, sheet, history, state, action)

    def __getstate__(self) -> dict[str, Any]:
        return {"_folder": self._folder, "_model": None}


class Waiting(Rules):
    """Waits like an endpoint: between 0.5 and 2 seconds a reply."""

    async def predict(
        self, task: Task, sheet: WorldSheet, history: Sequence[Transition], state: State, action: str
    ) -> Prediction:
        await _latency(task, history, action)
        return await super().predict(task, sheet, history, state, action)


class Delayed:
    """The experience model of a run's settings, whose replies take 0.5 to 2 seconds longer."""

    def __init__(self, config: Config) -> None:
        """Demonstrations come from the replay buffer in the directory of this run."""
        self._config = config
        self._model: ExperienceModel | None = None

    @property
    def name(self) -> str:
        return str(self._config.train.experience)

    async def imagine_start(self, task: Task, sheet: WorldSheet) -> State:
        return await self._loaded().imagine_start(task, sheet)

    async def predict(
        self, task: Task, sheet: WorldSheet, history: Sequence[Transition], state: State, action: str
    ) -> Prediction:
        await _latency(task, history, action)
        return await self._loaded().predict(task, sheet, history, state, action)

    def _loaded(self) -> ExperienceModel:
        if self._model is None:
            from dreamgym.replay.buffer import ReplayBuffer
            from dreamgym.training.dream_loading import Dream, read_data
            from dreamgym.training.run_dir import BUFFER
            from dreamgym.training.settings_check import resolve_settings

            config = resolve_settings(self._config)
            buffer = ReplayBuffer.open_configured(config.train.out / BUFFER, config.replay, create=False)
            data = read_data(config.train.data)
            self._model = Dream.create(config, data, buffer).experience_model
        return self._model

    def __getstate__(self) -> dict[str, Any]:
        return {"_config": self._config, "_model": None}


async def _latency(task: Task, history: Sequence[Transition], action: str) -> None:
    await asyncio.sleep(random.Random(f"{task.id}/{len(history)}/{action}").uniform(0.5, 2.0))


@dataclass(frozen=True)
class Wait:
    """A job that takes a while and nothing else."""

    seconds: ClassVar[float] = 0.5
    name: str = "wait"

    async def run(self, state: Any) -> None:
        await asyncio.sleep(self.seconds)
