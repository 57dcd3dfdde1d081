"""The guide to the experience model, done as it says: its blocks are run, and what it shows is looked for."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from dreamgym.cli import app
from dreamgym.data.trajectories import read_trajectories
from tests.conftest import ROOT

torch.set_num_threads(1)
GUIDE = ROOT / "docs" / "guides" / "experience-model.md"
MARK = "<!-- tests/training/test_guide.py runs {} here -->"


def executed_part() -> str:
    text = GUIDE.read_text(encoding="utf-8")
    for end in ("from", "to"):
        assert text.count(MARK.format(end)) == 1
    return text.split(MARK.format("from"))[1].split(MARK.format("to"))[0]


def sessions(block: str) -> list[tuple[str, list[str], list[str]]]:
    """(command, what is typed into it, what it is said to print) of a console block."""
    found: list[tuple[str, list[str], list[str]]] = []
    for line in block.replace("\\\n", " ").splitlines():
        if line.startswith("$ "):
            found.append((line[2:], [], []))
        elif line.startswith("> "):
            found[-1][1].append(line[2:])
        elif line.strip():
            found[-1][2].append(line)
    return found


def done_as_documented(command: str, typed: list[str], shown: list[str]) -> None:
    name, *words = shlex.split(command)
    assert name == "dreamgym", command
    ended = CliRunner().invoke(app, words, input="".join(f"{line}\n" for line in typed))
    assert ended.exit_code == 0, f"{command}\n{ended.output}"
    printed = " ".join(ended.output.split())
    for line in shown:
        assert line in printed, f"{command}\n{printed}"


@pytest.mark.slow
def test_the_guide_leads_from_a_file_of_chats_to_a_dream_to_play(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"^```(\w+)\n(.*?)^```", executed_part(), re.M | re.S)
    assert {kind for kind, _ in blocks} == {"python", "console"}
    commands: list[str] = []
    for kind, block in blocks:
        if kind == "python":
            exec(compile(block, str(GUIDE), "exec"), {})
            continue
        for command, typed, shown in sessions(block):
            done_as_documented(command, typed, shown)
            commands.append(" ".join(command.split()[:3]))
    assert commands == [
        "dreamgym ingest chats.jsonl",
        "dreamgym experience train",
        "dreamgym experience eval",
        "dreamgym play --dream",
        "dreamgym experience train",
        "dreamgym experience eval",
    ]
    for run in ("runs/shop", "runs/lora"):
        for name in ("run.json", "replay.sqlite", "curve.json", "model/config.json", "drift.svg"):
            assert (tmp_path / run / name).is_file(), f"{run}/{name}"
        measured = json.loads((tmp_path / run / "fidelity.json").read_text(encoding="utf-8"))
        assert measured["left_out"] == {
            "object_f1": "no world sheet names anything",
            "dream_to_real": "the real environment is not installed",
        }
        assert measured["dream_to_real"] is None
        table = (tmp_path / run / "fidelity.md").read_text(encoding="utf-8")
        assert "| dream → real (WM2Real) | left out: the real environment is not installed | 0 |" in table
        assert measured["asked"]["held_out"]
    assert measured["asked"]["tasks"] <= 6
    [played] = read_trajectories(tmp_path / "played")
    done = [step.action for step in played.transitions]
    assert done in (["search pan"], ["search pan", "buy blue pan"])  # so small a model may end too early
    assert (played.provenance.source, played.provenance.experience_model) == ("synthetic", "runs/shop")
