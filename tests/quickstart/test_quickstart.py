"""The quickstart, really carried through on a budget of seconds: what it leaves, and how it goes on."""

from __future__ import annotations

import json
import signal
import subprocess
import time
from dataclasses import replace
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import pytest

from dreamgym.cli.quickstart import Quickstart
from dreamgym.config import Config
from dreamgym.data.datasets import builtin_dataset
from dreamgym.data.trajectories import TrajectoryWriter, read_trajectories
from dreamgym.errors import ConfigError, DataError
from dreamgym.quickstart.plan import WORLDS, Plan
from dreamgym.quickstart.progress import Progress
from dreamgym.quickstart.stages import ENOUGH, STARTS, imitated
from dreamgym.training.run_dir import read_config
from tests.command import INTERRUPTIBLE, dreamgym

SECONDS = 0.1
"""Of a minute: the least of everything."""


def kept(folder: Path) -> Any:
    return json.loads((folder / "stages.json").read_text(encoding="utf-8"))


@pytest.mark.slow
def test_a_quickstart_that_was_killed_goes_on_and_leaves_all_it_promises(tmp_path: Path) -> None:
    out = tmp_path / "run"
    words = ["quickstart", "--minutes", str(SECONDS), "--seed", "3", "--out", str(out)]
    begun = subprocess.Popen([*INTERRUPTIBLE, *words], stderr=subprocess.DEVNULL)
    while not (out / "stages.json").exists() or "collect" not in kept(out)["results"]:
        assert begun.poll() is None, "it ended before it could be killed"
        time.sleep(0.05)
    begun.send_signal(signal.SIGKILL)
    begun.wait()
    before = kept(out)["results"]["collect"]

    done = dreamgym(*words, "--json", seconds=300)
    assert done.returncode == 0, done.stderr
    assert "done before" in done.stderr
    assert kept(out)["results"]["collect"] == before
    found = json.loads(done.stdout)
    assert found == json.loads((out / "summary.json").read_text(encoding="utf-8"))
    for name in ("sft", "dreamgym"):
        policy = found["policies"][name]
        low, high = policy["interval"]
        assert low <= policy["success"] <= high
        assert policy["episodes"] == found["plan"]["evaluation_episodes"]
    assert found["difference"]["difference"]["count"] == found["plan"]["evaluation_episodes"]
    assert found["fidelity"]["next_state_exact"]["count"] > 0
    stages = found["stages"]
    assert stages["practice"]["real_steps"] == 0 < stages["practice"]["synthetic_steps"]
    assert set(found["practice"]["success_in_dream"]) == {"first", "last"}
    # Six seconds leave no time for a second start, whatever the first is like.
    (start,) = found["starts"]
    assert start["updates"] == found["plan"]["warm_start_steps"]
    assert 0 <= start["success"] <= 1
    assert min(stages[name]["real_steps"] for name in ("collect", "fidelity", "evaluation")) > 0
    assert all(stage["seconds"] > 0 for name, stage in stages.items() if name != "report")
    assert "<html" in (out / "report.html").read_text(encoding="utf-8")

    again = dreamgym(*words, seconds=60)
    assert again.returncode == 0, again.stderr
    assert again.stderr.count("done before") == 4
    assert "success [95%]" in again.stdout


async def test_a_longer_start_replaces_a_shorter_one_and_practice_from_it(
    tmp_path: Path,
) -> None:
    data = tmp_path / "data"
    with TrajectoryWriter(data) as writer:
        writer.append(list(islice(read_trajectories(builtin_dataset("alfworld")), 8)))

    def start(updates: int) -> Config:
        config = Plan.of(SECONDS, 0).warm_start_config(tmp_path, [str(data)], updates)
        agent = config.agent.model_copy(update={"model": "nano", "vocabulary": 400})
        return config.model_copy(update={"agent": agent})

    practice = tmp_path / "dreamgym" / "metrics.jsonl"
    practice.parent.mkdir()
    practice.touch()
    assert await imitated(start(2)) > 0
    weights = tmp_path / "sft" / "policies" / "000000.pt"
    before = weights.stat().st_mtime_ns
    assert await imitated(start(2)) > 0
    assert weights.stat().st_mtime_ns == before
    assert practice.exists()
    await imitated(start(3))
    assert read_config(tmp_path / "sft").train.warm_start_steps == 3
    assert weights.stat().st_mtime_ns != before
    assert not practice.exists()


@pytest.mark.slow
def test_a_policy_that_never_succeeds_in_the_dream_imitates_for_longer(tmp_path: Path) -> None:
    # As little as in seconds, with the time of a quarter of an hour.
    plan = replace(Plan.of(SECONDS, 3, "textworld"), minutes=15.0)
    found = Quickstart(tmp_path, plan, Progress(tmp_path, plan), quiet=True).carry_through()
    starts = found["starts"]
    assert len(starts) == STARTS
    updates = [start["updates"] for start in starts]
    assert updates == sorted(set(updates))
    assert all(start["success"] < ENOUGH for start in starts)
    assert read_config(tmp_path / "sft").train.warm_start_steps == updates[-1]
    assert found["stages"]["warm start"]["synthetic_steps"] == sum(
        start["synthetic_steps"] for start in starts[:-1]
    )
    assert found["practice"]["steps"] == plan.steps


def test_more_minutes_mean_more_of_everything_and_never_less() -> None:
    plans = [Plan.of(minutes, 0) for minutes in (0.1, 1, 5, 15, 60)]
    for less, more in pairwise(plans):
        assert less.experience_steps < more.experience_steps
        assert less.warm_start_steps < more.warm_start_steps
        assert less.evaluation_episodes < more.evaluation_episodes
        assert less.steps <= more.steps


def test_every_world_has_a_plan_whose_usual_minutes_leave_time_to_practise(tmp_path: Path) -> None:
    for env in WORLDS:
        (tmp_path / env).mkdir()
        progress = Progress(tmp_path / env, Plan.of(15, 0, env))
        before = sum(seconds for stage, seconds in progress.expected().items() if stage != "practice")
        assert before < 12 * 60
        assert 12 * 60 < sum(progress.expected().values()) <= 15 * 60
    with pytest.raises(ConfigError, match="knows alfworld, textworld"):
        Plan.of(15, 0, "moon")


@pytest.mark.parametrize("minutes", [0, -1, float("nan")])
def test_minutes_that_are_none_are_refused(minutes: float) -> None:
    with pytest.raises(ConfigError, match="above 0"):
        Plan.of(minutes, 0)


def test_a_folder_of_another_seed_or_budget_is_refused_and_stays_as_it_was(tmp_path: Path) -> None:
    Progress(tmp_path, Plan.of(2, 0)).finish("collect", {"episodes": 4})
    before = (tmp_path / "stages.json").read_bytes()
    with pytest.raises(ConfigError, match="--seed 0, now 1"):
        Progress(tmp_path, Plan.of(2, 1))
    with pytest.raises(ConfigError, match="--minutes 2, now 3"):
        Progress(tmp_path, Plan.of(3, 0))
    with pytest.raises(ConfigError, match="--env alfworld, now textworld"):
        Progress(tmp_path, Plan.of(2, 0, "textworld"))
    assert (tmp_path / "stages.json").read_bytes() == before
    assert Progress(tmp_path, Plan.of(2, 0)).results["collect"] == {"episodes": 4}


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"plan": {"minutes": "x", "seed": 0}}', "[" * 100_000])
def test_damaged_stages_are_told_and_not_guessed(tmp_path: Path, text: str) -> None:
    (tmp_path / "stages.json").write_text(text, encoding="utf-8")
    with pytest.raises(DataError, match="stages of a quickstart"):
        Progress(tmp_path, Plan.of(2, 0))


def _interrupted(progress: Progress) -> None:
    with progress.timed("collect"):
        time.sleep(0.02)
        raise KeyboardInterrupt


def test_seconds_of_a_stage_add_up_over_stops(tmp_path: Path) -> None:
    plan = Plan.of(2, 0)
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            _interrupted(Progress(tmp_path, plan))
    assert Progress(tmp_path, plan).seconds["collect"] >= 0.04


def test_a_slow_machine_gets_less_practice_and_still_an_evaluation(tmp_path: Path) -> None:
    progress = Progress(tmp_path, Plan.of(15, 0))
    usual = progress.left_for("practice")
    for stage in ("collect", "experience", "fidelity"):
        progress.seconds[stage] = 1.5 * progress.plan.seconds_of(stage)
        progress.finish(stage, {})
    progress.seconds["learn"] = progress.seconds["experience"] + progress.seconds["fidelity"]
    assert progress.pace == pytest.approx(1.5)
    left = 15 * 60 - progress.seconds["collect"] - progress.seconds["learn"]
    assert 1 <= progress.left_for("practice") <= left - 1.5 * progress.plan.seconds_of("evaluation")
    assert progress.left_for("practice") < usual
