"""Finds environments by name: ours and those that other packages announce.

A package adds one with the entry point group ``dreamgym.environments``, whose value is an `EnvironmentSpec`:

    [project.entry-points."dreamgym.environments"]
    kitchen = "my_package.kitchen:SPEC"

Importing a spec must be cheap: what is heavy belongs into `open`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import entry_points
from typing import Any

from dreamgym.config import Section, nearest_name, validate
from dreamgym.errors import ConfigError
from dreamgym.protocols import Annotator, EnvironmentFactory
from dreamgym.types import State, Task, Transition, WorldSheet

GROUP = "dreamgym.environments"


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvironmentSpec:
    """What the registry knows of an environment before it is opened."""

    name: str
    summary: str
    options: type[Section]
    open: Callable[[Any], EnvironmentFactory]
    """Takes validated `options`; raises `MissingExtraError` where a dependency is absent."""
    splits: tuple[str, ...] = ()
    extra: str | None = None
    """The extra to install, shown by `dreamgym envs list`."""
    annotator: Callable[[], Annotator] | None = None
    """Explains recorded transitions from the environment's own facts, where it has rules for that."""
    actor: str | None = None
    """The agent's own name among the facts of a world sheet."""
    tell_facts: Callable[[WorldSheet, str], Sequence[str]] | None = None
    """What an experience model is told of a sheet before an action (``start`` for the first state), one line
    each; by default the facts that share a name with the action."""
    goal_met: Callable[[Task, WorldSheet], bool] | None = None
    """Whether a task is done on these facts, where a sheet can tell."""
    can_succeed: Callable[[Task, WorldSheet], bool] | None = None
    """Whether a task can be done, and still is to be, from these facts on, where a sheet can tell."""
    task_from_instruction: Callable[[str], Task | None] | None = None
    """The task that an instruction asks for, its goal in `parameters`; None for what it cannot mean here.
    Tasks that mean the same have the same id, so that nothing is new by its wording alone."""
    evaluation_instructions: Callable[[Any], Awaitable[Sequence[str]]] | None = None
    """Takes validated `options`: instructions of its evaluation splits, told without playing, which no
    generated task may repeat."""
    think: Callable[[Task, Sequence[Transition], State], str | None] | None = None
    """What an agent should have in mind before an action, from nothing but what it was told: thoughts for
    recorded trajectories that have none."""
    exchangeable: tuple[frozenset[str], ...] = ()
    """Groups of words that could stand for one another, since all that matters of them is told: rooms,
    furniture. An experience model from scratch is taught with others in their place now and then, so that it
    reads what it is told and learns nothing of them by heart."""
    refusals: tuple[str, ...] = ()
    """The exact texts by which it says no to an action: nothing has changed, and nothing is earned."""


def environment_names() -> list[str]:
    return sorted({entry.name for entry in entry_points(group=GROUP)})


def find_environment(name: str) -> EnvironmentSpec:
    for entry in entry_points(group=GROUP, name=name):
        spec = entry.load()
        if not isinstance(spec, EnvironmentSpec):
            raise ConfigError(f"entry point {entry.value!r}: expected an EnvironmentSpec, got {spec!r}")
        return spec
    raise ConfigError(f"unknown environment {name!r}{nearest_name(name, environment_names())}")


def environment_horizon(spec: EnvironmentSpec | None, options: Mapping[str, Any]) -> int | None:
    """The environment's own limit of actions per episode: its option `horizon`; None if it has none."""
    if spec is None:
        return None
    return getattr(validate(spec.options, options, prefix="environment.options."), "horizon", None)


def open_environment(name: str, options: Mapping[str, Any] | None = None) -> EnvironmentFactory:
    """The factory of a named environment; options are validated first."""
    spec = find_environment(name)
    return spec.open(validate(spec.options, options or {}, prefix="environment.options."))
