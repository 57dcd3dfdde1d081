"""What users give an MCP environment: names, options, tasks, checks; and texts that should be calls."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import dreamgym as dg
from dreamgym.collection import trajectory_id
from dreamgym.envs.mcp import McpOptions, open_mcp, parse_target
from dreamgym.envs.mcp_tasks import read_tasks
from dreamgym.envs.registry import environment_from_data, find_environment, is_known, make
from dreamgym.envs.tool_calls import ANSWER_TOOL, EpisodeRecord, RefusedCallError, Tool, parse_call
from dreamgym.errors import ConfigError, DataError, EpisodeFailedError
from dreamgym.types import FailureKind
from tests.envs.mcp_servers import BAD, episode, play


@pytest.mark.parametrize(
    ("body", "reward", "success"),
    [
        ("return None", 0.0, False),
        ("return False", 0.0, False),
        ("return 0.25", 0.25, False),
        ("return -1", -1.0, False),
        ("return 7", 1.0, True),
        ("return episode.answer == 'one'", 1.0, True),
    ],
)
async def test_a_check_decides_reward_and_success(
    tmp_path: Path, body: str, reward: float, success: bool
) -> None:
    check = tmp_path / "check.py"
    check.write_text(f"async def graded(episode):\n    {body}\n")
    if success and "7" in body:
        [last] = await play('count {"n": 1}', check=f"{check}:graded")
    else:
        first, last = await play('count {"n": 1}', 'answer {"text": "one"}', check=f"{check}:graded")
        assert (first.reward, first.over) == (0.0, False)
    assert (last.reward, last.success, last.over, last.graded) == (reward, success, True, True)


async def test_a_check_that_raises_fails_the_episode_and_a_wrong_result_is_an_error(tmp_path: Path) -> None:
    check = tmp_path / "check.py"
    check.write_text(
        "def raises(episode):\n    return 1 / 0\n"
        "def wrong(episode):\n    return 'yes'\n"
        "def nan(episode):\n    return float('nan')\n"
    )
    with pytest.raises(EpisodeFailedError, match="ZeroDivisionError"):
        await play("silent", check=f"{check}:raises")
    for name in ("wrong", "nan"):
        with pytest.raises(ConfigError, match="expected True, False, None or a number"):
            await play("silent", check=f"{check}:{name}")


async def test_a_setup_that_fails_and_a_task_that_is_not_listed_are_invalid_tasks(tmp_path: Path) -> None:
    path = tmp_path / "tasks.jsonl"
    path.write_text('{"instruction": "Count.", "setup": ["fail"]}\n')
    async with episode(BAD, tasks=path) as environment:
        with pytest.raises(EpisodeFailedError, match="expected a setup without errors") as caught:
            await environment.start()
        assert caught.value.kind == FailureKind.INVALID_TASK
    factory = make(BAD, tasks=path)
    other = factory.make(dg.Task(id="elsewhere", instruction="Count.", environment=BAD))
    with pytest.raises(EpisodeFailedError, match="has no task 'elsewhere'"):
        await other.start()
    await other.aclose()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tasks": "nowhere.jsonl"}, "tasks: expected a file"),
        ({"check": "nowhere.py:done"}, "check 'nowhere.py:done': there is no file"),
        ({"check": "json:decoder"}, "expected a function, got module"),
        ({"files": "nowhere"}, "files: expected a folder"),
        ({"files": "."}, "expected {folder} in the command"),
        ({"token_env": "NO_SUCH_TOKEN"}, r"expected a value in \$NO_SUCH_TOKEN"),
        ({"pass_env": ["NO_SUCH_VARIABLE"]}, r"expected a value in \$NO_SUCH_VARIABLE"),
        ({"horizon": 0}, "environment.options.horizon"),
        ({"taks": "x"}, "did you mean"),
    ],
)
def test_wrong_options_are_refused_before_a_server_starts(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make(BAD, **options)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("mcp:", "expected mcp:COMMAND"),
        ("mcp:no-such-command-anywhere --x", "is not installed"),
        ("mcp:python 'unclosed", "No closing quotation"),
        ("mcp:http://user:secret@host/mcp", "without a password"),
    ],
)
def test_a_wrong_name_is_refused(name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        make(name)
    assert "secret" not in str(caught.value)


async def test_a_tool_that_the_server_does_not_have_is_an_error() -> None:
    async with episode(BAD, tools=["cuont"]) as environment:
        with pytest.raises(ConfigError, match="did you mean 'count'"):
            await environment.start()


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", r"tasks.jsonl:2: expected JSON"),
        ('{"instruction": ""}', r"tasks.jsonl:2: "),
        ('{"instruction": "Go.", "solutoin": []}', r"tasks.jsonl:2: .*solutoin"),
        ('{"instruction": "Go.", "id": "a"}', "one task with the id 'a'"),
    ],
)
def test_a_wrong_line_of_tasks_is_named(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "tasks.jsonl"
    path.write_text('{"instruction": "Go.", "id": "a"}\n' + line + "\n")
    with pytest.raises(DataError, match=message):
        read_tasks(path, "mcp:x")


def test_trajectories_cannot_choose_a_command() -> None:
    for name in ("mcp:rm -rf /", "black-box:mcp:rm -rf /"):
        with pytest.raises(ConfigError, match="name it yourself"):
            environment_from_data(name)
    assert environment_from_data("mcp:http://localhost/mcp") == "mcp:http://localhost/mcp"


def test_a_server_is_known_by_its_name_and_gives_safe_file_names() -> None:
    name = "mcp:npx -y server-files ../../{folder}"
    assert is_known(name)
    assert find_environment(name).extra == "mcp"
    assert find_environment(f"black-box:{name}").options is McpOptions
    assert trajectory_id(name, "train", 0, 7) == "npx-y-server-files-folder-train-0-000007"
    assert trajectory_id(f"black-box:{name}", "train", 0, 7) == "npx-y-server-files-folder-train-0-000007"
    assert parse_target("mcp:http://localhost:80/mcp").url == "http://localhost:80/mcp"


async def test_only_named_variables_reach_the_command(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("SHOP_KEY", "k1")
    monkeypatch.setenv("OTHER_KEY", "k2")
    out = tmp_path / "environ"
    script = tmp_path / "server.sh"
    script.write_text(f"env > {out}\nexec {sys.executable} -S {BAD.rpartition(' ')[2]}\n")
    async with episode(f"mcp:sh {script}", pass_env=["SHOP_KEY"]) as environment:
        await environment.start()
    found = dict(line.split("=", 1) for line in out.read_text().splitlines() if "=" in line)
    assert (found.get("SHOP_KEY"), found.get("OTHER_KEY"), "PATH" in found) == ("k1", None, True)


@pytest.fixture(scope="module")
def tools() -> dict[str, Tool]:
    return {"count": Tool(name="count", schema={"type": "object"}), "answer": ANSWER_TOOL}


@settings(max_examples=200, deadline=None)
@given(
    action=st.one_of(st.text(), st.text().map("count {}".format), st.text().map('count {{"n": {}}}'.format))
)
def test_any_text_is_a_call_or_a_refusal(tools: dict[str, Tool], action: str) -> None:
    try:
        name, arguments = parse_call(action, tools)
    except RefusedCallError:
        return
    assert name in tools
    json.dumps(arguments, allow_nan=False)


def test_a_record_has_an_answer_only_at_its_end() -> None:
    task = dg.Task(id="a", instruction="Go.", environment="mcp:x")
    assert EpisodeRecord(task=task, calls=()).answer is None


async def test_without_the_extra_the_message_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mcp", None)
    with pytest.raises(dg.DreamGymError, match=r"dreamgym\[mcp\]"):
        open_mcp(BAD, McpOptions())
