"""The warm start: supervised fine-tuning on recorded successes, before reinforcement learning."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from dreamgym.config import Config
from dreamgym.errors import ConfigError
from dreamgym.training.agent import Agent
from dreamgym.training.metrics import MetricsLog
from dreamgym.training.run_dir import METRICS, WARM_START, RunDir
from dreamgym.types import State, Task, Trajectory, Transition, history

if TYPE_CHECKING:
    from dreamgym.rl.sft import SFT

_LOG_EVERY = 10
_SAVE_EVERY = 100
"""Updates that a crash may cost."""

OnUpdate = Callable[[int, dict[str, Any]], None]
Think = Callable[[Task, Sequence[Transition], State], str | None]


async def warm_start(
    agent: Agent,
    trajectories: Sequence[Trajectory],
    config: Config,
    folder: RunDir,
    on_update: OnUpdate,
    *,
    refusals: Collection[str] = (),
    think: Think | None = None,
) -> None:
    """Fine-tunes the agent on successful trajectories. A refused action is context and the action after
    it is trained: without such turns a refused policy repeats itself, since experts are never refused."""
    sft = make_sft(agent, trajectories, config, refusals=refusals, think=think)
    state = folder.load(WARM_START)
    if state is not None:
        sft.load_state_dict(state)
    started = time.perf_counter() - seconds_of(state)

    def save() -> None:
        folder.save(WARM_START, sft.state_dict() | {"seconds": time.perf_counter() - started})

    with MetricsLog(folder.path / METRICS) as log:
        try:
            while not sft.done:
                row = sft.step()
                if sft.steps % _LOG_EVERY == 0 or sft.done:
                    log.append(
                        {
                            "kind": "warm start",
                            "step": sft.steps,
                            "trajectories": len(sft.packed.sequences),
                            **row,
                        }
                    )
                    on_update(sft.steps, row)
                if sft.steps % _SAVE_EVERY == 0:
                    save()
                await asyncio.sleep(0)  # a cancelled task stops here
        finally:
            save()


def make_sft(
    agent: Agent,
    trajectories: Sequence[Trajectory],
    config: Config,
    *,
    refusals: Collection[str] = (),
    think: Think | None = None,
) -> SFT:
    """The supervised fine-tuning of a warm start, by the settings ``train.warm_start_*``."""
    from dreamgym.rl.sft import SFT

    settings = config.train
    successes = [each for each in trajectories if each.success]
    if settings.warm_start_successes is not None and settings.warm_start_successes < len(successes):
        successes = random.Random(config.seed).sample(successes, settings.warm_start_successes)
    if config.agent.thought and think is not None:
        successes = [with_thoughts(each, think) for each in successes]
    data = agent.tokenize(successes)
    if not data:
        raise ConfigError(
            f"expected successes to imitate, of {len(trajectories)} trajectories {len(successes)} succeed "
            "and none fits the model's context; name others in train.data, or set train.warm_start_steps=0"
        )
    chosen = {"learning_rate": settings.warm_start_lr, "muon_lr": settings.warm_start_muon_lr}
    rates: dict[str, Any] = agent.sft_rates | {
        name: rate for name, rate in chosen.items() if rate is not None
    }
    return SFT(
        agent,
        data,
        config.learner,
        steps=settings.warm_start_steps,
        batch_size=settings.warm_start_batch_size,
        seed=config.seed,
        loss_mask=lambda turn: turn.outcome.next_state.text not in refusals,
        **rates,
    )


def with_thoughts(trajectory: Trajectory, think: Think) -> Trajectory:
    """The same trajectory; turns without a thought get that of `think`."""
    return replace(
        trajectory,
        transitions=tuple(
            turn if turn.thought else replace(turn, thought=think(trajectory.task, past, turn.state))
            for past, turn in history(trajectory)
        ),
    )


def seconds_of(state: Mapping[str, Any] | None) -> float:
    """Training time of a saved warm start, without preparation."""
    return float(state.get("seconds", 0.0)) if state is not None else 0.0
