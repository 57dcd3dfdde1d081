"""The quickstart, run with a budget of seconds: what it leaves, and how it resumes."""

from __future__ import annotations

import json
import signal
import subprocess
import time
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from dreamgym.cli.quickstart import _collect, _experience, _train
from dreamgym.errors import ConfigError, DataError
from dreamgym.quickstart.plan import MAX_STARTS, MIN_SUCCESS, Plan, Stages
from dreamgym.training.run_dir import read_config
from tests.command import INTERRUPTIBLE, dreamgym

MINUTES = 0.1
"""The least of everything."""


def plan(out: Path, minutes: float = MINUTES, seed: int = 3, env: str = "textworld") -> Plan:
    return Plan.load(env, minutes, seed, out)


def stored(folder: Path) -> Any:
    return json.loads((folder / "stages.json").read_text(encoding="utf-8"))["stages"]


@pytest.mark.slow
def test_a_quickstart_that_was_killed_resumes_and_leaves_all_it_promises(tmp_path: Path) -> None:
    out = tmp_path / "run"
    words = ["quickstart", "--minutes", str(MINUTES), "--seed", "3", "--out", str(out)]
    begun = subprocess.Popen([*INTERRUPTIBLE, *words], stderr=subprocess.DEVNULL)
    while not (out / "stages.json").exists() or "collect" not in stored(out):
        assert begun.poll() is None, "it ended before it could be killed"
        time.sleep(0.05)
    begun.send_signal(signal.SIGKILL)
    begun.wait()
    before = stored(out)["collect"]

    done = dreamgym(*words, "--json", seconds=300)
    assert done.returncode == 0, done.stderr
    assert "done before" in done.stderr
    assert stored(out)["collect"] == before
    found = json.loads(done.stdout)
    assert found == json.loads((out / "summary.json").read_text(encoding="utf-8"))
    for name in ("before", "after"):
        success = found[name]["success"]
        assert success["low"] <= success["value"] <= success["high"]
    assert found["comparison"]["difference"]["count"] == found["after"]["success"]["count"] > 0
    assert found["fidelity"]["count"] > 0
    assert found["real_steps"]["train"] == 0 < found["synthetic_steps"]
    assert min(found["real_steps"][name] for name in ("collect", "fidelity", "evaluate")) > 0
    assert all(seconds > 0 for seconds in found["seconds"].values())
    assert "<html" in (out / "report.html").read_text(encoding="utf-8")

    again = dreamgym(*words, seconds=60)
    assert again.returncode == 0, again.stderr
    assert again.stderr.count("done before") == 5
    assert "success [95%]" in again.stdout
    assert "tasks list" not in again.stderr, "only commands that work are suggested"


@pytest.mark.slow
def test_a_policy_that_never_succeeds_in_the_dream_gets_a_longer_warm_start(tmp_path: Path) -> None:
    short = plan(tmp_path)
    # The policy is hardly trained and never ends an episode: few turns are enough.
    training = short.config.train.model_copy(update={"horizon": 3})
    short = replace(short, config=short.config.model_copy(update={"train": training}))
    stages = Stages(short)
    for stage, run in (("collect", _collect), ("experience", _experience)):
        stages.finish(stage, 0.1, run(short, stages))
    found = _train(short, stages)
    updates = [start["updates"] for start in found["starts"]]
    assert updates == sorted(set(updates))
    assert len(updates) == MAX_STARTS
    assert all(start["success"] < MIN_SUCCESS for start in found["starts"])
    assert read_config(tmp_path / "agent").train.warm_start_steps == updates[-1]
    assert found["steps"] == short.config.train.steps


def test_more_minutes_mean_more_of_everything_and_never_less(tmp_path: Path) -> None:
    plans = [plan(tmp_path, minutes) for minutes in (0.1, 1, 5, 15, 60)]
    for less, more in pairwise(plans):
        assert less.config.experience.steps < more.config.experience.steps
        assert less.config.train.warm_start_steps <= more.config.train.warm_start_steps
        assert less.extent.evaluation_episodes < more.extent.evaluation_episodes
        assert less.config.train.tasks_per_step <= more.config.train.tasks_per_step <= 12


def test_every_environment_has_settings(tmp_path: Path) -> None:
    for env in ("alfworld", "textworld"):
        assert plan(tmp_path, env=env).config.environment.name == env
    with pytest.raises(ConfigError, match="unknown environment 'moon'"):
        plan(tmp_path, env="moon")


@pytest.mark.parametrize("minutes", [0, -1, float("nan")])
def test_minutes_that_are_none_are_refused(tmp_path: Path, minutes: float) -> None:
    with pytest.raises(ConfigError, match="above 0"):
        plan(tmp_path, minutes)


def test_a_directory_of_another_seed_or_budget_is_refused_and_stays_as_it_was(tmp_path: Path) -> None:
    Stages(plan(tmp_path, 2)).finish("collect", 1.0, {"episodes": 4})
    before = (tmp_path / "stages.json").read_bytes()
    with pytest.raises(ConfigError, match="--seed 3, got 1"):
        Stages(plan(tmp_path, 2, seed=1))
    with pytest.raises(ConfigError, match=r"--minutes 2.*, got 3"):
        Stages(plan(tmp_path, 3))
    with pytest.raises(ConfigError, match="--env textworld, got alfworld"):
        Stages(plan(tmp_path, 2, env="alfworld"))
    assert (tmp_path / "stages.json").read_bytes() == before
    assert Stages(plan(tmp_path, 2)).done["collect"] == {"seconds": 1.0, "episodes": 4}


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"given": {}, "stages": {"collect": 3}}', "[" * 100_000])
def test_damaged_stages_are_an_error(tmp_path: Path, text: str) -> None:
    (tmp_path / "stages.json").write_text(text, encoding="utf-8")
    with pytest.raises(DataError, match="stages of a quickstart"):
        Stages(plan(tmp_path, 2))
