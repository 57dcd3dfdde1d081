"""Servers of the public registries as environments: time and git from PyPI, files from npm."""

import json
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

import dreamgym as dg
from dreamgym.envs.scripted_policies import make_policy
from dreamgym.rollouts import run_episode
from dreamgym.types import Trajectory

BIN = Path(sys.executable).parent
CHECKS = Path(__file__).parent / "checks.py"
ZONES = {"Tokyo": ("Asia/Tokyo", 9), "Dubai": ("Asia/Dubai", 4), "Lagos": ("Africa/Lagos", 1)}
"""Without summer time, so that answers do not change during a year."""


def write_tasks(path: Path, rows: Sequence[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def conversions(path: Path) -> Path:
    rows = []
    for hour in range(10, 15):
        for city, (zone, offset) in ZONES.items():
            arguments = {"source_timezone": "UTC", "time": f"{hour}:00", "target_timezone": zone}
            result = f"{hour + offset}:00"
            rows.append(
                {
                    "instruction": f"What time is it in {city} when it is {hour}:00 in UTC?",
                    "split": "test" if hour == 12 else "train",
                    "parameters": {"time": result},
                    "solution": [
                        f"convert_time {json.dumps(arguments)}",
                        f"answer {json.dumps({'text': result})}",
                    ],
                }
            )
    return write_tasks(path, rows)


async def with_expert(factory: Any, task: dg.Task) -> Trajectory:
    found = await run_episode(
        lambda: factory.make(task),
        lambda environment: make_policy("expert", environment, seed=0),
        trajectory_id="expert",
        task=task,
        seed=0,
    )
    assert isinstance(found, Trajectory), found
    return found


async def test_the_time_server(tmp_path: Path) -> None:
    factory = dg.make(
        f"mcp:{BIN / 'mcp-server-time'}",
        tasks=conversions(tmp_path / "tasks.jsonl"),
        check=f"{CHECKS}:converted",
    )
    for task in await factory.tasks("test"):
        found = await with_expert(factory, task)
        assert (found.success, len(found)) == (True, 2)
        assert '"time_difference"' in found.transitions[0].outcome.next_state.text
    environment = factory.make(task)
    start = await environment.start()
    assert 'convert_time {"source_timezone": string, "time": string, "target_timezone": string}' in start.text
    wrong = await environment.step('convert_time {"source_timezone": "UTC"}')
    assert wrong.next_state.text == "Refused: convert_time: 'time' is a required property"
    unknown = await environment.step('get_current_time {"timezone": "Mars/Olympus"}')
    assert unknown.next_state.text.startswith("Error: ")
    guessed = await environment.step(f'answer {{"text": "{task.parameters["time"]}"}}')
    assert (guessed.success, guessed.reward, guessed.terminated) == (False, 0.0, True)
    await environment.aclose()


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    folder = tmp_path / "repository"
    folder.mkdir()
    (folder / "a.txt").write_text("first\n")
    identity = ["-c", "user.name=Test", "-c", "user.email=test@example.org"]
    for words in (["init", "-q"], ["add", "."], [*identity, "commit", "-qm", "first"]):
        subprocess.run(["git", *words], cwd=folder, check=True)
    return folder


def branches_of(repository: Path) -> list[str]:
    listed = subprocess.run(["git", "branch"], cwd=repository, capture_output=True, text=True, check=True)
    return listed.stdout.splitlines()


async def test_the_git_server_with_a_repository_for_each_episode(repository: Path, tmp_path: Path) -> None:
    branches = [
        {
            "instruction": f"Create the branch {name}.",
            "parameters": {"branch": name},
            "solution": [f'git_create_branch {{"repo_path": "{{folder}}", "branch_name": "{name}"}}'],
        }
        for name in ("fix", "docs")
    ]
    factory = dg.make(
        f"mcp:{BIN / 'mcp-server-git'} --repository {{folder}}",
        tasks=write_tasks(tmp_path / "tasks.jsonl", branches),
        check=f"{CHECKS}:branched",
        files=repository,
    )
    for task in await factory.tasks("train"):
        found = await with_expert(factory, task)
        assert (found.success, len(found)) == (True, 1)
    environment = factory.make(task)
    await environment.start()
    status = await environment.step('git_status {"repo_path": "{folder}"}')
    assert "working tree clean" in status.next_state.text
    outside = await environment.step('git_status {"repo_path": "/"}')
    assert "outside the allowed repository '{folder}'" in outside.next_state.text
    await environment.aclose()
    assert len(branches_of(repository)) == 1  # the original is untouched


@pytest.fixture
def file_server(tmp_path: Path) -> Path:
    if shutil.which("npm") is None:
        pytest.skip("needs npm")
    package = "@modelcontextprotocol/server-filesystem"
    subprocess.run(["npm", "install", "--silent", "--prefix", str(tmp_path), package], check=True)
    return tmp_path / "node_modules" / ".bin" / "mcp-server-filesystem"


async def test_the_file_server_of_npm(file_server: Path) -> None:
    factory = dg.make(
        f"mcp:{file_server} {{folder}}",
        instruction="Write a note to buy milk.",
        check=f"{CHECKS}:written",
        tools=["write_file", "read_text_file"],
        horizon=4,
    )
    [task] = await factory.tasks("train")
    environment = factory.make(task)
    await environment.start()
    first = await environment.step('write_file {"path": "{folder}/note.txt", "content": "Buy"}')
    assert (first.reward, first.over) == (0.0, False)
    read = await environment.step('read_text_file {"path": "{folder}/note.txt"}')
    assert read.next_state.text == "Buy"
    last = await environment.step('write_file {"path": "{folder}/note.txt", "content": "Buy milk."}')
    assert (last.reward, last.success, last.terminated) == (1.0, True, True)
    await environment.aclose()


def test_record_dream_train_and_evaluate_on_the_command_line(tmp_path: Path) -> None:
    """Everything runs on the real time server; it is far too short to learn anything."""
    tasks = conversions(tmp_path / "tasks.jsonl")
    command = [sys.executable, "-m", "dreamgym", "learn", "--env", f"mcp:{BIN / 'mcp-server-time'}"]
    for setting in (
        f"environment.options.tasks={tasks}",
        f"environment.options.check={CHECKS}:converted",
        "environment.options.horizon=4",
        "experience.model=nano",
        "agent.max_tokens=16",
    ):
        command += ["--set", setting]
    done = subprocess.run(
        [*command, "--scale", "0.01", "--out", str(tmp_path / "run")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["split"] == "test"
    assert summary["real_steps"]["collect"] > 0
    assert summary["synthetic_steps"] > 0
