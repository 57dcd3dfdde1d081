"""The commands `dreamgym data …` and `dreamgym ingest`, as a user or a script meets them."""

from __future__ import annotations

import json
import lzma
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner, Result

from dreamgym.cli import console, data
from dreamgym.cli.ingest import ingest
from dreamgym.data.trajectories import TrajectoryWriter, encode_trajectory, read_trajectories
from dreamgym.types import State
from tests.data.trajectory_examples import episode

app = typer.Typer()
app.add_typer(data.app, name="data")
console.command(app, "ingest")(ingest)


@pytest.fixture(autouse=True)
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    """No line is broken, however long the path of a temporary folder is."""
    monkeypatch.setattr(console.out, "width", 300)


def run(*arguments: object, code: int = 0) -> Result:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert result.exit_code == code, (result.output, result.exception)
    return result


def answer(*arguments: object, code: int = 0) -> Any:
    return json.loads(run(*arguments, "--json", code=code).stdout)


@pytest.fixture
def recorded(tmp_path: Path) -> Path:
    directory = tmp_path / "recorded"
    with TrajectoryWriter(directory, shard_rows=2) as writer:
        long = episode("b", turns=5, success=False)
        writer.append([episode("a"), long, episode("c", turns=1, family="[bold]cooking")])
    return directory


def chat(task: str, *actions: str, **more: Any) -> str:
    said = [{"role": "user", "content": task}]
    for action in actions:
        said += [{"role": "assistant", "content": action}, {"role": "user", "content": f"You did {action}."}]
    return json.dumps({"messages": said, **more}) + "\n"


@pytest.fixture
def chats(tmp_path: Path) -> Path:
    file = tmp_path / "chats.jsonl"
    file.write_text(chat("Go.", "walk", "run") + chat("Stop.", "stand", id="s", reward=1.0), encoding="utf-8")
    return file


def test_show_prints_the_whole_episode(recorded: Path) -> None:
    shown = run("data", "show", recorded, "--index", 1).stdout
    for part in ("b", "Find the chest.", "You stand in a hall.", "go north", "room 4.", "truncated"):
        assert part in shown
    assert "success" in run("data", "show", recorded, "--id", "c").stdout
    assert answer("data", "show", recorded, "--id", "c") == json.loads(
        encode_trajectory(list(read_trajectories(recorded))[2])
    )


def test_show_says_what_is_missing(recorded: Path) -> None:
    assert "expected a trajectory with id 'z'" in run("data", "show", recorded, "--id", "z", code=3).stderr
    assert "expected a trajectory at index 9" in run("data", "show", recorded, "--index", 9, code=3).stderr
    assert "found nothing" in run("data", "show", recorded / "nowhere", code=3).stderr


def test_a_state_cannot_steer_the_terminal(tmp_path: Path) -> None:
    evil = replace(episode("x"), start=State(text="\x1b[2J[red]gone\x07"), transitions=())
    with TrajectoryWriter(tmp_path / "d") as writer:
        writer.append([evil])
    shown = run("data", "show", tmp_path / "d").stdout
    assert "\x1b[2J" not in shown
    assert "[red]gone" in shown


def test_stats_count_by_kind(recorded: Path) -> None:
    counted = answer("data", "stats", recorded)
    assert (counted["episodes"], counted["successes"], counted["transitions"]) == (3, 2, 9)
    assert counted["mean_steps"] == 3.0
    assert counted["shards"] == 2
    assert counted["by"]["family"]["treasure"]["success_rate"] == 0.5
    assert counted["by"]["policy"]["expert"]["episodes"] == 3
    assert counted["by"]["source"]["real"]["episodes"] == 3
    shown = run("data", "stats", recorded).stdout
    assert "[bold]cooking" in shown
    assert "66.7%" in shown


def test_validate_passes_good_data_and_lists_every_problem(recorded: Path) -> None:
    assert "valid rows" in run("data", "validate", recorded).stdout
    assert answer("data", "validate", recorded) == {"valid": 3, "problem_count": 0, "problems": []}
    row = encode_trajectory(episode("a"))
    (recorded / "zz.jsonl").write_text(f'{row}\n{{"id": 1}}\nnot json\n{row[:50]}', encoding="utf-8")
    found = answer("data", "validate", recorded, "--limit", 2, code=3)
    assert (found["valid"], found["problem_count"], len(found["problems"])) == (4, 4, 2)
    assert "expected each id once, got 'a' again" in found["problems"][0]
    assert "zz.jsonl:3: expected JSON, got b'not json'" in run("data", "validate", recorded, code=3).stdout


def test_ingest_stores_every_conversation_once(chats: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    first = answer("ingest", chats, "--env", "gym", "--split", "test", "--out", out)
    assert (first["new"], first["already_there"], first["bad"]) == (2, 0, 0)
    assert first["files"][0]["format"] == "messages"
    again = answer("ingest", chats, "--env", "gym", "--out", out)
    assert (again["new"], again["already_there"]) == (0, 2)
    stored = list(read_trajectories(out))
    assert [trajectory.task.split for trajectory in stored] == ["test", "test"]
    assert [trajectory.total_reward for trajectory in stored] == [0.0, 1.0]
    assert stored[1].id == "s"
    assert "2 already there" in run("ingest", chats, "--env", "gym", "--out", out).stdout


def test_a_bad_line_stops_ingest_and_nothing_is_stored(chats: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    run("ingest", chats, "--env", "gym", "--out", out)
    before = {file.name: file.read_bytes() for file in out.iterdir()}
    bad = tmp_path / "bad.jsonl"
    bad.write_text(chat("Jump.", "jump") + '{"messages": 7}\n' + chat("Sit.", "sit"), encoding="utf-8")
    failed = run("ingest", bad, "--env", "gym", "--format", "messages", "--out", out, code=3)
    assert f"{bad}:2: expected messages to be a valid list, got 7" in failed.stderr.replace("\n", "")
    assert {file.name: file.read_bytes() for file in out.iterdir()} == before


def test_skip_bad_stores_the_good_and_counts_the_bad(tmp_path: Path) -> None:
    bad = tmp_path / "bad.jsonl"
    lines = [b"\xff\xfe\n", chat("Jump.", "jump").encode(), b"[" * 100_000 + b"\n", b"NaN\n", b"\0\0\n"]
    bad.write_bytes(b"".join(lines))
    options = ["--format", "messages", "--env", "gym", "--skip-bad"]
    result = answer("ingest", bad, *options, "--out", tmp_path / "out")
    assert (result["new"], result["bad"]) == (1, 4)
    reported_lines = [problem.split(": ")[0].rpartition(":")[2] for problem in result["problems"]]
    assert reported_lines == ["1", "3", "4", "5"]


def test_two_different_records_with_one_id_are_not_silently_one(tmp_path: Path) -> None:
    file = tmp_path / "twins.jsonl"
    file.write_text(chat("Go.", "walk", id=1) + chat("Go.", "run", id=1), encoding="utf-8")
    arguments = ["ingest", file, "--env", "g", "--out", tmp_path / "out"]
    assert f"{file}:2: expected an id of its own" in run(*arguments, code=3).stderr.replace("\n", "")
    assert answer(*arguments, "--skip-bad")["new"] == 1


def test_ingest_explains_what_it_cannot_use(chats: Path, recorded: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert "give --env NAME" in run("ingest", chats, "--out", out, code=2).stderr
    assert "unknown format 'mesages'; did you mean 'messages'?" in (
        run("ingest", chats, "--format", "mesages", "--out", out, code=2).stderr
    )
    own = recorded / "trajectories-00000.jsonl"
    assert "got our own trajectories" in run("ingest", own, "--out", out, code=3).stderr
    odd = tmp_path / "odd.jsonl"
    odd.write_text('{"question": 1}\n', encoding="utf-8")
    assert "expected a record of one of the formats messages, atif, otel, parquet" in (
        run("ingest", odd, "--out", out, code=3).stderr.replace("\n", " ")
    )
    odd.write_text("", encoding="utf-8")
    assert "got an empty file" in run("ingest", odd, "--out", out, code=3).stderr
    assert not list(out.glob("*.jsonl"))


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("messages", "out.jsonl"),
        ("messages", "out.jsonl.gz"),
        ("atif", "out.jsonl.xz"),
        ("parquet", "out.parquet"),
    ],
)
def test_an_export_is_ingested_back(recorded: Path, tmp_path: Path, kind: str, name: str) -> None:
    file = tmp_path / name
    result = answer("data", "export", recorded, "--format", kind, "--out", file)
    assert (result["trajectories"], result["bytes"]) == (3, file.stat().st_size)
    assert answer("ingest", file, "--env", "house", "--out", tmp_path / "back")["new"] == 3
    back, before = list(read_trajectories(tmp_path / "back")), list(read_trajectories(recorded))
    assert [(each.id, each.success, len(each)) for each in back] == [
        (each.id, each.success, len(each)) for each in before
    ]
    assert kind != "parquet" or back == before, "Parquet holds whole rows"
    first = file.read_bytes()
    run("data", "export", recorded, "--format", kind, "--out", file, "--force")
    assert file.read_bytes() == first


def test_one_trajectory_is_exported_as_one_atif_document(recorded: Path, tmp_path: Path) -> None:
    options = ["data", "export", recorded, "--format", "atif", "--out", tmp_path / "b.json"]
    assert "expected --id" in run(*options, code=2).stderr
    run(*options, "--id", "b")
    assert json.loads((tmp_path / "b.json").read_text(encoding="utf-8"))["trajectory_id"] == "b"


def test_a_failed_export_leaves_no_file(recorded: Path, tmp_path: Path) -> None:
    with (recorded / "trajectories-00001.jsonl").open("ab") as shard:
        shard.write(b"torn")
    options = ["data", "export", recorded, "--out", tmp_path / "out" / "x"]
    assert "there is no directory" in run(*options, "--format", "messages", code=2).stderr
    (tmp_path / "out").mkdir()
    for kind in ("messages", "atif", "parquet"):
        run(*options, "--format", kind, code=3)
    run(*options, "--format", "messages", "--id", "z", code=3)
    run(*options, "--format", "otel", code=2)
    assert list((tmp_path / "out").iterdir()) == []
    refused = run(*options, "--format", "csv", code=2).stderr
    assert "otel" not in refused, "only formats that can be written are offered"


def test_trajectories_are_exported_as_they_are_into_one_file(recorded: Path, tmp_path: Path) -> None:
    options = ["data", "export", recorded, "--format", "trajectories", "--out"]
    run(*options, tmp_path / "all.jsonl.xz")
    assert list(read_trajectories(tmp_path / "all.jsonl.xz")) == list(read_trajectories(recorded))
    assert "twice" in run(*options, recorded / "all.jsonl.xz", code=2).stderr


def test_an_existing_file_is_replaced_only_by_force(recorded: Path, tmp_path: Path) -> None:
    file = tmp_path / "chats.jsonl"
    file.write_text("mine", encoding="utf-8")
    options = ["data", "export", recorded, "--format", "messages", "--out", file]
    assert "--force" in run(*options, code=2).stderr
    assert file.read_text(encoding="utf-8") == "mine"
    assert answer(*options, "--force")["trajectories"] == 3


def test_records_without_a_reward_are_counted_and_marked(tmp_path: Path) -> None:
    file = tmp_path / "chats.jsonl"
    file.write_text(chat("Jump.", "jump") + chat("Sit.", "sit", success=True), encoding="utf-8")
    done = run("ingest", file, "--env", "gym", "--out", tmp_path / "keep", "--json")
    assert "no reward found in 1 of 2 records" in " ".join(done.stderr.split())
    (found,) = json.loads(done.stdout)["files"]
    assert (found["trajectories"], found["successes"], found["no_reward"]) == (2, 1, 1)
    ends = [each.transitions[-1].outcome for each in read_trajectories(tmp_path / "keep")]
    assert [(end.reward, end.success, end.reward_source) for end in ends] == [
        (0.0, False, "unknown"),
        (1.0, True, "environment"),
    ]
    for choice, stored in (("fail", [False, True]), ("success", [True, True]), ("skip", [True])):
        options = ["--env", "gym", "--no-reward", choice, "--out", tmp_path / choice]
        answer("ingest", file, *options)
        found = list(read_trajectories(tmp_path / choice))
        assert [each.success for each in found] == stored
        assert all(each.transitions[-1].outcome.reward_source == "environment" for each in found)
    assert "did you mean 'skip'" in (
        run("ingest", file, "--env", "gym", "--no-reward", "skp", "--out", tmp_path / "x", code=2).stderr
    )


def test_a_refused_file_leaves_no_directory(tmp_path: Path) -> None:
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"messages": 7}\n', encoding="utf-8")
    run("ingest", bad, "--env", "gym", "--out", tmp_path / "out", code=3)
    assert not (tmp_path / "out").exists()


def test_validate_keeps_few_of_many_problems(tmp_path: Path) -> None:
    bomb = tmp_path / "bomb.jsonl.xz"
    bomb.write_bytes(lzma.compress(b"x\n" * 30_000))
    found = answer("data", "validate", bomb, "--limit", 3, code=3)
    assert (found["problem_count"], len(found["problems"])) == (30_000, 3)
