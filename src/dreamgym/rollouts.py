"""Plays episodes: a policy and an environment in, a trajectory (or a counted failure) out."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace

from dreamgym.errors import EndpointError, EpisodeFailedError
from dreamgym.protocols import Environment, Policy, find_world_sheet
from dreamgym.types import (
    Decision,
    FailureKind,
    Provenance,
    RolloutFailure,
    Source,
    State,
    Task,
    Trajectory,
    Transition,
)

MakeEnvironment = Callable[[], Environment]
MakePolicy = Callable[[Environment], Policy]


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """When an episode is ended from outside. The horizon, a count of steps, is the environment's own."""

    seconds: float | None = None
    """By the clock. Who is late has failed (`timeout`): a busy machine must not look like a bad policy."""
    tokens: int | None = None
    """Sampled by the policy; at the end of the turn that reaches it the episode is truncated."""
    repeated_states: int | None = None
    """The episode is truncated when the same state has come this often."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """What the provenance of a rollout says, apart from the policy's name and the time."""

    source: Source = "real"
    experience_model: str | None = None
    policy_version: int = 0


NO_LIMITS = Limits()
REAL = Origin()


async def run_episode(
    make_environment: MakeEnvironment,
    make_policy: MakePolicy,
    *,
    trajectory_id: str,
    task: Task,
    seed: int,
    retries: int = 2,
    keep_admissible_actions: bool = True,
    keep_world_sheet: bool = True,
    limits: Limits = NO_LIMITS,
    origin: Origin = REAL,
) -> Trajectory | RolloutFailure:
    """One episode from start to end. An environment that breaks is replaced, at most `retries` times."""
    kind, message = FailureKind.CRASHED, ""
    for _ in range(1 + retries):
        environment = make_environment()
        try:
            async with asyncio.timeout(limits.seconds) as clock:
                policy = make_policy(environment)
                trajectory = await _play(
                    environment, policy, trajectory_id, seed, keep_world_sheet, limits, origin
                )
        except EpisodeFailedError as error:
            kind, message = error.kind, str(error)
        except EndpointError as error:
            kind, message = FailureKind.SERVER_DOWN, str(error)
        except TimeoutError:
            if not clock.expired():
                raise
            kind, message = FailureKind.TIMEOUT, f"the episode was not over after {limits.seconds:g} seconds"
        else:
            return trajectory if keep_admissible_actions else _without_admissible_actions(trajectory)
        finally:
            await environment.aclose()
    return RolloutFailure(task=task, kind=kind, message=message, attempts=1 + retries)


async def _play(
    environment: Environment,
    policy: Policy,
    trajectory_id: str,
    seed: int,
    keep_world_sheet: bool,
    limits: Limits,
    origin: Origin,
) -> Trajectory:
    start = state = await environment.start()
    facts = find_world_sheet(environment) if keep_world_sheet else None
    sheet = await facts.world_sheet() if facts is not None else None
    watch = _Watch(limits, start)
    transitions: list[Transition] = []
    over = False
    while not over:
        decision = await policy.act(environment.task, transitions, state)
        outcome = await environment.step(decision.action)
        if watch.ends(decision, outcome.next_state) and not outcome.over:
            outcome = replace(outcome, truncated=True)
        transitions.append(
            Transition(
                state=state,
                action=decision.action,
                outcome=outcome,
                thought=decision.thought,
                completion=decision.completion,
            )
        )
        state, over = outcome.next_state, outcome.over
    return Trajectory(
        id=trajectory_id,
        task=environment.task,
        start=start,
        transitions=tuple(transitions),
        provenance=Provenance(
            source=origin.source,
            policy=policy.name,
            policy_version=origin.policy_version,
            experience_model=origin.experience_model,
            recorded_at=time.time(),
        ),
        seed=seed,
        sheet=sheet,
    )


class _Watch:
    """Counts what an episode's limits are about."""

    def __init__(self, limits: Limits, start: State) -> None:
        self._limits = limits
        self._tokens = 0
        self._seen = Counter([start.text])

    def ends(self, decision: Decision, state: State) -> bool:
        self._seen[state.text] += 1
        self._tokens += len(decision.completion.token_ids) if decision.completion is not None else 0
        repeated, tokens = self._limits.repeated_states, self._limits.tokens
        return (repeated is not None and self._seen[state.text] >= repeated) or (
            tokens is not None and self._tokens >= tokens
        )


def _without_admissible_actions(trajectory: Trajectory) -> Trajectory:
    def bare(state: State) -> State:
        return replace(state, admissible_actions=None)

    transitions = tuple(
        replace(
            transition,
            state=bare(transition.state),
            outcome=replace(transition.outcome, next_state=bare(transition.outcome.next_state)),
        )
        for transition in trajectory.transitions
    )
    return replace(trajectory, start=bare(trajectory.start), transitions=transitions)
