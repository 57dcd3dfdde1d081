"""Lets a language model dream a few steps of a shipped episode, several times: can it serve, and does it
say the same again?

What differs between two replays of the same actions is luck that a policy would be rewarded for.
"""

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
    """What came of it."""

    asked: int
    readable: int
    """Replies that give a next state."""
    agreeing: int
    """Steps on which all replays gave the same readable outcome, of `steps`."""
    steps: int
    exact: int
    """Steps on which the first replay told the real next state, word for word."""
    problem: str = ""
    """Of the first reply that could not be read."""


def sample_episode() -> Trajectory:
    """A short success of the shipped trajectories."""
    found = read_trajectories(builtin_dataset(TASK_ENVIRONMENT))
    return next(each for each in found if each.success and len(each) >= _STEPS)


async def try_out(model: ExperienceModel, episode: Trajectory, *, replays: int = 3) -> SmokeTest:
    """Ask about the first steps of a real episode, each with its real past, in `replays` rounds."""
    steps = range(min(_STEPS, len(episode)))
    # One round after the other: equal questions in flight would be asked once.
    rounds = [
        await asyncio.gather(*(_outcome(model, episode, step) for step in steps)) for _ in range(replays)
    ]
    told = [[text for text, _ in each] for each in rounds]
    problems = [problem for each in rounds for _, problem in each if problem]
    real = [turn.outcome.next_state.text for turn in episode.transitions]
    return SmokeTest(
        asked=len(rounds) * len(steps),
        readable=sum(text is not None for each in told for text in each),
        agreeing=sum(_agree([each[step] for each in told]) for step in steps),
        steps=len(steps),
        exact=sum(told[0][step] == real[step] for step in steps),
        problem=problems[0] if problems else "",
    )


def _agree(told: Sequence[str | None]) -> bool:
    return told[0] is not None and len(set(told)) == 1


async def _outcome(model: ExperienceModel, episode: Trajectory, step: int) -> tuple[str | None, str]:
    turn = episode.transitions[step]
    sheet = episode.sheet or WorldSheet(facts=())
    past = episode.transitions[:step]
    try:
        found = await model.predict(episode.task, sheet, past, turn.state, turn.action)
    except EpisodeFailedError as error:
        return None, str(error)
    return found.outcome.next_state.text, ""
