"""`dreamgym envs`, with environments that other packages announce."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from tests.command import python

PLUGIN = """
from dataclasses import replace
from dreamgym.config import Section
from dreamgym.envs.registry import EnvironmentSpec
from dreamgym.testing import Corridor, CorridorFactory

class Options(Section):
    length: int = 5

class Silent(Corridor):
    async def step(self, action):
        outcome = await super().step(action)
        return replace(outcome, next_state=replace(outcome.next_state, text=" "))

class SilentFactory(CorridorFactory):
    def make(self, task, *, seed=0):
        return Silent(task, length=5, start=1, way_out=4, horizon=9)

HALL = EnvironmentSpec(name="hall", summary="a [hall]", options=Options,
                       open=lambda options: CorridorFactory(length=options.length), splits=("train", "test"))
SILENT = EnvironmentSpec(name="silent", summary="mute", options=Options, open=lambda _: SilentFactory())
"""


@pytest.fixture
def plugins(tmp_path: Path) -> Path:
    """A folder that looks like an installed package with three environments, one of which is not there."""
    (tmp_path / "hall_plugin.py").write_text(PLUGIN)
    about = tmp_path / "hall_plugin-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: hall-plugin\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text(
        "[dreamgym.environments]\n"
        "hall = hall_plugin:HALL\nsilent = hall_plugin:SILENT\nghost = hall_plugin_that_is_missing:SPEC\n"
    )
    return tmp_path


def envs(plugins: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    script = (
        f"import sys; sys.path.insert(0, {str(plugins)!r}); sys.argv = {['dreamgym envs', *arguments]!r}\n"
        "from dreamgym.cli.envs import app; app()"
    )
    return python(script, cwd=plugins)


def test_a_broken_plugin_is_listed_with_the_others(plugins: Path) -> None:
    listed = {each["name"]: each for each in json.loads(envs(plugins, "list", "--json").stdout)}
    assert {"alfworld", "textworld", "hall", "silent", "ghost"} <= set(listed)
    assert listed["hall"] == {"name": "hall", "summary": "a [hall]", "extra": None, "installed": "yes"}
    assert "hall_plugin_that_is_missing" in listed["ghost"]["summary"]


def test_an_environment_of_another_package_is_described_with_its_options(plugins: Path) -> None:
    described = json.loads(envs(plugins, "describe", "hall", "--set", "length=3", "--json").stdout)
    assert described["options"] == [
        {"name": "length", "type": "whole number", "default": 5, "description": ""}
    ]
    assert described["experts"] == ["walker"]
    assert described["example"]["state"].endswith("of 3.")
    for option in json.loads(envs(plugins, "describe", "textworld", "--json").stdout)["options"]:
        assert "Literal" not in option["type"]
        assert "|" not in option["type"]
    table = envs(plugins, "describe", "hall")
    assert "a [hall]" in table.stdout


def test_a_good_environment_passes_and_a_broken_one_fails_with_exit_code_1(plugins: Path) -> None:
    arguments = ("--episodes", "36", "--concurrency", "12", "--json")
    good = envs(plugins, "check", "hall", *arguments)
    assert (good.returncode, json.loads(good.stdout)["passed"]) == (0, True)
    bad = envs(plugins, "check", "silent", *arguments)
    assert (bad.returncode, json.loads(bad.stdout)["passed"]) == (1, False)


def test_a_wrong_name_or_option_is_refused_with_what_would_be_right(plugins: Path) -> None:
    unknown = envs(plugins, "check", "hal")
    assert (unknown.returncode, unknown.stdout) == (2, "")
    assert "did you mean 'hall'?" in unknown.stderr
    assert "length" in envs(plugins, "check", "hall", "--set", "lenght=3").stderr
