"""What a new user met in the first hour, and meets no more: commands, settings, files and Python.

Findings that concern one stage are tested with it: Ctrl-C of fine-tuning in
`tests/training/test_fine_tuning.py`, what travels with a run in `tests/training/test_experience_run.py`.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from typer.testing import CliRunner

import dreamgym as dg
from dreamgym.cli import app
from dreamgym.cli.train import summary_table
from dreamgym.data.trajectories import TrajectoryWriter
from dreamgym.envs.registry import spec_of
from dreamgym.evaluation.evaluate import evaluation_split
from tests.data.trajectory_examples import episode


@pytest.fixture
def recorded(tmp_path: Path) -> Path:
    folder = tmp_path / "recorded"
    with TrajectoryWriter(folder) as writer:
        writer.append([episode("one")])
    return folder


def refused(*words: object) -> str:
    """The message of a command that is refused by its exit code."""
    ended = CliRunner().invoke(app, [str(word) for word in words], env={"COLUMNS": "200"})
    assert ended.exit_code in (2, 3, 5), ended.output
    return " ".join(ended.output.split())


def shown(*words: object) -> str:
    ended = CliRunner().invoke(app, [str(word) for word in words], env={"COLUMNS": "200"})
    assert ended.exit_code == 0, ended.output
    return " ".join(ended.output.split())


def test_an_option_of_the_environment_is_suggested_with_its_whole_name() -> None:
    message = refused("collect", "--env", "textworld", "--set", "family=cooking", "--out", "unused")
    assert "environment.options.family" in message


@pytest.mark.slow
def test_types_of_options_are_words() -> None:
    text = shown("envs", "describe", "textworld", "--json")  # a table may break its cells
    assert "one of: both, cooking, treasure" in text
    assert "Literal" not in text
    assert "| None" not in text


def test_a_folder_that_cannot_be_written_is_refused_in_words(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for out, message in (("/proc/none", "cannot be written"), (tmp_path / "file", "found a file")):
        found = refused("collect", "--env", "textworld", "--episodes", 1, "--out", out)
        assert message in found
        assert "Errno" not in found


def test_a_format_that_cannot_be_written_is_not_offered(recorded: Path, tmp_path: Path) -> None:
    message = refused("data", "export", recorded, "--format", "csv", "--out", tmp_path / "out")
    assert "expected one of: atif, messages, parquet" in message


def test_every_command_names_the_environment_by_env() -> None:
    for words in (["collect"], ["ingest"], ["play"], ["train"], ["evaluate"], ["experience", "train"]):
        assert "--env " in shown(*words, "--help")


def test_a_mistyped_environment_is_refused_by_search(recorded: Path, tmp_path: Path) -> None:
    store = tmp_path / "replay.sqlite"
    shown("buffer", "build", recorded, "--store", store)
    name = episode("one").task.environment
    query = ("buffer", "search", store, "--state", "s", "--action", "a", "--env")
    assert f"did you mean '{name}'?" in refused(*query, name[:-1])


def test_headings_of_the_buffer_are_words(recorded: Path, tmp_path: Path) -> None:
    text = shown("buffer", "build", recorded, "--store", tmp_path / "replay.sqlite")
    assert "new rows" in text
    assert "new_rows" not in text


def test_a_run_without_a_curriculum_says_so(recorded: Path) -> None:
    assert "only runs with a curriculum have one" in refused("tasks", "list", recorded)


def test_the_split_of_an_evaluation_is_one_that_the_environment_has() -> None:
    for name in ("alfworld", "textworld"):
        splits = spec_of(name).splits
        assert evaluation_split(splits) in splits[1:]


def test_counts_have_no_fraction() -> None:
    spent = {"synthetic_steps": 2840.0, "seconds": 1.25}
    table = summary_table({"out": "run", "ended": "", "policy": 1, "spent": spent})
    assert [str(cell) for cell in table.columns[1].cells] == ["2,840", "1.25"]


def test_trajectories_are_read_from_a_path_as_text(recorded: Path) -> None:
    assert [each.id for each in dg.read_trajectories(str(recorded))] == ["one"]


def test_public_functions_are_functions_after_every_command_was_imported() -> None:
    from dreamgym import collect

    assert asyncio.iscoroutinefunction(collect)
    assert dg.collect is collect
