"""Finds environments by name and opens them: built-in ones, plug-ins of other packages, and your own objects.

A script or notebook passes its environment directly (`make(MyEnvironment)`) or registers it
(`register(as_environment(MyEnvironment))`); `as_environment` lists the forms it may have. A package announces
one with an entry point in the group ``dreamgym.environments``, whose value is an `EnvironmentSpec`:

    [project.entry-points."dreamgym.environments"]
    kitchen = "my_package.kitchen:SPEC"

``black-box:NAME`` is any of them without its optional roles, ``openenv:URL`` an OpenEnv server, and
``mcp:COMMAND`` or ``mcp:URL`` an MCP server.

Importing a spec must be cheap: heavy imports belong into `open`.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from importlib.metadata import EntryPoints, entry_points
from typing import Any, cast

from pydantic import ConfigDict

from dreamgym.config import Section, nearest_name, validate
from dreamgym.envs.adapters import ObjectFactory, is_factory
from dreamgym.envs.black_box import PREFIX, BlackBoxFactory
from dreamgym.envs.mcp import PREFIX as MCP
from dreamgym.envs.mcp import McpOptions, open_mcp
from dreamgym.envs.openenv import PREFIX as OPENENV
from dreamgym.envs.openenv import OpenEnvOptions, open_openenv
from dreamgym.envs.references import is_reference, load_reference, reference_exists
from dreamgym.errors import ConfigError
from dreamgym.protocols import Annotator, EnvironmentFactory
from dreamgym.types import State, Task, Transition, WorldSheet

GROUP = "dreamgym.environments"
BUILT_IN = (
    "alfworld", "babyai", "miniwob", "textcraft", "textworld", "webarena", "webshop", "webshop-site",
)  # fmt: skip
"""Each is a module `dreamgym.envs.NAME`, with ``_`` for ``-``, that has a `SPEC`."""
_registered: dict[str, EnvironmentSpec] = {}
_referenced: dict[str, EnvironmentSpec] = {}
"""Environments by reference that were loaded."""


class AnyOptions(Section):
    """Options of an environment that is given as an object: the arguments of its constructor."""

    model_config = ConfigDict(extra="allow")


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvironmentSpec:
    """An environment before it is opened: how to open it, and its optional roles for experience models."""

    name: str
    open: Callable[[Any], EnvironmentFactory]
    """Takes validated `options`; raises `MissingExtraError` if a dependency is missing."""
    summary: str = ""
    options: type[Section] = AnyOptions
    splits: tuple[str, ...] = ()
    horizon: int | None = None
    """Actions per episode, unless an option `horizon` states it."""
    extra: str | None = None
    """The extra to install, shown by `dreamgym envs list`."""
    annotator: Callable[[], Annotator] | None = None
    """Explains recorded transitions by rules, from the environment's own facts."""
    actor: str | None = None
    """The agent's name in the facts of a world sheet."""
    select_facts: Callable[[WorldSheet, str], Sequence[str]] | None = None
    """The lines about the sheet that a prompt shows before an action (``start`` for the first state); by
    default the facts that share a name with the action."""
    state_texts: Callable[[Task, WorldSheet], Mapping[str, str]] | None = None
    """Every text that a state may have on these facts, by a short name in one line: a reply of a fine-tuned
    experience model names one (``=NAME``) and spells none. For facts that determine every state."""
    dreamt_actions: Callable[[Task, WorldSheet], Sequence[str]] | None = None
    """The actions that the environment lists on these facts, so that its dream lists them too."""
    goal_met: Callable[[Task, WorldSheet], bool] | None = None
    """Whether these facts fulfil the task."""
    can_succeed: Callable[[Task, WorldSheet], bool] | None = None
    """Whether the task is open and can be fulfilled from these facts on."""
    task_from_instruction: Callable[[str], Task | None] | None = None
    """The task of an instruction, with its goal in `parameters`; None if the instruction has no meaning here.
    Instructions with the same meaning give the same task id."""
    evaluation_instructions: Callable[[Any], Awaitable[Sequence[str]]] | None = None
    """Takes validated `options`: instructions of evaluation splits, which no generated task repeats."""
    think: Callable[[Task, Sequence[Transition], State], str | None] | None = None
    """A rationale for the next action from what the agent has seen, for episodes without thoughts."""
    exchangeable: tuple[frozenset[str], ...] = ()
    """Groups of names that can replace one another (rooms, furniture): data augmentation for an experience
    model from scratch, so that it copies names from its prompt instead of memorising them."""
    refusals: tuple[str, ...] = ()
    """The exact texts with which it refuses an action: nothing has changed, and the reward is 0."""


ROLES = (
    "annotator", "actor", "select_facts", "state_texts", "dreamt_actions", "goal_met", "can_succeed",
    "task_from_instruction", "think", "exchangeable", "refusals",
)  # fmt: skip
"""Fields of `EnvironmentSpec` that `as_environment` also finds as attributes of an object."""


def as_environment(
    environment: object,
    *,
    name: str | None = None,
    tasks: Sequence[Task | str] | Mapping[str, Sequence[Task | str]] | None = None,
    horizon: int | None = None,
    **roles: Any,
) -> EnvironmentSpec:
    """The spec of an environment that is given as an object.

    Args:
        environment: a name, an `EnvironmentSpec`, an `EnvironmentFactory`; a class with `start` and `step`
            (sync or async) or a function that returns such an object, called once for each episode with those
            of `task`, `seed` and the options that it accepts; a `gymnasium.Env` with text observations and
            actions; or a web site (`envs.browser.Site`). `envs.adapters` describes what `start` and `step`
            may return.
        name: by default the attribute `name`, or the class name in lower case; a factory keeps its name.
        tasks: tasks or instructions, or a mapping from splits to them. By default the attribute `tasks`;
            without it, tasks are numbered seeds.
        horizon: actions after which an episode is truncated; by default the attribute `horizon`, or 50.
        **roles: optional roles of `EnvironmentSpec`; by default the attributes of the same names.

    Raises:
        ConfigError: the object is none of these, or a role is unknown.
    """
    unknown = set(roles) - set(ROLES)
    if unknown:
        wrong = min(unknown)
        raise ConfigError(f"unknown role {wrong!r} of an environment{nearest_name(wrong, ROLES)}")
    if isinstance(environment, str):
        environment = find_environment(environment)
    if hasattr(environment, "environment_spec"):
        environment = environment.environment_spec(name)
    if isinstance(environment, EnvironmentSpec):
        return replace(environment, **roles)
    found = {role: getattr(environment, role) for role in ROLES if hasattr(environment, role)} | roles
    annotator = found.get("annotator")
    if hasattr(annotator, "annotate") and not inspect.isclass(annotator):
        found["annotator"] = lambda: annotator
    if is_factory(environment):
        factory: Any = environment
        return EnvironmentSpec(
            name=factory.name, open=lambda options: factory, splits=tuple(factory.splits), **found
        )
    adapter = ObjectFactory(environment, name=name, tasks=tasks, horizon=horizon)
    return EnvironmentSpec(
        name=adapter.name,
        open=lambda options: adapter.with_options(options.model_extra or {}),
        summary=(inspect.getdoc(environment) or "").partition("\n")[0],
        splits=adapter.splits,
        horizon=adapter.horizon,
        **found,
    )


def register(spec: EnvironmentSpec) -> EnvironmentSpec:
    """Make an environment known by its name in this process; replaces an earlier one of that name."""
    _registered[spec.name] = spec
    return spec


def spec_of(environment: object) -> EnvironmentSpec:
    """The spec of anything that `as_environment` accepts, registered so that its roles are found by name.

    A factory of an environment that is known by name (``make("alfworld")``) does not replace it.
    """
    if isinstance(environment, str):
        return find_environment(environment)
    if is_factory(environment):
        name = str(getattr(environment, "name", ""))
        if name.startswith((PREFIX, MCP)) or name in _referenced or name in environment_names():
            return find_environment(name)
    return register(as_environment(environment))


def make(environment: object, **options: Any) -> EnvironmentFactory:
    """Open an environment: a name, or anything that `as_environment` accepts.

    An object is also registered under its name, so that experience models and commands of this process find
    its roles. A factory is returned as it is.

    Raises:
        ConfigError: the environment or an option is unknown.
    """
    spec = spec_of(environment)
    if is_factory(environment):
        if options:
            raise ConfigError(f"{spec.name}: a factory is open already and takes no options, got {options}")
        return cast(EnvironmentFactory, environment)
    return spec.open(validate(spec.options, options, prefix="environment.options."))


@functools.cache
def _plugins(path: tuple[str, ...]) -> EntryPoints:
    """The environments of packages that are installed there: finding them reads a file of every package."""
    return entry_points(group=GROUP)


def environment_names() -> list[str]:
    return sorted({*_registered, *BUILT_IN, *(entry.name for entry in _plugins(tuple(sys.path)))})


def find_environment(name: str) -> EnvironmentSpec:
    if known := _registered.get(name) or _referenced.get(name):
        return known
    if name in BUILT_IN:
        return cast(EnvironmentSpec, import_module(f"dreamgym.envs.{name.replace('-', '_')}").SPEC)
    for entry in _plugins(tuple(sys.path)).select(name=name):
        spec = entry.load()
        if not isinstance(spec, EnvironmentSpec):
            raise ConfigError(f"entry point {entry.value!r}: expected an EnvironmentSpec, got {spec!r}")
        return spec
    if name.startswith(PREFIX):
        return _black_box(find_environment(name.removeprefix(PREFIX)))
    if name.startswith(OPENENV):
        return EnvironmentSpec(
            name=name,
            open=lambda options: open_openenv(name, options),
            summary="An OpenEnv server.",
            options=OpenEnvOptions,
            extra="endpoint",
        )
    if name.startswith(MCP):
        return EnvironmentSpec(
            name=name,
            open=lambda options: open_mcp(name, options),
            summary="An MCP server.",
            options=McpOptions,
            extra="mcp",
        )
    if is_reference(name):
        return _referenced.setdefault(name, _by_reference(name))
    raise ConfigError(f"unknown environment {name!r}{nearest_name(name, environment_names())}")


def _black_box(spec: EnvironmentSpec) -> EnvironmentSpec:
    """The environment without its optional roles."""
    name = f"{PREFIX}{spec.name}"
    return EnvironmentSpec(
        name=name,
        open=lambda options: BlackBoxFactory(spec.open(options), name),
        summary=f"{spec.summary}; black box",
        options=spec.options,
        splits=spec.splits,
        horizon=spec.horizon,
        extra=spec.extra,
    )


def _by_reference(name: str) -> EnvironmentSpec:
    """An environment by reference keeps the reference as its name: other processes find it by that."""
    found = load_reference(name)
    if hasattr(found, "environment_spec"):
        return cast(EnvironmentSpec, found.environment_spec(name))
    if isinstance(found, EnvironmentSpec) or is_factory(found):
        raise ConfigError(
            f"environment {name!r}: expected a class or function with start and step, got "
            f"{type(found).__name__}; an EnvironmentSpec needs an entry point, a factory dreamgym.make"
        )
    return as_environment(found, name=name)


def is_known(name: str) -> bool:
    """Whether an environment of this name can be found, perhaps with an extra installed."""
    name = name.removeprefix(PREFIX)
    return (
        name in environment_names()
        or name in _referenced
        or name.startswith((OPENENV, MCP))
        or reference_exists(name)
    )


def environment_from_data(name: str) -> str:
    """The name of an environment that trajectories state, where a user has named none.

    Raises:
        ConfigError: opening it would start a command, which only a user may choose.
    """
    target = name.removeprefix(PREFIX)
    if target.startswith(MCP) and not target.removeprefix(MCP).startswith(("http://", "https://")):
        raise ConfigError(
            f"the trajectories come from {name!r}, and evaluating in it starts this command: if you trust "
            "it, name it yourself (--env)"
        )
    return name


def environment_horizon(spec: EnvironmentSpec | None, options: Mapping[str, Any]) -> int | None:
    """The environment's own limit of actions per episode; None if it states none."""
    if spec is None:
        return None
    found = validate(spec.options, options, prefix="environment.options.")
    return getattr(found, "horizon", None) or spec.horizon


def open_environment(name: str, options: Mapping[str, Any] | None = None) -> EnvironmentFactory:
    """The factory of a named environment; options are validated first."""
    spec = find_environment(name)
    return spec.open(validate(spec.options, options or {}, prefix="environment.options."))
