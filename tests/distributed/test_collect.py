"""Collection on worker processes records the episodes that one process records."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from dreamgym.collection import collect
from dreamgym.config import Section, load_config
from dreamgym.data.trajectories import read_trajectories
from dreamgym.distributed.real import RealSetup
from dreamgym.envs import registry
from dreamgym.envs.registry import EnvironmentSpec, register
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


@pytest.mark.parametrize("policy", ["noisy:0.3", "explore"])
async def test_workers_record_what_one_process_records(tmp_path: Path, policy: str) -> None:
    found: list[dict[str, Trajectory]] = []
    for workers in (0, 2):
        out = tmp_path / str(workers)
        config = load_config(
            overrides=[
                *("environment.name=corridor", "collect.episodes=12", "collect.episodes_per_task=3"),
                *(f'collect.policy="{policy}"', f'collect.out="{out}"', f"collect.workers={workers}"),
            ]
        )
        report = await collect(config, CorridorFactory(length=4, horizon=6))
        assert (report.episodes, dict(report.failures)) == (12, {})
        found.append(
            {
                each.id: replace(each, provenance=replace(each.provenance, recorded_at=0.0))
                for each in read_trajectories(out)
            }
        )
    assert found[0] == found[1]
