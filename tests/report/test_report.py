"""What the report makes of a run folder, whatever is in it."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import re
import shutil
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from dreamgym.charts import HEIGHT, Chart, Line, Point, draw
from dreamgym.cli import app
from dreamgym.data.trajectories import TrajectoryWriter
from dreamgym.report.episodes import keep, recorded
from dreamgym.report.page import page
from dreamgym.report.run_reader import Run, find_runs, read_run
from dreamgym.report.safe_reading import Problems
from dreamgym.report.tables import as_json, cost_sheet, evaluation_sheet, fidelity_sheet, overview
from tests.report.example_run import HOSTILE, recorded_episodes, write_run

FILES = ["metrics.jsonl", "tasks.jsonl", "fidelity.json", "predictions.jsonl", "config.json", "summary.json"]


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "agent"
    asyncio.run(write_run(folder))
    return folder


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Recorded episodes: those whose tasks were simulated, and two others."""
    folder = tmp_path_factory.mktemp("recorded")
    with TrajectoryWriter(folder) as keeper:
        keeper.append(recorded_episodes(8))
    return folder


def read(folder: Path) -> Run:
    ((name, path),) = find_runs([folder])
    return read_run(name, path, episodes=200)


def viewer_data(text: str) -> list[dict[str, Any]]:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.S)
    assert found is not None
    episodes: list[dict[str, Any]] = json.loads(found[1])
    return episodes


def test_the_page_refers_to_nothing_outside_itself(run_folder: Path) -> None:
    text = page([read(run_folder)])
    assert "default-src &#x27;none&#x27;" in text
    targets = re.findall(r"""\s(?:src|href|action|data|poster|srcset)\s*=\s*["']?([^"'\s>]*)""", markup(text))
    assert targets
    assert all(target.startswith(("#", "data:,")) for target in targets)
    assert "@import" not in text
    assert "url(" not in text


def markup(text: str) -> str:
    """The tags of a page, without the text between them."""
    return " ".join(re.findall(r"<[a-z][^>]*>", re.sub(r"<script.*?</script>", "", text, flags=re.S)))


def test_only_the_two_blocks_written_here_may_act_in_the_page(run_folder: Path) -> None:
    text = page([read(run_folder)])
    allowed = re.findall(r"(style|script)-src &#x27;sha256-([^&]+)&#x27;", text)
    for tag, digest in allowed:
        (block,) = re.findall(rf"<{tag}>(.*?)</{tag}>", text, re.S)
        assert base64.b64encode(hashlib.sha256(block.encode()).digest()).decode() == digest
    assert [tag for tag, _ in allowed] == ["style", "script"]
    assert "unsafe" not in text


def test_no_text_of_a_run_is_markup_in_the_page(run_folder: Path) -> None:
    text = page([read(run_folder)])
    assert HOSTILE not in text
    assert "<script>harmed" not in text
    assert "<img" not in text
    assert "\x1b" not in text
    shown = [each for each in viewer_data(text) if each["id"].startswith("hostile")]
    assert shown[0]["steps"][0]["state"] == HOSTILE.replace("\x1b", "\\x1b")


def test_practice_and_real_evaluation_are_drawn_with_intervals(run_folder: Path) -> None:
    run = read(run_folder)
    assert [point.y for point in run.series("success")] == [0.5] * 6
    assert [(each.success.x, each.success.y) for each in run.validation] == [(0, 0.4), (4, 0.7)]
    low, high = run.validation[1].success.low, run.validation[1].success.high
    assert low is not None
    assert high is not None
    assert 0.5 < low < 0.7 < high < 0.9
    text = page([run])
    assert "agent, real evaluation: 70.0% [56.2%, 80.9%] at 4" in text
    for title in ("Success while learning", "Reward entropy", "Task pool", "Drift"):
        assert f"<title>{title}</title>" in text


def test_the_tables_tell_what_the_files_hold(run_folder: Path) -> None:
    run = read(run_folder)
    (row,) = overview([run]).rows
    named = dict(zip(overview([run]).columns, row, strict=True))
    assert named["real success [95%]"] == "50.0% [18.8, 81.2] (6)"
    assert (named["real steps"], named["synthetic steps"], named["seconds"]) == ("981", "600", "36")
    assert cost_sheet([run]).rows == (
        ("agent", "rollout", "–", "600", "15"),
        ("agent", "evaluation", "900", "–", "8"),
        ("agent", "evaluation afterwards", "81", "–", "14"),
        ("agent", "together", "981", "600", "36"),
    )
    stored = json.loads((run_folder / "fidelity.json").read_text(encoding="utf-8"))
    exact = stored["steps"]["next_state_exact"]["value"]
    assert 0 < exact < 1
    cells = {row[0]: row[1] for row in fidelity_sheet([run]).rows}
    assert cells["next state exact"].startswith(f"{exact:.3f} [")
    assert any("difference, paired" in row[1] for row in evaluation_sheet([run]).rows)
    assert run.pool is not None
    assert (run.pool.seeds, run.pool.generated[-1].y) == (6, 2)


def test_a_synthetic_episode_is_shown_next_to_the_recorded_episode_of_its_task(
    run_folder: Path, real: Path
) -> None:
    run = read(run_folder)
    tasks = {each.task.id for each in run.kept.episodes}
    real_episodes = recorded([real], tasks, 200, Problems())
    assert {each.task.id for each in real_episodes} == {each.task.id for each in recorded_episodes()}
    shown = viewer_data(page([run], real_episodes))
    assert {each["source"] for each in shown} == {"dream", "real"}


def test_reasoning_demonstrations_and_sheet_are_shown_where_they_were_kept(run_folder: Path) -> None:
    dreams = {each["id"]: each for each in viewer_data(page([read(run_folder)]))}
    known, unknown = dreams["dream-0-0"], dreams["dream-0-1"]
    assert known["sheet"][0] == "atlocation(agent1, loc 1)"
    taken = next(step for step in known["steps"] if step["action"].startswith("take"))
    assert taken["reasoning"]
    assert any("laptop 2" in fact for fact in taken["prediction"]["ended"])
    assert taken["prediction"]["demonstrations"][0]["similarity"] == 0.875
    assert unknown["sheet"] == known["sheet"], "the trajectory records the sheet at the start"
    assert all("prediction" not in step for step in unknown["steps"])


def test_of_a_step_that_was_logged_twice_the_last_record_counts(run_folder: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(run_folder, tmp_path / "agent"))
    with (copy / "metrics.jsonl").open("a", encoding="utf-8") as file:
        file.write(json.dumps({"kind": "train", "step": 2, "success": 1.0}) + "\n")
    assert [point.y for point in read(copy).series("success")] == [0.5, 0.5, 1.0, 0.5, 0.5, 0.5]


@pytest.mark.parametrize("name", [name for name in FILES[:4] if name != "tasks.jsonl"])
def test_a_truncated_file_loses_its_tail_and_is_reported(run_folder: Path, tmp_path: Path, name: str) -> None:
    copy = Path(shutil.copytree(run_folder, tmp_path / "agent"))
    whole = (copy / name).read_bytes()
    (copy / name).write_bytes(whole[: len(whole) // 2])
    run = read(copy)
    assert run.problems.count == 1
    assert name in run.problems.messages[0]
    assert name in page([run])


def test_a_run_without_anything_says_what_is_missing(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text("{}", encoding="utf-8")
    text = page([read(tmp_path)])
    for said in ("No run here has trained", "No fidelity was measured", "kept no trajectories"):
        assert said in text
    assert viewer_data(text) == []
    assert "<svg" not in text


numbers = st.integers(-2, 9) | st.floats() | st.integers(min_value=10**300, max_value=10**310)
texts = st.text(max_size=6) | st.just(HOSTILE)
plain = st.none() | st.booleans() | numbers | texts
values = plain | st.lists(plain, max_size=3) | st.lists(st.lists(plain, max_size=2), max_size=2)
estimates = values | st.fixed_dictionaries(
    {"value": numbers, "low": numbers, "high": numbers, "count": numbers}
)
played = st.fixed_dictionaries(
    {"task": plain, "tries": plain, "entropy": numbers, "state": texts, "id": texts}
)
rows = st.fixed_dictionaries(
    {
        "kind": st.sampled_from(["train", "evaluation"]),
        "event": st.sampled_from(["seed", "generated", "played", "resumed"]),
        "step": numbers,
    },
    optional={
        "success": estimates,
        "reward_entropy": numbers,
        "drift": values | st.lists(st.fixed_dictionaries({"step": numbers, "exact": estimates}), max_size=2),
        "spent": values | st.dictionaries(st.sampled_from(["real_steps", "x_seconds"]), plain),
        "results": values | st.lists(played, max_size=2),
        "tasks": values | st.lists(played, max_size=2),
        "counts": values | st.dictionaries(texts, plain, max_size=2),
        "stages": st.dictionaries(texts, st.dictionaries(st.just("seconds"), plain), max_size=2),
        "trajectory": st.just("dream-0-0"),
        "position": st.integers(0, 2) | plain,
        "sheet": values,
        "ended": values,
        "demonstrations": values | st.lists(played, max_size=2),
    },
)


@pytest.fixture(scope="module")
def broken_folder(run_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(shutil.copytree(run_folder, tmp_path_factory.mktemp("broken") / "agent"))


@settings(max_examples=60, deadline=None, phases=[Phase.explicit, Phase.reuse, Phase.generate])
@given(st.sampled_from(FILES), st.lists(rows, max_size=4), st.binary(max_size=20))
def test_whatever_a_run_holds_becomes_a_page(
    broken_folder: Path, name: str, lines: list[dict[str, Any]], tail: bytes
) -> None:
    """Numbers beyond all bounds, wrong types, broken lines: nothing of it may end the report."""
    for other in FILES:
        (broken_folder / other).unlink(missing_ok=True)
    content = b"\n".join(json.dumps(each).encode() for each in lines)
    (broken_folder / name).write_bytes(content + tail)
    run = read(broken_folder)
    text = page([run])
    assert "<script>harmed" not in text
    assert not re.search(r"\b(nan|inf)\b", markup(text))
    text.encode()
    json.dumps(as_json([run]), allow_nan=False)


def test_a_chart_of_extreme_numbers_still_has_its_points_inside() -> None:
    for far, near in ((1e15, 5e-324), (5e-324, 0.0), (-1e15, -1e15)):
        points = tuple(Point(x=x, y=x, low=-far, high=far) for x in (near, far))
        drawn = draw(Chart(title="extreme", lines=(Line(label="a", points=points, style="marks"),)))
        places = [float(y) for y in re.findall(r'(?:cy|y1|y2)="([^"]+)"', drawn)]
        assert all(0 <= y <= HEIGHT for y in places)


def test_of_many_episodes_an_even_spread_is_kept(tmp_path: Path) -> None:
    (example,) = recorded_episodes(1)
    with TrajectoryWriter(tmp_path / "trajectories") as keeper:
        keeper.append(replace(example, id=f"e{number:04d}") for number in range(95))
    kept = keep(tmp_path, 7, Problems())
    assert (kept.total, kept.successes, len(kept.episodes)) == (95, 95, 7)
    places = [int(each.id[1:]) for each in kept.episodes]
    assert places[0] == 0
    assert places[-1] > 85
    gaps = [after - before for before, after in pairwise(places)]
    assert max(gaps) <= 2 * min(gaps)


def test_the_command_writes_a_page_prints_a_table_and_leaves_the_run_alone(
    run_folder: Path, tmp_path: Path
) -> None:
    before = {path: path.read_bytes() for path in run_folder.rglob("*") if path.is_file()}
    out = tmp_path / "deep" / "report.html"
    other = Path(shutil.copytree(run_folder, tmp_path / "[red]\x1b[2J"))
    words = ["report", str(run_folder), str(other), "--out", str(out)]
    done = CliRunner().invoke(app, words, env={"COLUMNS": "240"})
    assert done.exit_code == 0, done.output
    assert "50.0% [18.8, 81.2] (6)" in done.output
    assert "[red]\\x1b[2J" in done.output
    assert out.read_text(encoding="utf-8").startswith("<!doctype html>")
    assert {path: path.read_bytes() for path in run_folder.rglob("*") if path.is_file()} == before


def test_the_command_tells_programs_the_same(run_folder: Path, real: Path, tmp_path: Path) -> None:
    out = tmp_path / "report.html"
    words = ["report", str(run_folder), "--out", str(out), "--trajectories", str(real), "--json"]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.output
    printed = json.loads(done.stdout)
    assert printed["recorded"] == 6
    assert printed["runs"][0]["spent"] == {"real_steps": 981.0, "synthetic_steps": 600.0, "seconds": 36.5}
    assert [each["success"] for each in printed["runs"][0]["validation"]] == [0.4, 0.7]


def test_a_folder_of_runs_is_all_of_them_and_each_has_a_name_of_its_own(
    run_folder: Path, tmp_path: Path
) -> None:
    for place in ("one/agent", "two/agent"):
        shutil.copytree(run_folder, tmp_path / place)
    found = find_runs([tmp_path / "one", tmp_path / "two" / "agent"])
    assert [name for name, _ in found] == ["one/agent", "two/agent"]


def test_the_weights_of_a_run_are_no_run(run_folder: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(run_folder, tmp_path / "agent"))
    (copy / "metrics.jsonl").unlink()
    (copy / "model").mkdir()
    (copy / "model" / "config.json").write_text("{}", encoding="utf-8")
    assert find_runs([copy]) == [("agent", copy)]


def test_runs_in_reality_are_compared_by_the_real_steps_they_used(run_folder: Path, tmp_path: Path) -> None:
    real = tmp_path / "baseline"
    real.mkdir()
    (real / "config.json").write_text('{"train": {"mode": "real"}}', encoding="utf-8")
    share = {"value": 0.25, "low": 0.2, "high": 0.3, "count": 200}
    rows: list[dict[str, Any]] = [
        {"kind": "train", "step": step, "spent": {"real_steps": 900 * (step + 1)}} for step in range(3)
    ]
    rows.append({"kind": "evaluation", "step": 2, "success": share})
    (real / "metrics.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    text = page([read(run_folder), read(real)])
    assert "baseline: 25.0% [20.0%, 30.0%] at 1800" in text
    assert "agent: 70.0% [56.2%, 80.9%] at 0" in text
    assert "Real success against real steps" not in page([read(run_folder)])


@pytest.mark.parametrize(
    ("place", "message"), [("empty", "found none of metrics.jsonl"), ("nowhere", "nothing")]
)
def test_what_is_no_run_is_bad_data(tmp_path: Path, place: str, message: str) -> None:
    (tmp_path / "empty").mkdir()
    done = CliRunner().invoke(app, ["report", str(tmp_path / place)])
    assert done.exit_code == 3
    assert message in " ".join(done.output.split())
