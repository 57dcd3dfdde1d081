"""Smoke test of a language model as experience model: do its replies parse, and are they the same when
repeated? A difference between two replays of the same actions is noise in the reward of a policy."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from dreamgym.data.datasets import builtin_dataset
from dreamgym.data.trajectories import read_trajectories
from dreamgym.errors import EpisodeFailedError
from dreamgym.protocols import ExperienceModel
from dreamgym.types import Trajectory, WorldSheet

TASK_ENVIRONMENT = "alfworld"
_STEPS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class SmokeTest:
    """The result of `try_out`."""

    asked: int
    readable: int
    """Replies that parse."""
    agreeing: int
    """Steps, of `steps`, for which all replays have the same next state."""
    steps: int
    exact: int
    """Steps for which the first replay has the real next state, word for word."""
    problem: str = ""
    """Of the first reply that does not parse."""


def sample_episode() -> Trajectory:
    """A successful episode of the shipped trajectories."""
    found = read_trajectories(builtin_dataset(TASK_ENVIRONMENT))
    return next(each for each in found if each.success and len(each) >= _STEPS)


async def try_out(model: ExperienceModel, episode: Trajectory, *, replays: int = 3) -> SmokeTest:
    """Predict the first steps of a real episode, each with its real history, `replays` times."""
    steps = range(min(_STEPS, len(episode)))
    # One after the other: equal requests at the same time would be sent once.
    rounds = [
        await asyncio.gather(*(_outcome(model, episode, step) for step in steps)) for _ in range(replays)
    ]
    states = [[text for text, _ in each] for each in rounds]
    problems = [problem for each in rounds for _, problem in each if problem]
    real = [turn.outcome.next_state.text for turn in episode.transitions]
    return SmokeTest(
        asked=len(rounds) * len(steps),
        readable=sum(text is not None for each in states for text in each),
        agreeing=sum(_agree([each[step] for each in states]) for step in steps),
        steps=len(steps),
        exact=sum(states[0][step] == real[step] for step in steps),
        problem=problems[0] if problems else "",
    )


def _agree(states: Sequence[str | None]) -> bool:
    return states[0] is not None and len(set(states)) == 1


async def _outcome(model: ExperienceModel, episode: Trajectory, step: int) -> tuple[str | None, str]:
    turn = episode.transitions[step]
    sheet = episode.sheet or WorldSheet(facts=())
    past = episode.transitions[:step]
    try:
        found = await model.predict(episode.task, sheet, past, turn.state, turn.action)
    except EpisodeFailedError as error:
        return None, str(error)
    return found.outcome.next_state.text, ""
