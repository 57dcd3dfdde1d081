"""The warm start: supervised fine-tuning on recorded successes, before reinforcement learning."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from dreamgym.config import Config
from dreamgym.errors import ConfigError
from dreamgym.protocols import EnvironmentFactory
from dreamgym.rollouts import GroupSettings, Origin, run_groups
from dreamgym.seeding import derive_seed
from dreamgym.training.agent import Agent
from dreamgym.training.metrics import MetricsLog
from dreamgym.training.run_dir import METRICS, WARM_START, RunDir
from dreamgym.types import State, Task, Trajectory, Transition, history

if TYPE_CHECKING:
    from dreamgym.rl.sft import SFT

_LOG_EVERY = 10
_SAVE_EVERY = 100
"""Updates that a crash may cost."""

_CHECK_FROM = 30
"""Updates before the first measurement of success in the dream."""
_CHECK_TASKS = 64
CHECK = "warm start check"
"""The kind of their rows in the metrics."""

Enough = Callable[[int], Awaitable[tuple[float, bool]]]
"""Takes the number of updates; returns success in the dream, and whether it is enough to practise from."""
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
    enough: Enough | None = None,
) -> None:
    """Fine-tunes the agent on successful trajectories. When `enough` says so, it ends, after
    `train.warm_start_cooldown` more updates, over which the learning rate falls; without any, the agent gets
    the weights of the last or the last but one measurement, whichever is nearer to what was wanted. A refused
    action is context and the action after it is trained: without such turns a refused policy repeats itself,
    since experts are never refused."""
    sft = make_sft(agent, trajectories, config, refusals=refusals, think=think)
    state = folder.load(WARM_START)
    if state is not None:
        sft.load_state_dict(state)
    started = time.perf_counter() - seconds_of(state)
    found = {name: state[name] for name in ("end", "measured") if name in state} if state else {}
    sft.total_steps = found.get("end", sft.total_steps)

    def save() -> None:
        folder.save(WARM_START, sft.state_dict() | found | {"seconds": time.perf_counter() - started})

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
                due = sft.steps >= _CHECK_FROM and sft.steps % config.train.warm_start_check_every == 0
                if enough is not None and due and not sft.done and "end" not in found:
                    success, reached = await enough(sft.steps)
                    log.append({"kind": CHECK, "step": sft.steps, "success": success})
                    found["measured"] = [*found.get("measured", [])[-1:], (success, agent.weights())]
                    if reached:
                        found["end"] = sft.total_steps = min(
                            sft.total_steps, sft.steps + round(sft.steps * config.train.warm_start_cooldown)
                        )
                await asyncio.sleep(0)  # a cancelled task stops here
        finally:
            save()
    if "end" in found and not config.train.warm_start_cooldown:
        wanted = config.train.warm_start_success or 0.0
        agent.restore(min(found["measured"], key=lambda each: abs(each[0] - wanted))[1])


def reaches(
    share: float,
    agent: Agent,
    factory: EnvironmentFactory,
    tasks: Sequence[Task],
    seed: int,
    *,
    temperature: float | None = None,
) -> Enough:
    """Whether this share of episodes succeeds in the dream; other tasks at each measurement.

    Args:
        temperature: of the policy; None: that of practice.
    """

    async def enough(updates: int) -> tuple[float, bool]:
        number = derive_seed(seed, "warm start", updates)
        report = await run_groups(
            factory,
            agent.policy_factory(temperature=temperature),
            random.Random(number).sample(tasks, min(_CHECK_TASKS, len(tasks))),
            name=f"warm-start-{updates}",
            seed=number,
            settings=GroupSettings(size=1),
            origin=Origin(source="synthetic"),
        )
        played = [each.success for group in report.groups for each in group.trajectories]
        success = sum(played) / len(played) if played else 0.0
        return success, success >= share

    return enough


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
    data = recorded_successes(agent, trajectories, config, think)
    if not data:
        succeed = sum(each.success for each in trajectories)
        raise ConfigError(
            f"expected successes to imitate, of {len(trajectories)} trajectories {succeed} succeed "
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


def recorded_successes(
    agent: Agent, trajectories: Sequence[Trajectory], config: Config, think: Think | None
) -> list[Trajectory]:
    """With tokens; at most ``train.warm_start_successes``."""
    successes = [each for each in trajectories if each.success]
    most = config.train.warm_start_successes
    if most is not None and most < len(successes):
        successes = random.Random(config.seed).sample(successes, most)
    if config.agent.thought and think is not None:
        successes = [with_thoughts(each, think) for each in successes]
    return agent.tokenize(successes)


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
