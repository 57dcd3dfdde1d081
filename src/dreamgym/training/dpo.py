"""DPO as a baseline: the policy learns from recorded pairs of a success and a failure, and plays nothing."""

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
_KEPT_EVERY = 20
"""Updates that a crash may cost."""

OnUpdate = Callable[[int, dict[str, Any]], None]


async def prefer(
    policy: Agent,
    trajectories: Sequence[Trajectory],
    config: Config,
    folder: RunDir,
    log: MetricsLog,
    on_update: OnUpdate,
) -> int:
    """`train.steps` updates on pairs of one task each, `train.tasks_per_step` at a time; how many were made.

    What was begun is gone on with. The reference is the policy as it is now: that of the warm start.

    Raises:
        ConfigError: no task has both a success and a failure.
    """
    from dreamgym.rl.dpo import DPOLearner, DPOSettings, preference_pairs

    chosen, learner = config.train, config.learner
    settings = DPOSettings(
        steps=chosen.steps,
        batch=chosen.tasks_per_step,
        beta=learner.beta,
        learning_rate=learner.learning_rate,
        muon_lr=learner.muon_lr,
        gradient_clip=learner.gradient_clip,
        micro_tokens=learner.micro_tokens,
        seed=config.seed,
    )
    known = [each for each in trajectories if each.task.split == chosen.split]
    pairs = preference_pairs(policy.tokenize(known), most=settings.steps * settings.batch, seed=config.seed)
    if not pairs:
        raise ConfigError(
            f"learner.algorithm=dpo: expected tasks with both a success and a failure, of {len(known)} "
            f"trajectories of split {chosen.split!r} none are; collect several episodes of each task"
        )
    dpo = DPOLearner(policy.model, pairs, settings, updating=policy.updating)
    state = folder.load(STATE)
    if state is not None:
        dpo.load_state_dict(state)
    try:
        while not dpo.done:
            row = dpo.step()
            log.append({"kind": "preference", "step": dpo.steps, "pairs": len(pairs), **row})
            on_update(dpo.steps, row)
            if dpo.steps % _KEPT_EVERY == 0:
                folder.save(STATE, dpo.state_dict())
            await asyncio.sleep(0)  # where Ctrl-C gets through
    finally:
        folder.save(STATE, dpo.state_dict())
    return dpo.steps
