"""Metrics reach the trackers, with the real libraries; those that are not installed are skipped."""

from __future__ import annotations

import json
import os
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from dreamgym.cli import app
from dreamgym.data.trajectories import TrajectoryWriter
from dreamgym.errors import ConfigError, MissingExtraError
from dreamgym.integrations import trackers
from dreamgym.integrations.trackers import Mirror
from tests.conftest import ROOT
from tests.report.example_run import recorded_episodes


def row(step: int, **values: object) -> str:
    return json.dumps({"kind": "train", "step": step, "success": step / 10, **values}) + "\n"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = tmp_path / "runs" / "agent"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text('{"seed": 3}', encoding="utf-8")
    (folder / "metrics.jsonl").write_text(row(0, learner={"entropy": 2.0}) + row(1), encoding="utf-8")
    with TrajectoryWriter(folder / "trajectories") as keeper:
        keeper.append(recorded_episodes(1))
    return folder


def append(run: Path, text: str) -> None:
    with (run / "metrics.jsonl").open("a", encoding="utf-8") as file:
        file.write(text)


def events(run: Path) -> Iterator[tuple[str, int, Any]]:
    from tensorboardX.proto.event_pb2 import Event

    for file in sorted((run / "tensorboard").glob("events*")):
        data = file.read_bytes()
        while data:
            size = int.from_bytes(data[:8], "little")
            event = Event.FromString(data[12 : 12 + size])
            yield from ((value.tag, event.step, value) for value in event.summary.value)
            data = data[12 + size + 4 :]


def test_tensorboard_has_every_number_and_an_episode_once(run: Path) -> None:
    warnings: list[str] = []
    mirror = Mirror(run, "tensorboard", warn=warnings.append)
    mirror.sync()
    append(run, row(2) + '{"kind": "train", "st')
    mirror.sync()
    append(run, 'ep": 3, "success": 0.3}\n')
    mirror.close()
    found = list(events(run))
    scalars = [(tag, step, value.simple_value) for tag, step, value in found if not tag.startswith("episode")]
    success = [(step, round(value, 4)) for tag, step, value in scalars if tag == "train/success"]
    assert success == [(0, 0.0), (1, 0.1), (2, 0.2), (3, 0.3)]
    assert ("train/learner/entropy", 0, 2.0) in scalars
    episodes = [value for tag, _, value in found if tag.startswith("episode")]
    assert len(episodes) == 1
    assert recorded_episodes(1)[0].transitions[0].action.encode() in episodes[0].tensor.string_val[0]
    assert warnings == []


def test_a_row_that_was_stored_is_not_sent_again_and_a_lost_one_is(run: Path) -> None:
    Mirror(run, "tensorboard", warn=print).close()
    append(run, row(2))
    again = CliRunner().invoke(app, ["track", str(run), "--to", "tensorboard", "--json"])
    assert json.loads(again.stdout)["rows"] == {str(run): 1}
    (run / "track-tensorboard.json").unlink()  # as if it had been killed before it stored anything
    again = CliRunner().invoke(app, ["track", str(run), "--to", "tensorboard", "--json"])
    assert json.loads(again.stdout)["rows"] == {str(run): 3}


def test_a_tracker_that_fails_ends_the_mirror_and_not_the_run(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(trackers.Tensorboard, "log", full)
    warnings: list[str] = []
    mirror = Mirror(run, "tensorboard", warn=warnings.append)
    mirror.sync()
    mirror.sync()
    mirror.close()
    assert len(warnings) == 1
    assert "No space left" in warnings[0]
    assert not (run / "track-tensorboard.json").exists()


def test_a_tracker_that_is_unknown_or_not_installed_is_refused_at_once(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match="trackio, wandb, tensorboard"):
        Mirror(run, "mlflow", warn=print)
    monkeypatch.setitem(sys.modules, "tensorboardX", None)
    with pytest.raises(MissingExtraError, match=r"dreamgym\[tensorboard\]"):
        Mirror(run, "tensorboard", warn=print)


def test_the_command_refuses_what_is_no_training_run(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["track", str(tmp_path), "--to", "tensorboard"])
    assert done.exit_code == 3
    assert "metrics.jsonl" in done.output


def track(run: Path, tracker: str, **environment: str) -> str:
    """In a process of its own: these libraries keep threads and global state."""
    done = subprocess.run(
        [sys.executable, "-m", "dreamgym", "track", str(run), "--to", tracker, "--json"],
        env={**os.environ, "PYTHONPATH": str(ROOT / "src"), **environment},
        capture_output=True,
        text=True,
        timeout=1200,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "no longer updated" not in done.stderr
    return done.stdout


def test_trackio_has_the_metrics_in_a_local_database(run: Path, tmp_path: Path) -> None:
    pytest.importorskip("trackio")
    home = tmp_path / "trackio"
    track(run, "trackio", TRACKIO_DIR=str(home), HF_HUB_OFFLINE="1")
    [database] = home.glob("*.db")
    with sqlite3.connect(database) as connection:
        rows = connection.execute("select step, metrics from metrics order by id").fetchall()
        traces = connection.execute("select messages from traces").fetchall()
    assert [json.loads(text).get("train/success") for _, text in rows[:2]] == [0.0, 0.1]
    assert recorded_episodes(1)[0].transitions[0].action in str(traces[0])


def test_wandb_has_the_metrics_in_an_offline_run(run: Path) -> None:
    pytest.importorskip("wandb")
    track(run, "wandb", WANDB_MODE="offline")
    [file] = (run / "wandb").glob("offline-run-*/*.wandb")
    assert b"train/success" in file.read_bytes()
