"""Any `gymnasium.Env` with text observations and actions as a real environment (extra `gymnasium`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from dreamgym.envs.registry import EnvironmentSpec, as_environment, register
from dreamgym.errors import ConfigError, MissingExtraError
from dreamgym.types import Task


def from_gymnasium(
    environment: str | Callable[..., Any] | Any,
    *,
    name: str | None = None,
    tasks: Sequence[Task | str] | Mapping[str, Sequence[Task | str]] | None = None,
    horizon: int | None = None,
    **roles: Any,
) -> EnvironmentSpec:
    """Register a Gymnasium environment; `make(spec.name)` opens it.

    Args:
        environment: a Gymnasium id (``"Blackjack-v1"``), a `gymnasium.Env` class or instance, or a function
            that returns one. Each episode uses an instance of its own; `reset` receives the task's seed.
        name: by default the Gymnasium id, or the class name in lower case.
        tasks, horizon, roles: as in `as_environment`.

    Raises:
        ConfigError: observations or actions are not text.
        MissingExtraError: Gymnasium is not installed.
    """
    try:
        import gymnasium
    except ImportError:
        raise MissingExtraError("a Gymnasium environment", "gymnasium") from None
    made: Any = environment
    if isinstance(environment, str):
        identity = environment

        def made() -> Any:
            return gymnasium.make(identity)

        name = name or identity
    sample = made() if isinstance(environment, str) else environment
    for part in ("observation_space", "action_space"):
        space = getattr(sample, part, None)
        if space is not None and not isinstance(space, gymnasium.spaces.Text):
            raise ConfigError(
                f"{name or environment!r}: expected a Text {part}, got {space}; "
                "wrap the environment so that it reads and writes text"
            )
    return register(as_environment(made, name=name, tasks=tasks, horizon=horizon, **roles))
