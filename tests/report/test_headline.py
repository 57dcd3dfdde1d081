"""The first thing a report says, and what stands side by side in it: the same actions, the same tasks."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from dreamgym.data.trajectories import TrajectoryWriter, read_trajectories
from dreamgym.errors import DataError, StoreError
from dreamgym.evaluation.audit import FOLDER
from dreamgym.report import live as live_module
from dreamgym.report.headline import headlines, settings_sheet
from dreamgym.report.live import LiveReport, open_server
from dreamgym.report.page import page
from dreamgym.report.run_reader import find_runs, read_run
from dreamgym.report.tables import evaluation_sheet
from dreamgym.report.write import write_report
from dreamgym.types import Provenance, Trajectory
from tests.report.browser import Page, find_browser, open_page
from tests.report.example_run import write_run
from tests.report.test_report import viewer_data

STEPS = 6
ARTEFACTS = os.environ.get("DREAMGYM_SCREENSHOTS")
"""A directory to keep the screenshots in, e.g. as an artefact of CI."""


def share(won: int, total: int) -> dict[str, float]:
    return {"value": won / total, "low": won / total - 0.05, "high": won / total + 0.05, "count": total}


def real_episode(recorded: Trajectory, policy: str, *, success: bool) -> Trajectory:
    kept = recorded.transitions if success else recorded.transitions[:-1]
    return replace(
        recorded,
        id=f"evaluation-{recorded.task.id}",
        transitions=kept,
        provenance=Provenance(source="real", policy=policy),
    )


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `learn` leaves: stages, a run in the dream, its evaluation before and after, its audit."""
    out = tmp_path_factory.mktemp("learn")
    folder = out / "agent"
    recorded = asyncio.run(write_run(folder, steps=STEPS))
    shutil.rmtree(folder / "evaluations")
    stages = {"collect": {"real_steps": 4000, "seconds": 30.0}, "experience": {"seconds": 100.0}}
    (out / "stages.json").write_text(json.dumps({"given": {}, "stages": stages}), encoding="utf-8")
    config = {
        "seed": 7,
        "environment": {"name": "alfworld"},
        "train": {"group_size": 4, "out": "x", "policy_servers": []},
    }
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    with TrajectoryWriter(folder / FOLDER) as writer:  # reality does what it did when it was recorded
        writer.append(
            replace(each, id=f"dream-{place}-{member}", provenance=Provenance(source="real", policy="audit"))
            for place, each in enumerate(recorded)
            for member in (0, 1)
        )
    for step, won in ((0, 2), (STEPS, 5)):
        policy = f"{folder.resolve()}@{step}"
        with TrajectoryWriter(folder / "evaluations" / f"step-{step}") as writer:
            writer.append(
                real_episode(each, policy, success=place < won) for place, each in enumerate(recorded)
            )
    evaluation = {"environment": "alfworld", "split": "test", "real_steps": 50, "wall_seconds": 1.0}
    before = {**evaluation, "policy": f"{folder.resolve()}@0", "success": share(2, 6)}
    after = {**evaluation, "policy": f"{folder.resolve()}@{STEPS}", "success": share(5, 6)}
    difference = {"value": 0.5, "low": 0.1, "high": 0.8, "count": 6}
    comparison = {"against": before["policy"], "difference": difference}
    stored = {**after, "comparison": comparison, "other": before}
    (folder / "evaluations" / "test.json").write_text(json.dumps(stored), encoding="utf-8")
    return folder


def test_a_headline_tells_what_was_trained_how_it_went_and_what_all_stages_took(run: Path) -> None:
    [(name, path)] = find_runs([run.parent])
    [found] = headlines([read_run(name, path, episodes=20)])
    assert found.about.startswith("alfworld · seed 7 · ")
    assert re.search(r"\d\d \w+ 20\d\d", found.about)
    assert (found.before, found.after) == ("33.3%", "83.3%")
    assert found.difference == "+50.0 points [+10.0, +80.0], paired over 6 episodes"
    assert found.verdict == "Training in the dream improved the agent in reality."
    facts = dict(found.facts)
    audited = sum(map(len, read_trajectories(run / FOLDER)))
    stages = "recording 4,000, training 0, evaluation 900, evaluation afterwards 100"
    assert facts["Real steps"] == f"{5_000 + audited:,} ({stages}, audit afterwards {audited})"
    assert facts["Synthetic steps"] == "600 (training 600)"
    assert facts["Dream against reality"].endswith("-33.3 points. The dream is not like reality: audit it.")
    assert facts["Audit"] == "6 of 6 dreamt successes that were replayed are real."


@pytest.mark.parametrize(
    ("low", "high", "verdict"),
    [(-0.9, -0.1, "made the agent worse"), (-0.1, 0.1, "contains 0"), (None, None, "not paired")],
)
def test_the_verdict_follows_from_the_interval(
    run: Path, tmp_path: Path, low: float | None, high: float | None, verdict: str
) -> None:
    copy = Path(shutil.copytree(run, tmp_path / "agent"))
    file = copy / "evaluations" / "test.json"
    stored = json.loads(file.read_text(encoding="utf-8"))
    stored["comparison"]["difference"] |= {"low": low, "high": high}
    file.write_text(json.dumps(stored), encoding="utf-8")
    [found] = headlines([read_run("agent", copy, episodes=0)])
    assert verdict in found.verdict


def test_a_comparison_with_another_run_is_in_the_table_and_not_in_the_headline(
    run: Path, tmp_path: Path
) -> None:
    copy = Path(shutil.copytree(run, tmp_path / "agent"))
    stored = json.loads((copy / "evaluations" / "test.json").read_text(encoding="utf-8"))
    stored["other"] |= {"policy": "/elsewhere/grpo@9", "success": share(6, 6)}
    stored["comparison"] |= {"against": "/elsewhere/grpo@9", "difference": {"value": -0.1, "count": 6}}
    (copy / "evaluations" / "with-other.json").write_text(json.dumps(stored), encoding="utf-8")
    found = read_run("agent", copy, episodes=0)
    assert headlines([found])[0].difference.startswith("+50.0 points")
    cells = [row[1] for row in evaluation_sheet([found]).rows]
    assert f"agent@{STEPS}" in cells
    assert f"difference, paired: agent@{STEPS} − grpo@9" in cells


def test_a_run_that_was_not_evaluated_says_how_to(run: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(run, tmp_path / "agent"))
    shutil.rmtree(copy / "evaluations")
    rows = (copy / "metrics.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
    kept = [row for row in rows if '"evaluation"' not in row.partition(",")[0]]
    (copy / "metrics.jsonl").write_text("".join(kept), encoding="utf-8")
    [found] = headlines([read_run("agent", copy, episodes=0)])
    assert "dreamgym evaluate RUN --against RUN@0" in found.verdict
    assert found.after == ""


def test_the_main_chart_has_the_real_evaluations_at_their_steps_also_of_a_moved_run(
    run: Path, tmp_path: Path
) -> None:
    for path in (run, shutil.copytree(run, tmp_path / "moved")):
        text = page([read_run("agent", path, episodes=0)])
        assert "agent, real evaluation: 33.3% [28.3%, 38.3%] at 0" in text
        assert f"agent, real evaluation: 83.3% [78.3%, 88.3%] at {STEPS}" in text


def test_settings_that_differ_stand_side_by_side_and_of_one_run_those_that_were_chosen(
    run: Path, tmp_path: Path
) -> None:
    one = read_run("one", run, episodes=0)
    assert [row[0] for row in settings_sheet([one]).rows] == ["seed", "train.group_size"]
    other = Path(shutil.copytree(run, tmp_path / "other"))
    config = json.loads((other / "config.json").read_text(encoding="utf-8"))
    config["train"] |= {"group_size": 16, "out": "elsewhere"}
    (other / "config.json").write_text(json.dumps(config), encoding="utf-8")
    sheet = settings_sheet([one, read_run("two", other, episodes=0)])
    assert (sheet.columns, sheet.rows) == (("setting", "one", "two"), (("train.group_size", "4", "16"),))


def test_replays_and_evaluations_are_in_the_viewer(run: Path) -> None:
    shown = viewer_data(page([read_run("agent", run, episodes=4)]))
    dreamt = {each["id"]: each for each in shown if each["role"] == "training"}
    replays = [each for each in shown if each["role"] == "replay"]
    assert replays
    for each in replays:
        actions = [step["action"] for step in each["steps"]]
        assert actions == [step["action"] for step in dreamt[each["id"]]["steps"]]
    tasks = {each["task"] for each in shown if each["role"] == "evaluation"}
    assert len(tasks) == 6
    assert {each["when"] for each in shown if each["role"] == "evaluation"} == {"agent@0", f"agent@{STEPS}"}


def ask(url: str, host: str | None = None) -> str:
    request = urllib.request.Request(url, headers={"Host": host} if host else {})
    with urllib.request.urlopen(request, timeout=10) as answer:
        return str(answer.read().decode())


@pytest.fixture
def served(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Path, str]]:
    monkeypatch.setattr(live_module, "_SECONDS", 0.0)
    folder = tmp_path / "runs"
    folder.mkdir()
    with open_server(LiveReport([folder], [], 4), "127.0.0.1", 0) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        yield folder, f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()
        thread.join()


def test_a_served_report_follows_its_runs_and_answers_nobody_else(
    run: Path, served: tuple[Path, str]
) -> None:
    folder, url = served
    empty = ask(f"{url}version")
    assert "connect-src &#x27;self&#x27;" in ask(url)
    shutil.copytree(run, folder / "agent")
    begun = ask(f"{url}version")
    assert begun != empty
    assert ask(f"{url}version") == begun
    with (folder / "agent" / "metrics.jsonl").open("a", encoding="utf-8") as file:
        file.write(json.dumps({"kind": "train", "step": STEPS, "success": 1.0}) + "\n")
    assert ask(f"{url}version") != begun
    assert "33.3%" in ask(url)
    for path, host in (("../etc/passwd", None), ("", "evil.example:80")):
        with pytest.raises(urllib.error.HTTPError, match=r"40[34]"):
            ask(url + path, host)


def test_a_path_that_is_no_directory_and_a_port_that_is_taken_are_refused(
    tmp_path: Path, served: tuple[Path, str]
) -> None:
    with pytest.raises(DataError, match="expected a directory"):
        LiveReport([tmp_path / "none"], [], 4)
    port = int(served[1].rpartition(":")[2].strip("/"))
    with pytest.raises(StoreError, match="choose another --port"):
        open_server(LiveReport([tmp_path], [], 4), "127.0.0.1", port)


@pytest.fixture(scope="module")
def browser() -> Iterator[Page]:
    program = find_browser()
    if program is None:
        pytest.skip("no browser here")
    with open_page(program) as opened:
        yield opened


def look(browser: Page, url: str, name: str, width: int, height: int) -> None:
    """Opens a page at this size, keeps a picture of it if asked for, and checks that nothing is cut off."""
    browser.requests.clear()
    browser.complaints.clear()
    browser.resize(width, height)
    browser.open(url)
    if ARTEFACTS:
        Path(ARTEFACTS).mkdir(parents=True, exist_ok=True)
        (Path(ARTEFACTS) / f"{name}.png").write_bytes(browser.screenshot())
    assert browser.evaluate("document.documentElement.scrollWidth") <= width
    assert browser.complaints == []


def test_the_report_shows_the_same_actions_side_by_side_and_the_same_task_before_and_after(
    browser: Page, run: Path, tmp_path: Path
) -> None:
    out = tmp_path / "report.html"
    write_report([run], out, [], 20)
    look(browser, out.as_uri(), "report-wide", 1300, 900)
    heads = "['head-dream', 'head-real'].map(id => document.querySelector(`#${id} h4`).textContent)"
    assert browser.evaluate(heads) == ["Dream", "Reality, the same actions"]
    browser.press("/")
    browser.write("dream-0-1")  # the dream that forgets the third step
    browser.press("Escape")
    assert browser.evaluate(heads) == ["Dream", "Reality, the same actions"]
    labels = browser.evaluate("[...document.querySelectorAll('#steps .number')].map(n => n.innerText)")
    assert "states differ" in labels[3]
    assert not any("actions differ" in label for label in labels)
    browser.evaluate(
        "(() => { const where = document.getElementById('source'); where.value = 'evaluation';"
        "document.getElementById('search').value = '';"
        "where.dispatchEvent(new Event('input', { bubbles: true })) })()"
    )
    assert browser.evaluate(heads) == ["Reality, agent@0", f"Reality, agent@{STEPS}"]
    browser.press("n")
    link = browser.evaluate("location.href")
    task = browser.evaluate("document.getElementById('task').textContent")
    browser.open("about:blank")
    browser.open(link)
    assert browser.evaluate("document.getElementById('task').textContent") == task


def test_at_400_pixels_axes_can_be_read_and_names_do_not_break(
    browser: Page, run: Path, tmp_path: Path
) -> None:
    out = tmp_path / "report.html"
    write_report([run], out, [], 20)
    look(browser, out.as_uri(), "report-narrow", 400, 900)
    heights = browser.evaluate(
        "[...document.querySelectorAll('svg.chart text')].map(t => t.getBoundingClientRect().height)"
    )
    assert min(heights) > 10
    lines = "(e => { const range = document.createRange(); range.selectNodeContents(e);"
    lines += " return range.getClientRects().length })"
    assert browser.evaluate(f"{lines}(document.querySelector('.headline h2'))") == 1
    assert browser.evaluate(f"{lines}(document.querySelector('.runs li'))") <= 2


def test_an_open_page_reloads_when_its_run_has_gone_on(
    browser: Page, run: Path, served: tuple[Path, str]
) -> None:
    folder, url = served
    shutil.copytree(run, folder / "agent")
    look(browser, url, "report-live", 1300, 900)
    assert all(each.startswith((url, "data:")) for each in browser.requests)
    before = browser.evaluate("document.documentElement.dataset.live")
    assert before == ask(f"{url}version")
    with (folder / "agent" / "metrics.jsonl").open("a", encoding="utf-8") as file:
        file.write(json.dumps({"kind": "train", "step": STEPS, "success": 1.0}) + "\n")
    after = ask(f"{url}version")
    browser.wait_for(f"document.documentElement.dataset.live === {json.dumps(after)}")
