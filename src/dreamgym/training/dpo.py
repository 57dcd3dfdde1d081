"""DPO as a baseline: the policy is trained on recorded pairs of a success and a failure, without rollouts."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from dreamgym.config import Config
from dreamgym.errors import ConfigError
from dreamgym.training.agent import Agent
from dreamgym.training.metrics import MetricsLog
from dreamgym.training.run_dir import RunDir
from dreamgym.types import Trajectory

STATE = "preference.pt"
_SAVE_EVERY = 20
"""Updates that a crash may cost."""

OnUpdate = Callable[[int, dict[str, Any]], None]


async def train_dpo(
    agent: Agent,
    trajectories: Sequence[Trajectory],
    config: Config,
    folder: RunDir,
    log: MetricsLog,
    on_update: OnUpdate,
) -> int:
    """Makes `train.steps` updates and returns their number. The reference is the policy after its warm
    start."""
    from dreamgym.rl.dpo import DPO, preference_pairs

    settings = config.train
    known = [each for each in trajectories if each.task.split == settings.split]
    pairs = preference_pairs(
        agent.tokenize(known), max_pairs=settings.steps * settings.tasks_per_step, seed=config.seed
    )
    if not pairs:
        raise ConfigError(
            f"learner.algorithm=dpo: expected tasks with both a success and a failure, of {len(known)} "
            f"trajectories of split {settings.split!r} none are; collect several episodes of each task"
        )
    dpo = DPO(
        agent,
        pairs,
        config.learner,
        steps=settings.steps,
        batch_size=settings.tasks_per_step,
        seed=config.seed,
    )
    state = folder.load(STATE)
    if state is not None:
        dpo.load_state_dict(state)
    try:
        while not dpo.done:
            row = dpo.step()
            log.append({"kind": "dpo", "step": dpo.steps, "pairs": len(pairs), **row})
            on_update(dpo.steps, row)
            if dpo.steps % _SAVE_EVERY == 0:
                folder.save(STATE, dpo.state_dict())
            await asyncio.sleep(0)  # a cancelled task stops here
    finally:
        folder.save(STATE, dpo.state_dict())
    return dpo.steps
