"""An environment as a black box: its episodes are the same, and nothing of its optional roles is there."""

from __future__ import annotations

from pathlib import Path

import pytest

import dreamgym as dg
from dreamgym.config import EnvironmentConfig
from dreamgym.data.trajectories import read_trajectories
from dreamgym.envs.registry import ROLES, EnvironmentSpec, find_environment, is_known, spec_of
from dreamgym.errors import ConfigError
from dreamgym.protocols import find_expert, find_world_sheet
from dreamgym.training.experience_run import known_environment

COOKING = {"family": "cooking", "rooms": 1, "ingredients": 1}


@pytest.mark.parametrize("name", ["alfworld", "textworld"])
def test_a_black_box_has_no_roles_and_the_options_of_its_environment(name: str) -> None:
    spec, whole = known_environment(f"black-box:{name}"), find_environment(name)
    assert spec is not None
    assert any(getattr(whole, role) for role in ROLES)
    assert not any(getattr(spec, role) for role in ROLES)
    assert (spec.options, spec.splits, spec.extra) == (whole.options, whole.splits, whole.extra)
    assert not is_known("black-box:nowhere")
    with pytest.raises(ConfigError, match="did you mean 'textworld'"):
        find_environment("black-box:textwrld")


async def test_its_episodes_are_those_of_the_environment() -> None:
    black, white = dg.make("black-box:textworld", **COOKING), dg.make("textworld", **COOKING)
    (task,), (original,) = await black.tasks("train", 1), await white.tasks("train", 1)
    assert (task.environment, original.environment) == ("black-box:textworld", "textworld")
    assert (task.id, task.instruction) == (original.id, original.instruction)
    mine, theirs = black.make(task), white.make(original)
    assert await mine.start() == await theirs.start()
    assert mine.task == task
    assert find_expert(mine) is None
    assert find_world_sheet(mine) is None
    assert await mine.step("look") == await theirs.step("look")
    await black.aclose()
    await white.aclose()


async def test_it_meets_the_contract_and_keeps_its_name() -> None:
    report = await dg.check_environment("black-box:textworld", options=COOKING, episodes=10, concurrency=4)
    assert report.passed, report.to_dict()
    assert spec_of(dg.make("black-box:textworld")).name == "black-box:textworld"
    assert EnvironmentConfig(name="black-box:textworld").name == "black-box:textworld"
    assert isinstance(find_environment("black-box:textworld"), EnvironmentSpec)


async def test_recordings_hold_no_facts_and_need_no_expert(tmp_path: Path) -> None:
    await dg.collect("black-box:textworld", tmp_path / "data", episodes=4, policy="explore", options=COOKING)
    found = list(read_trajectories(tmp_path / "data"))
    assert {each.task.environment for each in found} == {"black-box:textworld"}
    assert [each.sheet for each in found] == [None] * 4
    assert all(each.id.startswith("textworld-train-0-explore-") for each in found)
    with pytest.raises(ConfigError, match="needs an expert"):
        await dg.collect("black-box:textworld", tmp_path / "more", episodes=1, policy="expert")
