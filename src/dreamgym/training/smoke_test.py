"""Smoke test of an endpoint as experience model: its replies are readable, and equal when requested again.

A difference between two replays of the same actions is noise in the reward of a policy.
"""

from __future__ import annotations

import asyncio

from dreamgym.config import Config, EndpointConfig
from dreamgym.data.datasets import builtin_dataset
from dreamgym.data.trajectories import read_trajectories
from dreamgym.envs.registry import find_environment
from dreamgym.errors import EpisodeFailedError
from dreamgym.experience.model import ModelVerdict
from dreamgym.models.endpoint.capabilities import Finding
from dreamgym.models.registry import ENDPOINT, LanguageModels
from dreamgym.protocols import ExperienceModel
from dreamgym.training.experience_loading import open_prompted_model
from dreamgym.types import Trajectory, WorldSheet

_ENVIRONMENT = "alfworld"
_STEPS, _REPLAYS = 4, 3
_MAX_TOKENS = 512


def sample_episode() -> Trajectory:
    """A successful episode of the shipped trajectories."""
    found = read_trajectories(builtin_dataset(_ENVIRONMENT))
    return next(each for each in found if each.success and len(each) >= _STEPS)


async def check_as_experience_model(settings: EndpointConfig) -> Finding:
    """Predict the first steps of a real episode, each with its real history, three times."""
    config = Config.model_validate(
        {
            "environment": {"name": _ENVIRONMENT},
            # Without the cache: a cached reply shows nothing about the next one.
            "endpoints": {"checked": settings.model_copy(update={"cache": None})},
            "prompted": {"attempts": 1, "max_tokens": min(_MAX_TOKENS, settings.context_length // 4)},
            "replay": {"k": 0},
        }
    )
    episode, steps = sample_episode(), range(_STEPS)
    async with LanguageModels(config) as models:
        model = open_prompted_model(
            *(f"{ENDPOINT}checked", models, config, find_environment(_ENVIRONMENT)), grader=ModelVerdict()
        )
        # One replay after the other: equal requests at the same time would be sent once.
        replays = [
            await asyncio.gather(*(_next_state(model, episode, step) for step in steps))
            for _ in range(_REPLAYS)
        ]
    states = [[state for state, _ in replay] for replay in replays]
    problems = [problem for replay in replays for _, problem in replay if problem]
    total, readable = _REPLAYS * _STEPS, _REPLAYS * _STEPS - len(problems)
    agreeing = sum(found[0] is not None and len(set(found)) == 1 for found in zip(*states, strict=True))
    exact = sum(states[0][step] == episode.transitions[step].outcome.next_state.text for step in steps)
    return Finding(
        name="as experience model",
        good=True if readable == total and agreeing == _STEPS else None,
        detail=f"{readable} of {total} replies readable; replays agree on {agreeing} of {_STEPS} steps, "
        f"{exact} equal to the real step" + (f"; {problems[0]}" if problems else ""),
    )


async def _next_state(model: ExperienceModel, episode: Trajectory, step: int) -> tuple[str | None, str]:
    turn = episode.transitions[step]
    sheet = episode.sheet or WorldSheet(facts=())
    try:
        found = await model.predict(episode.task, sheet, episode.transitions[:step], turn.state, turn.action)
    except EpisodeFailedError as error:
        return None, str(error)
    return found.outcome.next_state.text, ""
