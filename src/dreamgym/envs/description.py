"""Describes environments: their splits, options and experts, and the start of one episode."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import aclosing, asynccontextmanager
from typing import Any

from dreamgym.config import settings, validate
from dreamgym.envs.registry import environment_names, find_environment, open_environment
from dreamgym.errors import MissingExtraError
from dreamgym.protocols import Environment, EnvironmentFactory, find_expert


async def list_environments() -> list[dict[str, Any]]:
    """Name, summary, extra and whether it is installed, of every environment."""
    return [await _summary(name) for name in environment_names()]


async def describe_environment(name: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """What an environment offers; ``note`` instead of an example if an extra is missing."""
    spec = find_environment(name)
    validate(spec.options, options, prefix="environment.options.")
    described: dict[str, Any] = {
        "name": spec.name,
        "summary": spec.summary,
        "extra": spec.extra,
        "splits": list(spec.splits),
        "options": [
            {"name": option, "type": kind, "default": default, "description": description}
            for option, kind, default, description in settings(spec.options)
        ],
    }
    try:
        return described | await _example(name, options)
    except MissingExtraError as missing:
        return described | {"note": str(missing)}


async def has_expert(name: str, options: Mapping[str, Any]) -> bool:
    """Whether scripted policies that need an expert can play it."""
    async with aclosing(open_environment(name, options)) as factory:
        return await offers_expert(factory)


async def offers_expert(factory: EnvironmentFactory) -> bool:
    """`has_expert` of an open environment."""
    async with _first_episode(factory) as environment:
        return find_expert(environment) is not None


@asynccontextmanager
async def _first_episode(factory: EnvironmentFactory) -> AsyncIterator[Environment]:
    (task,) = await factory.tasks(factory.splits[0], 1)
    async with aclosing(factory.make(task)) as environment:
        yield environment


async def _summary(name: str) -> dict[str, Any]:
    try:
        spec = find_environment(name)
    except Exception as error:  # a broken plug-in must not break the list
        return {"name": name, "summary": f"cannot be loaded: {error}", "extra": None, "installed": "no"}
    installed = "yes"
    try:
        await spec.open(validate(spec.options, {})).aclose()
    except MissingExtraError:
        installed = "no"
    return {"name": spec.name, "summary": spec.summary, "extra": spec.extra, "installed": installed}


async def _example(name: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Experts, and the start of the first task as an agent sees it."""
    async with aclosing(open_environment(name, options)) as factory, _first_episode(factory) as environment:
        start, task = await environment.start(), environment.task
        expert = find_expert(environment)
    return {
        "splits": list(factory.splits),
        "experts": list(expert.experts) if expert is not None else [],
        "example": {
            "task": task.id,
            "instruction": task.instruction,
            "state": start.text,
            "admissible_actions": start.admissible_actions and list(start.admissible_actions),
        },
    }
