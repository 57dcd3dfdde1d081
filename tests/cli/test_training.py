"""`dreamgym train` and `dreamgym evaluate` as people call them, on the quick real environment."""

from __future__ import annotations

import json
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from dreamgym.cli import app
from dreamgym.training.run_dir import RunDir
from tests.command import Running

GAMES = ("family=treasure", "level=1", "horizon=4")
SMALL = (
    *(f"environment.options.{game}" for game in GAMES),
    *("agent.text_limit=120", "agent.history=3", "agent.max_tokens=6", "agent.vocabulary=400"),
    *("train.tasks_per_step=2", "train.group_size=2", "train.warm_start_steps=4", "train.monitors=off"),
)


def dreamgym(*words: object) -> Result:
    return CliRunner().invoke(app, [str(word) for word in words])


def run_json(*words: object) -> Any:
    done = dreamgym(*words, "--json")
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


def train(data: Path, out: Path, *settings: str) -> list[str]:
    chosen = [word for setting in (*SMALL, *settings) for word in ("--set", setting)]
    where = ("--env", "textworld", "--mode", "real", "--data", str(data), "--out", str(out))
    return ["train", *where, "--model", "nano", *chosen]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("games")
    chosen = [word for game in GAMES[:2] for word in ("--set", f"environment.options.{game}")]
    run_json("collect", "--env", "textworld", "--policy", "expert", "--episodes", 6, "--out", out, *chosen)
    return out


@pytest.mark.slow
def test_an_agent_is_trained_compared_with_its_beginning_and_carried_on(data: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    summary = run_json(*train(data, run, "train.steps=2"))
    assert (summary["steps"], summary["policies"]) == (2, [0, 2])
    assert summary["spent"]["real_steps"] > 0

    found = run_json("evaluate", run, "--against", f"{run}@0", "--episodes", 3)
    assert (found["policy"], found["other"]["policy"]) == (f"{run}@2", f"{run}@0")
    assert found["split"] == "test", "the split of the environment that is for evaluation"
    wrong = dreamgym("evaluate", run, "--split", "valid_unseen")
    assert wrong.exit_code == 2
    assert "it has: train, " in wrong.stderr
    assert found["success"]["count"] == found["comparison"]["difference"]["count"] == 3
    assert found["real_steps"] == sum(episode["steps"] for episode in found["outcomes"])
    assert [e["task"] for e in found["outcomes"]] == [e["task"] for e in found["other"]["outcomes"]]
    [kept] = (run / "evaluations").glob("*.json")
    assert json.loads(kept.read_text(encoding="utf-8")) == found

    table = dreamgym("evaluate", f"{run}@0", "--split", "test", "--episodes", 2)
    assert table.exit_code == 0, table.output
    assert "success [95%]" in table.stdout

    out = tmp_path / "on"
    further = run_json("train", "--sim-to-real", run, "--real-steps", 10, "--out", out)
    assert further["spent"]["real_steps"] >= 10
    assert further["ended"].endswith("real steps are used")


@pytest.mark.slow
@pytest.mark.parametrize(("stop", "in_background"), [("SIGINT", False), ("SIGTERM", True)])
def test_ctrl_c_and_a_scheduler_keep_what_was_reached_and_say_how_to_go_on(
    data: Path, tmp_path: Path, stop: str, in_background: bool
) -> None:
    run = tmp_path / "run"
    words = ["dreamgym", *train(data, run, "train.steps=1000000", "train.save_policy_every=1000000")]
    with Running(words, in_background=in_background) as running:
        limit = time.monotonic() + 300
        while not (run / "checkpoint.pt").exists():
            assert running.process.exitcode is None, running.completed()
            assert time.monotonic() < limit
            time.sleep(0.05)
        running.send_signal(signal.Signals[stop])
        assert running.wait() == 130
        errors = running.err.read_text(encoding="utf-8")
    assert "Resume with: dreamgym train" in " ".join(errors.split())
    assert "Traceback" not in errors
    state = RunDir(run).load("checkpoint.pt")
    assert state is not None
    done = state["done"]
    summary = run_json(*train(data, run, f"train.steps={done + 1}", "train.save_policy_every=1000000"))
    assert summary["steps"] == done + 1


def test_a_dry_run_of_sim_to_real_shows_the_settings_of_the_run_that_is_carried_on(tmp_path: Path) -> None:
    from dreamgym.config import load_config

    begun = load_config(
        overrides=["agent.history=7", "train.group_size=5", f'train.out="{tmp_path}/a"', "seed=4"]
    )
    RunDir.open(begun).close()
    found = json.loads(
        dreamgym(
            *("train", "--sim-to-real", tmp_path / "a", "--real-steps", 50, "--dry-run"),
            *("--set", "train.group_size=6"),
        ).stdout
    )
    assert (found["agent"]["history"], found["seed"], found["train"]["group_size"]) == (7, 4, 6)
    assert (found["train"]["mode"], found["train"]["real_steps"]) == ("real", 50)
    assert found["train"]["init_from"] == str(tmp_path / "a")
    assert found["train"]["out"] == str(tmp_path / "a-real-50")
