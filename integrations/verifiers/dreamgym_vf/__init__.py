"""The environment package `dreamgym-vf`: `vf-eval dreamgym-vf --env.taskset.environment RUN`."""

from dreamgym.integrations.verifiers import (
    DreamGymConfig,
    DreamGymEnv,
    DreamGymEnvConfig,
    DreamGymHarness,
    DreamGymHarnessConfig,
    DreamGymTaskset,
)

__all__ = [
    "DreamGymConfig",
    "DreamGymEnv",
    "DreamGymEnvConfig",
    "DreamGymHarness",
    "DreamGymHarnessConfig",
    "DreamGymTaskset",
]
