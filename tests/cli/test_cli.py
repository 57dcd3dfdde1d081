"""The command line as scripts and people meet it: help, JSON, exit codes, dry runs."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from io import StringIO
from pathlib import Path

import pytest
import typer
from rich.console import Console
from typer.testing import CliRunner, Result

from dreamgym.cli import app, console
from tests.command import dreamgym

COMMANDS = [
    "quickstart", "learn", "collect", "ingest", "play", "envs list", "envs describe", "envs check",
    "data show",
    "data stats", "data validate", "data export", "buffer build", "buffer stats",
    "buffer search", "buffer compact", "experience train", "experience eval", "tasks list", "tasks show",
    "train", "evaluate", "report",
]  # fmt: skip


def test_the_commands_are_these() -> None:
    assert {command.name for command in app.registered_commands} == {
        "quickstart",
        "learn",
        "collect",
        "ingest",
        "play",
        "train",
        "evaluate",
        "bench",
        "report",
        "serve",
        "track",
    }
    assert {group.name for group in app.registered_groups} == {
        "envs",
        "data",
        "buffer",
        "experience",
        "models",
        "tasks",
    }


def asked(*words: str) -> Result:
    """The same command line without a process of its own."""
    return CliRunner().invoke(app, words)


@pytest.mark.parametrize("command", COMMANDS)
def test_the_help_of_every_command_has_an_example(command: str) -> None:
    result = asked(*command.split(), "--help")
    assert result.exit_code == 0, result.output
    assert re.search(rf"dreamgym {command}\b", result.stdout.split("Usage:", 1)[1].split("\n", 1)[1]), (
        result.stdout
    )


def test_the_version_is_printed() -> None:
    assert re.fullmatch(r"dreamgym \d+\.\d+\.\d+\S*\n", asked("--version").stdout)


def test_progress_is_printed_in_lines_without_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(console, "LINE_EVERY", 0.0)
    written = StringIO()
    with console.ProgressBar(console=Console(file=written, width=200), disable=True) as bar:
        job = bar.add_task("train", total=4)
        bar.update(job, completed=1, note="success 25%")
        bar.advance(job)
        bar.update(job, completed=2)
    assert written.getvalue().splitlines() == [
        "train 1/4, elapsed 0:00:00, success 25%",  # no speed is known yet
        "train 2/4, elapsed 0:00:00, about 0:00:00 left, success 25%",
    ], "the same count is not printed again"


def test_an_operating_system_error_has_words_and_an_exit_code(capsys: pytest.CaptureFixture[str]) -> None:
    @console.with_exit_codes
    def fails() -> None:
        raise FileNotFoundError(2, "No such file or directory", "/proc/foo")

    with pytest.raises(typer.Exit) as caught:
        fails()
    assert caught.value.exit_code == 5
    assert "error: /proc/foo: no such file or directory" in capsys.readouterr().err


def test_the_front_page_shows_a_tour_and_the_exit_codes() -> None:
    result = dreamgym("--help").stdout
    assert "A first tour" in result
    assert "130 interrupted" in result


def test_a_dry_run_prints_the_resolved_configuration_and_does_nothing(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text("[collect]\nepisodes = 3\n", encoding="utf-8")
    done = dreamgym(
        *("collect", "--config", file, "--set", "replay.k=9", "--policy", "expert"),
        *("--dry-run", "--out", tmp_path / "x"),
    )
    config = json.loads(done.stdout)
    assert (config["collect"]["episodes"], config["replay"]["k"]) == (3, 9)
    assert config["collect"]["policy"] == "expert"
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["collect", "--env", "alfwrld"], 2, "unknown environment 'alfwrld'; did you mean 'alfworld'?"),
        (["collect", "--env", "textworld", "--policy", "exprt"], 2, "did you mean 'expert'?"),
        (["collect", "--set", "collect.epsodes=1"], 2, "did you mean 'collect.episodes'?"),
        (
            ["collect", "--set", "environment.options.horizn=1"],
            2,
            "did you mean 'environment.options.horizon'?",
        ),
        (["collect", "--env", "textworld", "--split", "trian"], 2, "it has: train, validation, test"),
        (["data", "stats", "nowhere"], 3, "found nothing"),
        (["data", "stats", "builtin:alfwrld"], 2, "alfworld"),
        (["buffer", "stats", "nowhere.sqlite"], 5, "nowhere.sqlite"),
        (["tasks", "list", "nowhere"], 3, "expected a readable file"),
        (["play", "--env", "textworld", "--task", "999999999"], 2, "has 100000 tasks"),
        (
            ["train", "--dry-run"],
            2,
            "expected train.experience: the run of an experience model",
        ),
        (["train", "--mode", "real", "--set", "train.stesp=1"], 2, "did you mean 'train.steps'?"),
        (["train", "--sim-to-real", "nowhere"], 2, "needs --real-steps"),
        (["train", "--sim-to-real", "no", "--real-steps", "9"], 3, "expected a training run"),
        (["evaluate", "nowhere"], 3, "expected a training run"),
        (["envs", "describe", "textwrld"], 2, "did you mean 'textworld'?"),
    ],
)
def test_what_goes_wrong_has_its_exit_code_and_says_what_to_do(
    arguments: list[str], code: int, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    done = asked(*arguments)
    assert done.exit_code == code, done.output
    assert isinstance(done.exception, SystemExit), "an exit code, and no exception"
    assert message in " ".join(done.stderr.replace("│", " ").split())


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["collect", "--env", "alfwrld"], 2, "did you mean 'alfworld'?"),
        (["data", "stats", "nowhere"], 3, "found nothing"),
    ],
)
def test_a_shell_sees_that_exit_code_and_no_traceback(
    arguments: list[str], code: int, message: str, tmp_path: Path
) -> None:
    done = dreamgym(*arguments, cwd=tmp_path)
    assert done.returncode == code, done.stderr
    assert message in " ".join(done.stderr.split())
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("command", ["train", "eval"])
def test_without_torch_the_experience_commands_name_the_extra(command: str, tmp_path: Path) -> None:
    """A process that cannot find torch, as after a plain installation."""
    script = (
        "import importlib.util as u, sys; find = u.find_spec; "
        "u.find_spec = lambda name, *rest: None if name == 'torch' else find(name, *rest); "
        "from dreamgym.cli import app; app()"
    )
    words = ["experience", command, *([str(tmp_path)] if command == "eval" else ["--out", str(tmp_path)])]
    done = subprocess.run(
        [sys.executable, "-c", script, *words], capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 4, done.stderr
    assert "pip install 'dreamgym[models]'" in " ".join(done.stderr.split())
