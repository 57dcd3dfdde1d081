"""Collection on worker processes records the episodes that one process records."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dreamgym.collection import collect
from dreamgym.config import Section, load_config
from dreamgym.data.trajectories import read_trajectories
from dreamgym.distributed.real import RealSetup
from dreamgym.envs import registry
from dreamgym.envs.browser.process import find_browser
from dreamgym.envs.registry import EnvironmentSpec, open_environment, register
from dreamgym.errors import ConfigError
from dreamgym.protocols import EnvironmentFactory
from dreamgym.testing import CorridorFactory
from dreamgym.types import Trajectory


async def test_an_environment_that_only_this_process_has_registered_is_sent_to_the_workers() -> None:
    config = load_config(overrides=["environment.name=only-here"])
    factory = CorridorFactory(length=4, horizon=6)
    options = type("Options", (Section,), {})  # made here: it cannot be pickled
    spec = EnvironmentSpec(
        name="only-here", summary="", options=options, open=lambda chosen: factory, splits=("train",)
    )
    register(spec)
    try:
        setup = RealSetup.of(config, factory)
    finally:
        registry._registered.pop("only-here")
    assert (setup.spec, setup.real) == (None, factory)


async def recorded(
    out: Path, factory: EnvironmentFactory, episodes: int, *words: str
) -> dict[str, Trajectory]:
    """By workers or one process, as the settings say."""
    config = load_config(overrides=[f"collect.episodes={episodes}", f'collect.out="{out}"', *words])
    report = await collect(config, factory)
    assert (report.episodes, dict(report.failures)) == (episodes, {})
    return {
        each.id: replace(each, provenance=replace(each.provenance, recorded_at=0.0))
        for each in read_trajectories(out)
    }


@pytest.mark.parametrize("policy", ["noisy:0.3", "explore"])
async def test_workers_record_what_one_process_records(tmp_path: Path, policy: str) -> None:
    words = ("environment.name=corridor", "collect.episodes_per_task=3", f'collect.policy="{policy}"')
    factory = CorridorFactory(length=4, horizon=6)
    alone = await recorded(tmp_path / "0", factory, 12, *words)
    assert alone == await recorded(tmp_path / "2", factory, 12, *words, "collect.workers=2")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("alfworld", dict[str, Any]()),
        # All 2,000 instructions are written by pages, which takes a minute.
        ("miniwob", {"kinds": ["enter-text"]}),
    ],
)
async def test_each_worker_has_simulators_or_a_browser_of_its_own(
    tmp_path: Path, name: str, options: dict[str, Any]
) -> None:
    if name == "miniwob":
        pytest.importorskip("playwright", reason="the extra 'browser' is not installed")
        try:
            find_browser(None)
        except ConfigError as missing:
            pytest.skip(str(missing))
    given = (f"environment.options.{option}={json.dumps(value)}" for option, value in options.items())
    words = (f"environment.name={name}", "collect.policy=expert", *given)
    factory = open_environment(name, options)
    try:
        alone = await recorded(tmp_path / "0", factory, 4, *words)
        assert alone == await recorded(tmp_path / "2", factory, 4, *words, "collect.workers=2")
    finally:
        await factory.aclose()
