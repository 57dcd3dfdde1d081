"""`learn` with small models and few steps: what it leaves, what it refuses, and how it resumes."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

import dreamgym as dg
from dreamgym.cli.learn import suggestions
from dreamgym.config import Config
from dreamgym.errors import ConfigError, DataError
from dreamgym.learning.pipeline import Pipeline
from dreamgym.learning.plan import Plan, experience_folder
from dreamgym.learning.stages import Stages
from dreamgym.training import trainer
from dreamgym.training.run_dir import CHECKPOINT, RunDir, read_config
from tests.command import dreamgym, run_command
from tests.killable import started
from tests.learning.lamp import Lamp

LAMP = f"{Path(__file__).parent / 'lamp.py'}:Lamp"
SMALL = ["--model", "nano", "--scale", "0.01", "--set", "agent.max_tokens=6", "--set", "learner.epochs=1"]
# A model of a few updates does not stop by itself.
SMALL += ["--set", "experience.max_tokens=24"]


@pytest.fixture(scope="module")
def learnt(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any], str]:
    """The directory, the JSON document and the messages of one run."""
    out = tmp_path_factory.mktemp("learn") / "lamp"
    done = dreamgym("learn", "--env", LAMP, "--out", out, *SMALL, "--json")
    assert done.returncode == 0, done.stderr
    return out, json.loads(done.stdout), done.stderr


@pytest.mark.slow
def test_an_environment_of_the_users_own_goes_from_recording_to_report(
    learnt: tuple[Path, dict[str, Any], str],
) -> None:
    out, found, said = learnt
    stored = json.loads((out / "summary.json").read_text(encoding="utf-8"))
    assert found == stored | {"report": str(out / "report.html")}
    assert "has no expert: its actions are explored" in said
    for name in ("before", "after"):
        success = found[name]["success"]
        assert success["low"] <= success["value"] <= success["high"]
    assert found["comparison"]["difference"]["count"] == found["after"]["success"]["count"] > 0
    assert found["real_steps"]["train"] == 0 < found["synthetic_steps"]
    assert min(found["real_steps"][name] for name in ("collect", "evaluate")) > 0
    assert [file.name for file in Path(__file__).parent.glob("lamp.py*")] == ["lamp.py"]
    assert len(list((out / "agent" / "evaluations").glob("*.json"))) == 1
    assert "<html" in (out / "report.html").read_text(encoding="utf-8")


@pytest.mark.slow
def test_a_finished_run_is_shown_again_and_nothing_is_repeated(
    learnt: tuple[Path, dict[str, Any], str],
) -> None:
    out, _, _ = learnt
    before = (out / "stages.json").read_bytes()
    again = dreamgym("learn", "--env", LAMP, "--out", out, *SMALL)
    assert again.returncode == 0, again.stderr
    assert again.stderr.count("done before") == 4
    assert "success [95%]" in again.stdout
    assert (out / "stages.json").read_bytes() == before
    other = dreamgym("learn", "--env", LAMP, "--out", out, *SMALL, "--set", "train.group_size=3")
    assert other.returncode == ConfigError.exit_code
    assert "was started with train.group_size=2, got 3" in other.stderr


@pytest.mark.slow
def test_every_suggested_command_works(learnt: tuple[Path, dict[str, Any], str]) -> None:
    out, found, said = learnt
    limits = {
        "dreamgym experience eval": ["--episodes", "2"],
        "dreamgym experience audit": ["--episodes", "2"],
        "dreamgym train --sim-to-real": ["--set", "train.tasks_per_step=1", "--out", str(out / "real")],
    }
    commands = suggestions(found)
    assert len(commands) >= 5
    for command in commands:
        assert command in said
        words = command.replace("--real-steps 2000", "--real-steps 4").split()
        more = next((more for start, more in limits.items() if command.startswith(start)), [])
        played = dreamgym(*words[1:], *more, typed="look\nquit\n")
        assert played.returncode == 0, (command, played.stderr[-2000:])


@pytest.mark.slow
def test_traces_alone_are_enough_and_the_evaluation_is_skipped(
    learnt: tuple[Path, dict[str, Any], str], tmp_path: Path
) -> None:
    out, _, _ = learnt
    traces = tmp_path / "traces"
    traces.mkdir()
    for file in (out / "trajectories").glob("*.jsonl"):
        text = file.read_text(encoding="utf-8").replace(LAMP, "far-away")
        # Without checksums: these are the traces of somebody else.
        rows = [re.sub(r',"crc32":"\w+"}$', "}", line) for line in text.splitlines()]
        (traces / file.name).write_text("\n".join(rows) + "\n", encoding="utf-8")
    short = ["--set", "train.horizon=3", "--set", "train.tasks_per_step=2"]
    done = dreamgym("learn", "--data", traces, "--out", tmp_path / "run", *SMALL, *short)
    assert done.returncode == 0, done.stderr
    assert "skipped: environment 'far-away' is not installed" in done.stderr
    assert "experience audit" not in done.stderr, "only commands that work are suggested"


@pytest.mark.slow
def test_a_quickstart_that_was_killed_resumes(tmp_path: Path) -> None:
    out = tmp_path / "run"
    words = ["quickstart", "--scale", "0.01", "--seed", "3", "--out", str(out)]
    begun = started(tmp_path / "errors", run_command, words)
    while not (out / "agent" / "policies").exists():
        assert begun.is_alive(), "it ended before it could be killed"
        time.sleep(0.05)
    begun.kill()
    begun.join()
    before = json.loads((out / "stages.json").read_text(encoding="utf-8"))["stages"]
    assert set(before) == {"collect", "experience"}

    done = dreamgym(*words, "--json")
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("done before") == 2
    found = json.loads(done.stdout)
    assert found["real_steps"]["collect"] == found["real_steps"]["train"] == 0 < found["synthetic_steps"]


async def test_a_quickstart_on_two_cores_may_be_resumed_on_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    used: list[int] = []

    async def train(config: Config, **_: object) -> None:
        used.append(config.train.workers)
        raise InterruptedError

    monkeypatch.setattr(trainer, "train", train)
    experience = str(experience_folder("builtin:textworld"))
    for cores in ({0, 1}, {0}):
        monkeypatch.setattr(os, "sched_getaffinity", lambda pid, cores=cores: cores)
        with pytest.raises(InterruptedError):
            await Pipeline(plan=Plan.load(None, tmp_path, experience=experience)).run()
    assert used == [2, 0]


@pytest.mark.parametrize(
    ("cores", "values", "workers"),
    [
        ({0, 1}, {}, 2),
        (set(range(8)), {}, 2),
        ({0}, {}, 0),
        ({0}, {"train": {"workers": 3}}, 3),
        ({0, 1}, {"train": {"workers": 0}}, 0),
        ({0, 1}, {"budget": {"tokens": 1000}}, 0),
        ({0, 1}, {"experience": {"model": "hf:base"}, "agent": {"model": "hf:base"}}, 0),
    ],
)
def test_cooking_games_are_practised_on_two_cores_where_they_are_there(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    cores: set[int],
    values: dict[str, Any],
    workers: int,
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: cores)
    (tmp_path / "base").mkdir()
    monkeypatch.chdir(tmp_path)
    assert Pipeline(plan=Plan.load("textworld", tmp_path, values=values))._workers() == workers


@pytest.mark.slow
async def test_an_object_is_learnt_from_a_script(tmp_path: Path) -> None:
    said: list[str] = []
    found = await dg.learn(
        Lamp,
        tmp_path,
        model="nano",
        scale=0.01,
        collect={"episodes": 12, "policy": "random"},
        experience={"max_tokens": 24},
        agent={"max_tokens": 6},
        train={"steps": 1},
        log=said.append,
    )
    assert found["environment"]["name"] == "lamp"
    assert found["train"]["steps"] == 1
    assert read_config(tmp_path / "agent").learner.decay_steps == 1
    assert any("of 12 recorded episodes succeed" in line for line in said)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--env", "moon"], "unknown environment 'moon'"),
        ([], "expected an environment (--env)"),
        (["--env", LAMP, "--model", "huge"], "unknown experience.model='huge'"),
        (["--env", LAMP, "--model", "nano", "--lora"], "adapts pretrained weights"),
        (["--env", LAMP, "--model", "hf:/nowhere"], "expected a directory"),
        (["--env", LAMP, "--set", "train.stepz=3"], "did you mean 'train.steps'"),
        (["--env", LAMP, "--set", "experience.stepz=3"], "did you mean 'experience.steps'"),
        (["--experience", "builtin:textworld", "--set", "experience.steps=3"], "got both"),
        (["--env", LAMP, "--scale", "0"], "expected a scale above 0"),
        (["--env", "textworld", "--set", "environment.options.rooms=none"], "rooms"),
        (["--env", LAMP, "--data", "nowhere"], "nowhere"),
        (["--env", "textworld", "--experience", "builtin:moon"], "unknown experience model 'builtin:moon'"),
    ],
)
def test_a_wrong_setting_is_refused_before_anything_starts(
    arguments: list[str], message: str, tmp_path: Path
) -> None:
    from typer.testing import CliRunner

    from dreamgym.cli import app

    done = CliRunner().invoke(app, ["learn", *arguments, "--out", str(tmp_path / "run")])
    assert done.exit_code in (ConfigError.exit_code, DataError.exit_code), done.output
    assert message in " ".join(done.output.split())
    assert not (tmp_path / "run").exists()


def test_a_larger_scale_means_more_of_everything_and_no_larger_steps(tmp_path: Path) -> None:
    plans = [Plan.load("textworld", tmp_path, scale=scale) for scale in (0.01, 0.3, 1, 4)]
    for less, more in pairwise(plans):
        assert less.config.experience.steps < more.config.experience.steps
        assert less.config.train.steps < more.config.train.steps
        assert less.extent.evaluation_episodes < more.extent.evaluation_episodes
        assert less.config.train.tasks_per_step <= more.config.train.tasks_per_step <= 12
        assert less.config.learner.decay_steps == less.config.train.steps


def test_a_preset_limits_the_length_of_its_own_games_only(tmp_path: Path) -> None:
    assert Plan.load("textworld", tmp_path).config.train.horizon == 15
    other = {"environment": {"options": {"family": "treasure"}}}
    assert Plan.load("textworld", tmp_path, values=other).config.train.horizon is None


def test_pretrained_weights_get_small_rates_and_the_users_settings_win(tmp_path: Path) -> None:
    scratch = Plan.load("textworld", tmp_path).config
    assert scratch.train.warm_start_lr == 5e-4
    assert scratch.agent.model == f"hf:{tmp_path}/experience/model"
    (tmp_path / "base").mkdir()
    model = {"model": f"hf:{tmp_path}/base"}
    pretrained = {"experience": model, "agent": model}
    config = Plan.load("textworld", tmp_path, values=pretrained).config
    assert (config.train.warm_start_lr, config.train.warm_start_muon_lr, config.learner.muon_lr) == (
        None,
    ) * 3
    assert config.learner.learning_rate < scratch.learner.learning_rate
    own = {"learner": {"learning_rate": 0.5}, "train": {"steps": 7}, **pretrained}
    config = Plan.load("textworld", tmp_path, values=own, scale=0.1).config
    assert (config.learner.learning_rate, config.train.steps) == (0.5, 7)


def test_episodes_of_an_unknown_environment_share_tasks(tmp_path: Path) -> None:
    plan = Plan.load(LAMP, tmp_path)
    [explored] = plan.recordings(expert=False)
    assert (explored.collect.policy, explored.collect.episodes_per_task) == ("explore", 8)
    assert {each.collect.policy for each in plan.recordings(expert=True)} == set(plan.extent.record)
    [own] = Plan.load(LAMP, tmp_path, values={"collect": {"policy": "random"}}).recordings(expert=True)
    assert (own.collect.policy, own.collect.split) == ("random", "train")


def test_recordings_without_success_are_an_error_before_fine_tuning(tmp_path: Path) -> None:
    class Hopeless(Lamp):
        def step(self, action: str) -> tuple[str, float, bool]:
            return "Nothing happens.", 0.0, False

    with pytest.raises(ConfigError, match=r"none of \d+ episodes succeeds"):
        asyncio.run(dg.learn(Hopeless, tmp_path, model="nano", scale=0.01))
    assert not (tmp_path / "experience" / "checkpoint.pt").exists()


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"given": {}, "stages": {"collect": 3}}', "[" * 100_000])
def test_damaged_stages_are_an_error(tmp_path: Path, text: str) -> None:
    (tmp_path / "stages.json").write_text(text, encoding="utf-8")
    with pytest.raises(DataError, match="stages of a run of learn"):
        Stages(tmp_path, {})


def test_finished_stages_are_kept(tmp_path: Path) -> None:
    Stages(tmp_path, {"seed": 1}).finish("collect", 1.0, {"episodes": 4})
    assert Stages(tmp_path, {"seed": 1}).done["collect"] == {"seconds": 1.0, "episodes": 4}
    with pytest.raises(ConfigError, match="was started with seed=1, got 2"):
        Stages(tmp_path, {"seed": 2})
    shutil.rmtree(tmp_path)


def test_a_directory_that_was_moved_resumes_and_other_weights_are_still_refused(tmp_path: Path) -> None:
    def given(out: str, model: str = "experience/model") -> dict[str, Any]:
        return {"train.out": f"{out}/agent", "agent.model": f"hf:{out}/{model}"}

    Stages(tmp_path, given("/home/me/qs")).finish("train", 1.0, {})
    assert Stages(tmp_path, given("runs/moved")).done.keys() == {"train"}
    with pytest.raises(ConfigError, match=r"was started with agent\.model="):
        Stages(tmp_path, given("runs/moved", "other/model"))


def test_settings_may_be_corrected_until_their_stage_has_finished(tmp_path: Path) -> None:
    """As after a refusal by the gate, in the stage ``train``."""
    given = {"seed": 1, "experience.steps": 5, "train.gate": "refuse", "learner.epochs": 1}
    stages = Stages(tmp_path, given)
    stages.finish("collect", 1.0, {})
    stages.finish("experience", 1.0, {})
    assert Stages(tmp_path, given | {"train.gate": "warn", "learner.epochs": 2}).done.keys() == {
        "collect",
        "experience",
    }
    longer = Stages(tmp_path, given | {"experience.steps": 9})
    assert longer.done.keys() == {"collect"}, "fine-tuning goes on, recordings stay"
    with pytest.raises(ConfigError, match="was started with seed=1, got 2"):
        Stages(tmp_path, given | {"seed": 2})
    RunDir(tmp_path / "agent").save(CHECKPOINT, {})
    with pytest.raises(ConfigError, match=r"was started with experience\.steps=5, got 9"):
        Stages(tmp_path, given | {"experience.steps": 9})
    stages.finish("train", 1.0, {})
    with pytest.raises(ConfigError, match=r"was started with train\.gate='refuse', got 'warn'"):
        Stages(tmp_path, given | {"train.gate": "warn"})
