"""What endpoints cost stands in the report, whatever a run's file holds."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dreamgym.models.usage import Usage, UsageRow, stage
from dreamgym.report.page import page
from dreamgym.report.run_reader import read_run
from dreamgym.report.usage import usage_sheet


def test_every_stage_and_role_has_a_line_and_the_sum_one_more(tmp_path: Path) -> None:
    usage = Usage(file=tmp_path / "usage.json")
    with stage("annotation"):
        usage.row("annotator", "strong").add(UsageRow(requests=8, retries=2, cache_hits=8, money=0.5))
    with stage("train"):
        usage.row("<b>judge</b>", "near").add(
            UsageRow(requests=4, prompt_tokens=5000, unconfirmed_money=0.25)
        )
    usage.save()
    run = read_run("run", tmp_path, episodes=1)
    first, second, total = usage_sheet([run]).rows
    rest = ("50%", "0", "0", "0", "0.5000")
    assert first == ("run", "annotation", "annotator", "strong", "8", "2", "0", *rest)
    assert second[1:4] == ("train", "<b>judge</b>", "near")
    assert second[-1] == "0.0000 + 0.2500"
    assert total[1:7] == ("total", "", "", "12", "2", "0")
    shown = page([run])
    assert "Usage of endpoints" in shown
    assert "<b>judge" not in shown


@pytest.mark.parametrize("held", [{}, {"rows": 3}, {"rows": [3, {"requests": "many", "money": None}]}, []])
def test_a_file_that_holds_something_else_breaks_no_report(held: object, tmp_path: Path) -> None:
    (tmp_path / "usage.json").write_text(json.dumps(held), encoding="utf-8")
    assert page([read_run("run", tmp_path, episodes=1)])
