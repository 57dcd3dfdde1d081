"""DreamGym: train LLM agents inside a reasoning experience model instead of the real environment.

The public names, and nothing else. They are loaded when first used, so importing the package is quick.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dreamgym.collection import collect
    from dreamgym.config import Config, load_config
    from dreamgym.data.datasets import builtin_dataset
    from dreamgym.data.trajectories import TrajectoryWriter, read_trajectories
    from dreamgym.envs.registry import EnvironmentSpec, open_environment
    from dreamgym.errors import DreamGymError
    from dreamgym.protocols import Embedder, Environment, EnvironmentFactory, Policy, Retriever
    from dreamgym.replay.buffer import ReplayBuffer
    from dreamgym.rollouts import run_episode
    from dreamgym.testing import check_environment
    from dreamgym.types import (
        Demonstration,
        FailureKind,
        Outcome,
        Provenance,
        RetrievalFilter,
        State,
        Task,
        Trajectory,
        Transition,
        WorldSheet,
    )

__version__ = "0.2.0"

_HOME = {
    "collect": "collection",
    "Config": "config",
    "load_config": "config",
    "EnvironmentSpec": "envs.registry",
    "open_environment": "envs.registry",
    "DreamGymError": "errors",
    "Embedder": "protocols",
    "Environment": "protocols",
    "EnvironmentFactory": "protocols",
    "Policy": "protocols",
    "Retriever": "protocols",
    "ReplayBuffer": "replay.buffer",
    "builtin_dataset": "data.datasets",
    "TrajectoryWriter": "data.trajectories",
    "read_trajectories": "data.trajectories",
    "run_episode": "rollouts",
    "check_environment": "testing",
    "Demonstration": "types",
    "FailureKind": "types",
    "Outcome": "types",
    "Provenance": "types",
    "RetrievalFilter": "types",
    "State": "types",
    "Task": "types",
    "Trajectory": "types",
    "Transition": "types",
    "WorldSheet": "types",
}

__all__ = [
    "Config",
    "Demonstration",
    "DreamGymError",
    "Embedder",
    "Environment",
    "EnvironmentFactory",
    "EnvironmentSpec",
    "FailureKind",
    "Outcome",
    "Policy",
    "Provenance",
    "ReplayBuffer",
    "RetrievalFilter",
    "Retriever",
    "State",
    "Task",
    "Trajectory",
    "TrajectoryWriter",
    "Transition",
    "WorldSheet",
    "builtin_dataset",
    "check_environment",
    "collect",
    "load_config",
    "open_environment",
    "read_trajectories",
    "run_episode",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'dreamgym' has no attribute {name!r}")
    return getattr(importlib.import_module(f"dreamgym.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOME])
