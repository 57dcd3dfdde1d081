"""Collecting: exactly what was asked for, whatever happens in between."""

from __future__ import annotations

import errno
import json
import signal
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from dreamgym.collection import collect
from dreamgym.config import Config
from dreamgym.data.trajectories import read_trajectories
from dreamgym.errors import DataError, StoreError
from dreamgym.testing.corridor import CorridorFactory
from tests.command import Running, dreamgym

TEXTWORLD = ("--env", "textworld")


def rows(folder: Path) -> int:
    return sum(shard.read_bytes().count(b"\n") for shard in folder.glob("*.jsonl"))


def killed_at(count: int, arguments: list[object], folder: Path) -> None:
    """Start a collection and end it with SIGKILL once `count` rows are on disk."""
    with Running(["dreamgym", *arguments]) as running:
        deadline = time.monotonic() + 300
        while rows(folder) < count:
            assert running.process.exitcode is None, "it finished before it could be killed"
            assert time.monotonic() < deadline
            time.sleep(0.02)


@pytest.mark.slow
def test_sixty_episodes_killed_twice_are_sixty_none_twice(tmp_path: Path) -> None:
    out = tmp_path / "trajectories"
    small = ["--set", "environment.options.family=cooking", "--set", "environment.options.rooms=1"]
    where = ["--episodes", 60, "--out", out, "--json"]
    arguments = ["collect", *TEXTWORLD, *small, "--policy", "noisy:0.3", *where]
    killed_at(10, arguments, out)
    first = rows(out)
    killed_at(max(30, first + 1), arguments, out)
    done = dreamgym(*arguments)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert 60 > report["already_there"] >= max(30, first)
    assert report["already_there"] + report["episodes"] == 60
    ids = [trajectory.id for trajectory in read_trajectories(out)]
    assert len(ids) == len(set(ids)) == 60
    checked = dreamgym("data", "validate", out, "--json")
    assert checked.returncode == 0
    assert json.loads(checked.stdout)["valid"] == 60


def test_the_same_settings_give_the_same_episodes_whatever_the_concurrency(tmp_path: Path) -> None:
    common = ["collect", *TEXTWORLD, "--policy", "mix", "--episodes", 8, "--seed", 5]
    assert dreamgym(*common, "--out", tmp_path / "a").returncode == 0
    assert dreamgym(*common, "--out", tmp_path / "b", "--set", "collect.concurrency=1").returncode == 0
    a, b = (
        {t.id: (t.task, t.start, t.transitions, t.sheet) for t in read_trajectories(tmp_path / name)}
        for name in "ab"
    )
    assert a == b
    assert len(a) == 8


def test_a_folder_is_filled_up_and_refuses_other_settings(tmp_path: Path) -> None:
    out = tmp_path / "t"
    assert (
        dreamgym("collect", *TEXTWORLD, "--policy", "random", "--episodes", 3, "--out", out).returncode == 0
    )
    again = dreamgym("collect", *TEXTWORLD, "--policy", "random", "--episodes", 5, "--out", out, "--json")
    assert json.loads(again.stdout)["already_there"] == 3
    assert rows(out) == 5
    other = dreamgym("collect", *TEXTWORLD, "--policy", "expert", "--episodes", 5, "--out", out)
    assert other.returncode == 2
    assert "was collected with policy='random', now 'expert' was given" in other.stderr


def test_admissible_actions_and_world_sheets_can_be_left_out(tmp_path: Path) -> None:
    arguments = ["collect", *TEXTWORLD, "--policy", "expert", "--episodes", 2]
    dreamgym(*arguments, "--out", tmp_path / "with")
    dreamgym(*arguments, "--out", tmp_path / "without", "--no-admissible", "--no-sheet")
    for trajectory in read_trajectories(tmp_path / "with"):
        assert trajectory.sheet
        assert trajectory.start.admissible_actions
    for trajectory in read_trajectories(tmp_path / "without"):
        assert trajectory.sheet is None
        assert trajectory.start.admissible_actions is None
        assert all(t.outcome.next_state.admissible_actions is None for t in trajectory.transitions)


def test_ctrl_c_ends_cleanly_and_the_next_run_resumes(tmp_path: Path) -> None:
    out = tmp_path / "t"
    arguments = ["collect", "--env", "alfworld", "--policy", "random", "--episodes", 8, "--out", out]
    arguments += ["--set", "collect.concurrency=1"]
    with Running(["dreamgym", *arguments]) as running:
        deadline = time.monotonic() + 300
        while rows(out) < 2 and time.monotonic() < deadline:
            time.sleep(0.1)
        running.send_signal(signal.SIGINT)
        assert running.wait() == 130
        printed = running.err.read_text(encoding="utf-8")
    assert "interrupted; what was done so far is saved" in printed
    assert "Traceback" not in printed
    stored = rows(out)
    assert stored >= 2
    assert len(list(read_trajectories(out))) == stored


@pytest.mark.slow
def test_a_mix_holds_experts_noise_and_chance(tmp_path: Path) -> None:
    done = dreamgym("collect", *TEXTWORLD, "--episodes", 20, "--policy", "mix", "--out", tmp_path / "t")
    assert done.returncode == 0
    policies = Counter(t.provenance.policy for t in read_trajectories(tmp_path / "t"))
    assert policies == {"expert": 10, "noisy:0.3": 6, "random": 4}
    assert "states/s" in done.stdout


def corridors(out: Path, **settings: object) -> Config:
    given = {"episodes": 48, "policy": "expert", "split": "train", "out": str(out), **settings}
    return Config.model_validate({"environment": {"name": "corridor"}, "collect": given})


def test_the_public_name_is_the_function_also_after_its_module_is_imported() -> None:
    import dreamgym.collection

    assert callable(dreamgym.collect)


async def test_episodes_in_this_process_are_written_as_they_finish(tmp_path: Path) -> None:
    on_disk: list[int] = []
    await collect(
        corridors(tmp_path / "out"),
        CorridorFactory(),
        on_episode=lambda _: on_disk.append(rows(tmp_path / "out")),
    )
    assert on_disk[-1] == 48
    assert on_disk[0] < 16


@pytest.mark.parametrize("content", ["", "[]", "null", '"x"', "{", "[" * 100_000])
async def test_odd_settings_of_a_directory_are_a_typed_error_with_advice(
    tmp_path: Path, content: str
) -> None:
    await collect(corridors(tmp_path), CorridorFactory())
    (tmp_path / "collect.json").write_text(content, encoding="utf-8")
    with pytest.raises(DataError, match="remove the file and run the same command again"):
        await collect(corridors(tmp_path), CorridorFactory())


async def test_a_full_disk_leaves_no_half_settings_and_the_next_run_resumes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = Path.write_text

    def full(path: Path, text: str, **rest: Any) -> int:
        real(path, text[:10], **rest)
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_text", full)
        with pytest.raises(StoreError, match="No space left on device; free some space and run again"):
            await collect(corridors(tmp_path / "out"), CorridorFactory())
    assert StoreError.exit_code == 5
    assert not list(tmp_path.rglob("collect.json"))
    assert (await collect(corridors(tmp_path / "out"), CorridorFactory())).episodes == 48
