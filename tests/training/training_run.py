"""A small run of the loop in corridors, in a process of its own or not: what the tests of training share."""

from __future__ import annotations

import asyncio
import resource
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from dreamgym.config import Config, load_config
from dreamgym.data.trajectories import TrajectoryWriter
from dreamgym.envs.scripted_policies import make_policy
from dreamgym.rollouts import run_episode
from dreamgym.testing import CorridorFactory
from dreamgym.training.trainer import train
from dreamgym.types import (
    Outcome,
    Prediction,
    State,
    Task,
    Trajectory,
    Transition,
    WorldSheet,
)

SMALL = [
    "environment.name=corridor",
    "agent.model=nano",
    "agent.vocabulary=320",
    "agent.max_tokens=4",
    "train.mode=real",
    "train.horizon=6",
    "train.warm_start_steps=60",
    "train.warm_start_lr=0.003",
    "train.warm_start_muon_lr=0.02",
    "train.warm_start_batch_size=8",
    "train.steps=4",
    "train.tasks_per_step=2",
    "train.group_size=4",
    "train.save_policy_every=2",
    "learner.learning_rate=0.001",
]
FACTORY = CorridorFactory(length=4, horizon=6)
_ENDLESS = CorridorFactory(length=4, horizon=1000)


def settings(folder: Path, *overrides: str) -> Config:
    """A run in `folder`, of the corridors recorded next to it."""
    named = [f'train.data=["{folder.parent / "offline"}"]', f'train.out="{folder / "run"}"']
    return load_config(overrides=[*SMALL, *named, *overrides])


async def record(folder: Path) -> None:
    """The expert's episodes of all training tasks."""
    with TrajectoryWriter(folder) as writer:
        for number, task in enumerate(await FACTORY.tasks("train")):
            played = await run_episode(
                lambda task=task: FACTORY.make(task),  # type: ignore[misc]
                lambda environment: make_policy("expert", environment, seed=0),
                trajectory_id=f"offline-{number}",
                task=task,
                seed=0,
            )
            assert isinstance(played, Trajectory)
            writer.append([played])


class CorridorDream:
    """An experience model that knows the rules of corridors, and takes what is where from the sheet."""

    name = "corridor dream"

    async def imagine_start(self, task: Task, sheet: WorldSheet) -> State:
        return State(text=f"You are at door {task.parameters['start']} of 4.")

    async def predict(
        self, task: Task, sheet: WorldSheet, history: Sequence[Transition], state: State, action: str
    ) -> Prediction:
        way_out = next(int(fact[1].split()[1]) for fact in sheet.facts if fact[0] == "unlocked")
        corridor = _ENDLESS.make(replace(task, parameters={**task.parameters, "way_out": way_out}))
        await corridor.start()
        for past in history:
            await corridor.step(past.action)
        outcome = await corridor.step(action)
        seen = State(text=outcome.next_state.text)
        return Prediction(
            outcome=Outcome(
                next_state=seen,
                reward=outcome.reward,
                terminated=outcome.terminated,
                success=outcome.success,
                reasoning="",
            ),
            sheet=sheet,
        )


async def run(config: Config, **changes: Any) -> dict[str, Any]:
    import torch

    torch.set_num_threads(1)
    given: dict[str, Any] = {"real": FACTORY}
    if config.train.mode == "dream":
        given["experience_model"] = CorridorDream()
    return await train(config, **given, **changes)


def in_a_process(folder: Path, overrides: Sequence[str], room: int | None = None) -> None:
    """The whole life of a process that trains; no file that it writes can have more than `room` bytes."""
    if room is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (room, room))
    asyncio.run(run(settings(folder, *overrides)))
