"""Plays episodes: a policy and an environment in, a trajectory (or a counted failure) out."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

from dreamgym.errors import EpisodeFailedError
from dreamgym.protocols import Environment, Policy, RevealingEnvironment
from dreamgym.types import (
    FailureKind,
    Provenance,
    RolloutFailure,
    State,
    Task,
    Trajectory,
    Transition,
    WorldSheet,
)

MakeEnvironment = Callable[[], Environment]
MakePolicy = Callable[[Environment], Policy]


async def roll_out(
    make_environment: MakeEnvironment,
    make_policy: MakePolicy,
    *,
    trajectory_id: str,
    task: Task,
    seed: int,
    retries: int = 2,
    keep_admissible_actions: bool = True,
    keep_world_sheet: bool = True,
) -> Trajectory | RolloutFailure:
    """One episode from start to end. An environment that breaks is replaced, at most `retries` times."""
    kind, message = FailureKind.CRASHED, ""
    for _ in range(1 + retries):
        environment = make_environment()
        try:
            trajectory = await _play(
                environment, make_policy(environment), trajectory_id, seed, keep_world_sheet
            )
        except EpisodeFailedError as error:
            kind, message = error.kind, str(error)
        else:
            return trajectory if keep_admissible_actions else _without_admissible_actions(trajectory)
        finally:
            await environment.aclose()
    return RolloutFailure(task=task, kind=kind, message=message, attempts=1 + retries)


async def _play(
    environment: Environment, policy: Policy, trajectory_id: str, seed: int, keep_world_sheet: bool
) -> Trajectory:
    start = state = await environment.start()
    sheet: WorldSheet | None = None
    if keep_world_sheet and isinstance(environment, RevealingEnvironment):
        sheet = await environment.world_sheet()
    transitions: list[Transition] = []
    over = False
    while not over:
        decision = await policy.act(environment.task, transitions, state)
        outcome = await environment.step(decision.action)
        transitions.append(
            Transition(state=state, action=decision.action, outcome=outcome, thought=decision.thought)
        )
        state, over = outcome.next_state, outcome.over
    return Trajectory(
        id=trajectory_id,
        task=environment.task,
        start=start,
        transitions=tuple(transitions),
        provenance=Provenance(source="real", policy=policy.name, recorded_at=time.time()),
        seed=seed,
        sheet=sheet,
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
