"""`dreamgym buffer` as a user meets it: in a shell, with real files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from dreamgym.cli.buffer import app
from dreamgym.data.trajectories import TrajectoryWriter
from tests.replay.household import episode

run = CliRunner()


def dreamgym(*arguments: str, code: int = 0) -> str:
    result = run.invoke(app, list(arguments))
    assert result.exit_code == code, result.output + result.stderr
    return result.stdout if code == 0 else result.stderr


def as_json(*arguments: str) -> Any:
    return json.loads(dreamgym(*arguments, "--json"))


@pytest.fixture
def trajectories(tmp_path: Path) -> Path:
    with TrajectoryWriter(tmp_path / "trajectories") as writer:
        writer.append(episode(n, source="synthetic" if n % 3 == 0 else "real") for n in range(30))
    return tmp_path / "trajectories"


@pytest.fixture
def store(trajectories: Path, tmp_path: Path) -> str:
    store = str(tmp_path / "replay.sqlite")
    dreamgym("build", str(trajectories), "--store", store)
    return store


def test_building_twice_adds_nothing_and_more_trajectories_are_added(
    trajectories: Path, tmp_path: Path
) -> None:
    store = str(tmp_path / "replay.sqlite")
    first = as_json("build", str(trajectories), "--store", store)
    assert (first["trajectories"], first["new_rows"], first["rows"]) == (30, 120, 120)
    with TrajectoryWriter(trajectories) as writer:
        writer.append([episode(77)])
    second = as_json("build", str(trajectories), "--store", store)
    assert (second["new_rows"], second["known_rows"], second["rows"]) == (4, 120, 124)


def test_search_finds_what_was_built_and_obeys_its_filters(store: str) -> None:
    step = episode(4).transitions[1]
    asked = ("search", store, "--state", step.state.text, "--action", step.action)
    found = as_json(*asked, "--k", "3")
    assert len(found) == 3
    assert found[0]["transition_id"] == "household-real-4:1"
    assert found[0]["transition"]["outcome"]["next_state"]["text"] == step.outcome.next_state.text
    others = as_json(*asked, "--k", "50", "--exclude-trajectory", "household-real-4", "--source", "real")
    assert {each["provenance"]["source"] for each in others} == {"real"}
    assert all(each["trajectory_id"] != "household-real-4" for each in others)
    assert as_json(*asked, "--min-reward", "2") == []
    assert "household-real-4:1" in dreamgym(*asked).replace("\n", "")


def test_stats_count_by_environment_and_source(store: str) -> None:
    about = as_json("stats", store, "--recall")
    assert (about["rows"], about["real"], about["synthetic"]) == (120, 80, 40)
    assert about["recall_at_8"] == 1.0
    assert {(each["source"], each["trajectories"]) for each in about["holdings"]} == {
        ("real", 20),
        ("synthetic", 10),
    }
    shown = dreamgym("stats", store)
    assert "household" in shown
    assert "size bytes" in shown, "headings are words"


def test_compact_reembeds_and_evicts(store: str, trajectories: Path) -> None:
    shrunk = as_json("compact", store, "--capacity", "100")
    assert (shrunk["rows"], shrunk["evicted"], shrunk["reembedded"]) == (100, 20, False)
    assert as_json("compact", store, "--embedder", "lexical")["reembedded"] is False
    assert as_json("stats", store)["synthetic"] == 20


def test_mistakes_end_with_advice_and_their_exit_code(store: str, tmp_path: Path) -> None:
    missing = str(tmp_path / "missing.sqlite")
    for command in (["stats", missing], ["search", missing, "--state", "x"], ["compact", missing]):
        assert "dreamgym buffer build" in dreamgym(*command, code=5).replace("\n", " ")
    assert not Path(missing).exists()
    assert "expected" in dreamgym("build", str(tmp_path / "nowhere"), "--store", store, code=3)
    assert "lexical" in dreamgym("search", store, "--state", "x", "--embedder", "word2vec", code=2)
    assert "real or synthetic" in dreamgym("search", store, "--state", "x", "--source", "dream", code=2)
    refused = dreamgym("search", store, "--state", "x", "--env", "houshold", code=2)
    assert "did you mean 'household'?" in refused.replace("\n", " ")


def test_several_environments_need_a_name(store: str, tmp_path: Path) -> None:
    with TrajectoryWriter(tmp_path / "office") as writer:
        writer.append([episode(1, environment="office")])
    dreamgym("build", str(tmp_path / "office"), "--store", store)
    assert "--env" in dreamgym("search", store, "--state", "x", code=2)
    assert as_json("search", store, "--state", "x", "--env", "office", "--k", "9")[0][
        "trajectory_id"
    ].startswith("office")


def test_help_has_examples() -> None:
    for command in ("build", "stats", "search", "compact"):
        assert f"dreamgym buffer {command}" in dreamgym(command, "--help")
