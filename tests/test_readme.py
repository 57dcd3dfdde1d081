"""README: its picture and its numbers are those of `results/`, and a reader soon finds how to begin."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET

import pytest
from website import evidence, recording

from tests.conftest import ROOT

README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_picture_is_drawn_from_the_results() -> None:
    assert evidence.OUT.read_text(encoding="utf-8") == evidence.draw(), "run python -m website.evidence"


def test_every_number_of_the_results_table_is_in_the_tables_of_all_results() -> None:
    # Tables of that page are compared with the result files by `claim.py --check`.
    page = (ROOT / "docs" / "results.md").read_text(encoding="utf-8")
    measured = "\n".join(line for line in page.splitlines() if line.startswith("|"))
    table = README.partition("| environment | method |")[2].partition("\n\n")[0]
    rows = table.strip().splitlines()[2:]
    assert len(rows) == 5
    for value in re.findall(r"\d[\d,.]*%|\d+,\d+", table):
        assert value in measured, value


def test_pip_line_picture_and_loop_come_within_the_first_screen_and_a_half() -> None:
    """A line of text takes some 24 pixels, the picture 400: 60 lines without it are a screen and a half."""
    places = [README.index(text) for text in ("pip install", "real-steps.svg", "dg.evaluate(")]
    assert places == sorted(places)
    assert README[: places[-1]].count("\n") <= 45


def test_the_comparison_has_eight_rows() -> None:
    section = README.partition("## Compared with")[2].partition("\n## ")[0]
    assert len(re.findall(r"^\| (?!\|)(?!---)", section, re.M)) == 8


def test_the_recording_shows_the_same_replies_in_both_columns() -> None:
    root = ET.fromstring(recording.OUT.read_text(encoding="utf-8"))
    turns = [
        [(float(text.get("x", 0)), text.text or "") for text in turn]
        for turn in root.iter("{http://www.w3.org/2000/svg}g")
    ]
    assert len(turns) == 1 + len(recording.ACTIONS)
    for action, turn in zip(["", *recording.ACTIONS], turns, strict=True):
        left, right = ([said for x, said in turn if (x > 400) == side] for side in (False, True))
        assert left == right or action.startswith(":")


@pytest.mark.slow
def test_the_recording_is_what_the_commands_print() -> None:
    shown = re.sub(r"confidence: [\d.]+", "", recording.draw(recording.record()))
    assert shown == re.sub(r"confidence: [\d.]+", "", recording.OUT.read_text(encoding="utf-8"))
