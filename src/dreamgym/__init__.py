"""DreamGym: train LLM agents in a reasoning experience model instead of the real environment.

These are the public names; every other module is internal. They are loaded on first use, so that importing
the package is quick and loads no torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dreamgym.api import audit, collect, evaluate, fine_tune, ingest, learn, rollout, train
    from dreamgym.config import Config, load_config
    from dreamgym.curriculum.entropy import reward_entropy
    from dreamgym.curriculum.task_pool import TaskPool
    from dreamgym.data.datasets import builtin_dataset
    from dreamgym.data.trajectories import read_trajectories
    from dreamgym.envs.registry import EnvironmentSpec, as_environment, make, register
    from dreamgym.errors import DreamGymError
    from dreamgym.protocols import (
        Annotator,
        Embedder,
        Environment,
        EnvironmentFactory,
        ExperienceModel,
        Grader,
        HasExpert,
        HasWorldSheet,
        LanguageModel,
        Policy,
        Retriever,
    )
    from dreamgym.replay.buffer import ReplayBuffer
    from dreamgym.rl.dpo import DPO
    from dreamgym.rl.expert_iteration import ExpertIteration
    from dreamgym.rl.grpo import GRPO
    from dreamgym.rl.ppo import PPO
    from dreamgym.rl.sft import SFT
    from dreamgym.testing import check_environment
    from dreamgym.training.agent import Agent
    from dreamgym.training.dream_loading import Dream
    from dreamgym.training.experience_loading import load_experience_model
    from dreamgym.types import (
        Demonstration,
        Outcome,
        RetrievalFilter,
        RolloutGroup,
        State,
        Task,
        Trajectory,
        Transition,
        WorldSheet,
    )

__version__ = "0.2.0"

_MODULES = {
    "api": ("audit", "collect", "evaluate", "fine_tune", "ingest", "learn", "rollout", "train"),
    "config": ("Config", "load_config"),
    "curriculum.entropy": ("reward_entropy",),
    "curriculum.task_pool": ("TaskPool",),
    "data.datasets": ("builtin_dataset",),
    "data.trajectories": ("read_trajectories",),
    "envs.registry": ("EnvironmentSpec", "as_environment", "make", "register"),
    "errors": ("DreamGymError",),
    "protocols": (
        "Annotator",
        "Embedder",
        "Environment",
        "EnvironmentFactory",
        "ExperienceModel",
        "Grader",
        "HasExpert",
        "HasWorldSheet",
        "LanguageModel",
        "Policy",
        "Retriever",
    ),
    "replay.buffer": ("ReplayBuffer",),
    "rl.dpo": ("DPO",),
    "rl.expert_iteration": ("ExpertIteration",),
    "rl.grpo": ("GRPO",),
    "rl.ppo": ("PPO",),
    "rl.sft": ("SFT",),
    "testing": ("check_environment",),
    "training.agent": ("Agent",),
    "training.dream_loading": ("Dream",),
    "training.experience_loading": ("load_experience_model",),
    "types": (
        "Demonstration",
        "Outcome",
        "RetrievalFilter",
        "RolloutGroup",
        "State",
        "Task",
        "Trajectory",
        "Transition",
        "WorldSheet",
    ),
}
_HOME = {name: module for module, names in _MODULES.items() for name in names}

__all__ = [  # noqa: RUF022 - by subject
    # nouns
    "Task", "State", "Outcome", "Transition", "Trajectory", "RolloutGroup", "WorldSheet", "Demonstration",
    "RetrievalFilter", "DreamGymError",
    # roles
    "Environment", "EnvironmentFactory", "EnvironmentSpec", "HasWorldSheet", "HasExpert", "Policy",
    "LanguageModel", "ExperienceModel", "Annotator", "Grader", "Embedder", "Retriever",
    # parts of the loop
    "Agent", "Dream", "TaskPool", "GRPO", "PPO", "ExpertIteration", "SFT", "DPO", "ReplayBuffer",
    "Config",
    # functions
    "make", "register", "as_environment", "check_environment", "learn", "collect", "ingest", "fine_tune",
    "rollout", "evaluate", "train", "audit", "reward_entropy", "load_config", "load_experience_model",
    "read_trajectories", "builtin_dataset",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
