"""From a user's chats to a dream without fine-tuning: the guide's commands over real HTTP; every role."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from dreamgym.cli import app
from dreamgym.data.trajectories import read_trajectories
from dreamgym.types import CompletionRequest
from tests.conftest import ROOT
from tests.scripted_server import ScriptedServer
from tests.training import shop as shop_model
from tests.training.test_guide import sessions

GUIDE = ROOT / "docs" / "guides" / "your-own-traces.md"
MARK = "<!-- tests/training/test_own_traces.py runs {} here -->"


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ScriptedServer]:
    monkeypatch.chdir(tmp_path)
    with ScriptedServer(shop_model.shop, model="your-model") as running:
        yield running


def dreamgym(*words: object, typed: str = "") -> Result:
    return CliRunner().invoke(app, [str(word) for word in words], input=typed)


def guide() -> list[tuple[str, str]]:
    text = GUIDE.read_text(encoding="utf-8").split(MARK.format("from"))[1].split(MARK.format("to"))[0]
    return re.findall(r"^```(\w+)\n(.*?)^```", text, re.M | re.S)


def reported(result: Result) -> str:
    assert result.exit_code == 0, result.output
    return " ".join(result.output.split())


@pytest.mark.slow
def test_the_guide_leads_from_chats_to_a_dream_that_trains_an_agent(
    server: ScriptedServer, tmp_path: Path
) -> None:
    commands: list[str] = []
    for kind, block in guide():
        if kind == "python":
            exec(compile(block, str(GUIDE), "exec"), {})
        elif kind == "toml":
            Path("shop.toml").write_text(block.replace("http://localhost:8000", server.url), encoding="utf-8")
        else:
            for command, typed, shown in sessions(block):
                result = dreamgym(*shlex.split(command)[1:], typed="".join(f"{line}\n" for line in typed))
                printed = reported(result)
                for line in shown:
                    assert line in printed, f"{command}\n{printed}"
                commands.append(" ".join(command.split()[1:3]))
    assert commands == [
        *("ingest chats.jsonl", "buffer build", "play --dream", "experience eval", "train --experience"),
        "play --dream",
    ]
    [played] = read_trajectories(tmp_path / "played")
    assert played.success
    assert (played.provenance.source, played.provenance.experience_model) == ("synthetic", "endpoint:strong")
    measured = json.loads((tmp_path / "measured" / "fidelity.json").read_text(encoding="utf-8"))
    assert measured["steps"]["next_state_exact"]["value"] == 1.0
    assert measured["steps"]["success"]["recall"]["value"] == 1.0
    assert measured["judged"]["scores"]["informativeness"]["value"] == 1.0
    assert measured["replay_spread"]["mean_deviation"] == 0.0
    summary = json.loads((tmp_path / "runs" / "shop" / "summary.json").read_text(encoding="utf-8"))
    measured, row = sorted(summary["endpoints"]["rows"], key=lambda found: found["stage"])
    assert (measured["stage"], measured["role"], summary["gate"]["verdict"]) == (
        "gate",
        "experience",
        "passed",
    )
    assert (row["stage"], row["role"], row["endpoint"]) == ("train", "experience", "strong")
    assert row["requests"] + row["cache_hits"] + row["shared"] == summary["spent"]["synthetic_steps"]
    assert all(schema is not None for schema in server.schemas)


@pytest.fixture
def traces(server: ScriptedServer) -> str:
    [code] = [block for kind, block in guide() if kind == "python"]
    exec(compile(code, str(GUIDE), "exec"), {})
    reported(dreamgym("ingest", "chats.jsonl", "--env", "shop", "--out", "shop"))
    return "shop"


def test_held_out_tasks_are_in_no_demonstration(server: ScriptedServer, traces: str) -> None:
    result = dreamgym(
        *("experience", "eval", server.name, "--env", "shop", "--data", traces, "--held-out", "--json"),
        *("--set", "experience.validation=0.3", "--out", "measured"),
    )
    assert result.exit_code == 0, result.output
    measured = json.loads(result.stdout)
    assert measured["asked"]["held_out"]
    asked = [request.prompt for request in server.requests if "# Action" in request.prompt]
    tasks = {json.loads(prompt.split("\n")[2]) for prompt in asked}
    assert len(tasks) == measured["asked"]["tasks"] == 5
    shown = [prompt.split("# Resembling transitions")[1].split("# Facts")[0] for prompt in asked]
    assert any("Buy the" in each for each in shown)
    assert not any(json.dumps(task) in each for each in shown for task in tasks)


def test_a_server_without_grammars_is_asked_without_and_understood_all_the_same(
    server: ScriptedServer, traces: str
) -> None:
    with ScriptedServer(shop_model.shop, schemas=False) as plain:
        result = dreamgym(
            *("play", "--dream", plain.name, "--env", "shop", "--trajectories", traces),
            typed="search mug\n:why\n",
        )
    assert "Found: mug in red, blue, green." in reported(result)


def test_the_experience_model_is_named_by_model_and_address(server: ScriptedServer, traces: str) -> None:
    result = dreamgym(
        *("play", "--dream", "openai:your-model", "--base-url", f"{server.url}/v1", "--env", "shop"),
        *("--trajectories", traces, "--task", "4"),
        typed="search pan\n",
    )
    assert "Found: pan in red, blue, green." in reported(result)


def test_replies_that_cannot_be_read_are_reported_and_cost_nothing_else(
    server: ScriptedServer, traces: str
) -> None:
    def moody(request: CompletionRequest) -> str:
        return "No." if '"fly"' in request.prompt else shop_model.shop(request)

    with ScriptedServer(moody) as other:
        result = dreamgym(
            *("play", "--dream", other.name, "--env", "shop", "--trajectories", traces),
            typed="fly\nsearch mug\n",
        )
    printed = reported(result)
    assert "error: endpoint:scripted@" in printed
    assert "3 attempts: expected one JSON object with reasoning" in printed
    assert "Found: mug in red, blue, green." in printed


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--dream", "endpoint:missing"], "no endpoint 'missing'"),
        (["--base-url", "http://localhost:8000"], "--base-url belongs to --dream openai:MODEL"),
        (["--dream", "NAME", "--reward", "sheet"], "expected a grader"),
        (["--dream", "NAME", "--set", "prompted.prompt=missing.md"], "expected auto or a text file"),
        (["--dream", "NAME", "--set", "prompted.max_tokens=9000"], "leaves no room for a prompt"),
    ],
)
def test_what_cannot_dream_is_said_before_anything_is_asked(
    server: ScriptedServer, traces: str, words: list[str], message: str
) -> None:
    result = dreamgym(
        *("play", "--env", "shop", "--trajectories", traces),
        *(server.name if word == "NAME" else word for word in words),
    )
    assert result.exit_code == 2
    assert message in " ".join(result.stderr.split())
    assert not server.requests


def test_a_budget_that_is_spent_stops_the_measurement_by_its_own_exit_code(
    server: ScriptedServer, traces: str
) -> None:
    result = dreamgym(
        *("experience", "eval", server.name, "--env", "shop", "--data", traces, "--out", "measured"),
        *("--set", "budget.requests=3"),
    )
    assert result.exit_code == 8, result.output
    assert "budget.requests=3" in result.stderr
    assert len(server.requests) == 3


def test_an_endpoint_explains_trajectories_for_an_experience_model_to_learn_from(
    server: ScriptedServer, traces: str
) -> None:
    pytest.importorskip("torch")
    result = dreamgym(
        *("experience", "train", "--data", traces, "--annotator", server.name),
        *("--model", "nano", "--steps", 1, "--out", "fine_tuned", "--json"),
    )
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["unannotated"] == 0
    assert len(server.requests) == 36
    spent = json.loads(Path("fine_tuned/usage.json").read_text(encoding="utf-8"))
    [row] = spent["rows"]
    assert (row["stage"], row["role"], row["requests"]) == ("annotation", "annotator", 36)
