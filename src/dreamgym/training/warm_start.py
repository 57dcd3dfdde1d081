"""The warm start: before it practises, the policy imitates recorded successes."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

from dreamgym.config import Config
from dreamgym.errors import ConfigError
from dreamgym.training.agent import Agent
from dreamgym.training.metrics import MetricsLog
from dreamgym.training.run_dir import METRICS, WARM_START, RunDir
from dreamgym.types import State, Task, Trajectory, Transition, history

_TOLD_EVERY = 10
_KEPT_EVERY = 100
"""Updates that a crash may cost."""

OnUpdate = Callable[[int, dict[str, Any]], None]
Think = Callable[[Task, Sequence[Transition], State], str | None]


async def warm_start(
    policy: Agent,
    trajectories: Sequence[Trajectory],
    config: Config,
    folder: RunDir,
    on_update: OnUpdate,
    *,
    refusals: Collection[str] = (),
    think: Think | None = None,
) -> None:
    """Teach `policy` what successful trajectories did; a warm start that was begun is gone on with.

    An action that was refused is not imitated; what was done after it is. Without that, a policy that is told
    no says the same again, since experts are never told no.

    Args:
        refusals: the texts by which the environment says no.
        think: writes the thoughts of turns that have none, for an agent that thinks before it acts.

    Raises:
        ConfigError: no success is there to learn from.
    """
    from dreamgym.rl.sft import SFTLearner, SFTSettings

    chosen = config.train
    successes = imitated(trajectories, chosen.warm_start_successes, config.seed)
    if config.agent.thought and think is not None:
        successes = [thoughtful(each, think) for each in successes]
    lessons = policy.tokenize(successes)
    if not lessons:
        raise ConfigError(
            f"expected successes to imitate, of {len(trajectories)} trajectories {len(successes)} succeed "
            "and none fits the model's context; name others in train.data, or set train.warm_start_steps=0"
        )
    learner = SFTLearner(
        policy.model,
        lessons,
        SFTSettings(
            steps=chosen.warm_start_steps,
            batch=chosen.warm_start_batch_size,
            learning_rate=chosen.warm_start_lr,
            muon_lr=chosen.warm_start_muon_lr,
            micro_tokens=config.learner.micro_tokens,
            seed=config.seed,
        ),
        untaught=lambda turn: turn.outcome.next_state.text in refusals,
        updating=policy.updating,
    )
    state = folder.load(WARM_START)
    if state is not None:
        learner.load_state_dict(state)
    began = time.perf_counter() - seconds_of(state)

    def keep() -> None:
        folder.save(WARM_START, learner.state_dict() | {"seconds": time.perf_counter() - began})

    with MetricsLog(folder.path / METRICS) as log:
        try:
            while not learner.done:
                row = learner.step()
                if learner.steps % _TOLD_EVERY == 0 or learner.done:
                    log.append({"kind": "warm start", "step": learner.steps, "lessons": len(lessons), **row})
                    on_update(learner.steps, row)
                if learner.steps % _KEPT_EVERY == 0:
                    keep()
                await asyncio.sleep(0)  # where Ctrl-C gets through
        finally:
            keep()


def imitated(trajectories: Sequence[Trajectory], most: int | None, seed: int) -> list[Trajectory]:
    """The successes, or so many of them, chosen by the seed: where logs are many, few may be worth it."""
    successes = [each for each in trajectories if each.success]
    if most is None or most >= len(successes):
        return successes
    return random.Random(seed).sample(successes, most)


def thoughtful(trajectory: Trajectory, think: Think) -> Trajectory:
    """The same, with a thought in every turn that has one to have."""
    return replace(
        trajectory,
        transitions=tuple(
            turn if turn.thought else replace(turn, thought=think(trajectory.task, past, turn.state))
            for past, turn in history(trajectory)
        ),
    )


def seconds_of(state: Mapping[str, Any] | None) -> float:
    """What a kept warm start has taken, up to when it was kept; preparations apart."""
    return float(state.get("seconds", 0.0)) if state is not None else 0.0
