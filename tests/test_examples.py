"""The examples run as they are, with short settings: a tiny experience model of real cooking games."""

from __future__ import annotations

import ast
import asyncio
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import nbclient
import nbformat
import pytest
from website.notebooks import FOLDER, NOTEBOOKS, notebook

import dreamgym as dg
from tests.conftest import ROOT
from tests.models import small_models

EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
COOKING = {"family": "cooking", "ingredients": 1, "rooms": 1, "foods": "train", "games": 20}

SHORT: dict[str, Any] = {"TASKS": 2, "HORIZON": 3, "EPISODES": 1}

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `make quickstart` leaves, in seconds: an experience model and a policy, barely trained."""
    folder = tmp_path_factory.mktemp("runs")
    asyncio.run(_fill(folder))
    return folder


async def _fill(folder: Path) -> None:
    await dg.collect("textworld", folder / "data", episodes=8, policy="expert", options=COOKING)
    await dg.fine_tune(
        folder / "data", folder / "experience", options=COOKING, model="nano", steps=3, batch=4
    )
    await dg.train(
        experience=str(folder / "experience"),
        out=folder / "agent",
        warm_start_steps=2,
        steps=1,
        tasks_per_step=2,
        group_size=2,
        horizon=3,
        gate="off",
        agent={"model": "nano", "max_tokens": 8},
    )


def run(name: str, folder: Path, **settings: object) -> str:
    [script] = [path for path in EXAMPLES if path.name.startswith(name)]
    environment = {**os.environ, **{key: str(value) for key, value in settings.items()}}
    done = subprocess.run(
        [sys.executable, str(script)],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=1200,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


def contents(folder: Path) -> dict[Path, bytes]:
    """All files, without the lock table that SQLite keeps for readers."""
    files = (path for path in folder.rglob("*") if path.is_file() and path.suffix != ".sqlite-shm")
    return {path: path.read_bytes() for path in files}


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_an_example_states_its_minutes_and_imports_dreamgym_once(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    opening = ast.get_docstring(ast.parse(text)) or ""
    assert re.search(r"Minutes: \d+", opening)
    assert "GPU: no" in opening
    imported = re.findall(r"^ *(?:from|import) dreamgym.*$", text, re.M)
    adapters = [each for each in imported if each.startswith("from dreamgym.integrations.")]
    assert [each for each in imported if each not in adapters] == ["import dreamgym as dg"]
    assert len(adapters) <= 1


def test_own_environment_takes_at_most_60_lines() -> None:
    [path] = [path for path in EXAMPLES if path.name.startswith("03")]
    assert len(path.read_text(encoding="utf-8").splitlines()) <= 60


def test_01_a_dream_is_played(runs: Path, tmp_path: Path) -> None:
    shown = run("01", tmp_path, RUN=runs / "experience", ACTIONS="look,open fridge")
    assert "> look" in shown
    assert "because:" in shown


def test_02_the_loop_trains_and_leaves_the_experience_model_as_it_was(runs: Path, tmp_path: Path) -> None:
    before = contents(runs / "experience")
    shown = run("02", tmp_path, RUN=runs / "experience", STEPS=1, WARM_START=2, MODEL="nano", **SHORT)
    assert "success" in shown
    assert (tmp_path / "runs" / "my-agent" / "config.json").exists()
    assert contents(runs / "experience") == before


def test_03_an_own_environment_goes_end_to_end(tmp_path: Path) -> None:
    shown = run("03", tmp_path, OUT="drinks", MODEL="nano", SCALE=0.02)
    assert "drinks/agent@0" in shown
    assert "drinks/report.html" in shown


def test_04_own_traces_go_end_to_end(tmp_path: Path) -> None:
    shown = run("04", tmp_path, OUT="shop", MODEL="nano", SCALE=0.01)
    assert "36 new trajectories" in shown
    assert (tmp_path / "shop" / "agent" / "config.json").exists()


def test_05_a_policy_goes_on_in_the_real_environment(runs: Path, tmp_path: Path) -> None:
    shown = run("05", tmp_path, AGENT=runs / "agent", OUT="real", REAL_STEPS=20, EPISODES=2)
    assert "real steps" in shown


def test_06_a_pretrained_model_learns_with_lora(runs: Path, tmp_path: Path) -> None:
    small_models.model().save_pretrained(tmp_path / "base")
    small_models.tokenizer().save_pretrained(tmp_path / "base")
    run("06", tmp_path, RUN=runs / "experience", MODEL=f"hf:{tmp_path / 'base'}", STEPS=1, **SHORT)
    assert (tmp_path / "runs" / "lora-agent" / "config.json").exists()


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_a_notebook_is_what_its_example_makes(name: str) -> None:
    stored = (FOLDER / f"{name}.ipynb").read_text(encoding="utf-8")
    made = nbformat.writes(notebook(NOTEBOOKS[name]), version=4)
    assert stored.rstrip() == made.rstrip(), "run python -m website.notebooks"


def test_every_notebook_runs_from_its_first_cell_to_its_last(runs: Path, tmp_path: Path) -> None:
    """One kernel for all of them, which loads torch once; each with the settings of its example above."""
    settings: dict[str, dict[str, object]] = {
        "01": {"RUN": runs / "experience", "ACTIONS": "look,open fridge"},
        "02": {"STEPS": 1, "WARM_START": 2, "MODEL": "nano", **SHORT},
        "03": {"OUT": tmp_path / "drinks", "SCALE": 0.02},
        "04": {"OUT": tmp_path / "shop", "SCALE": 0.01},
        "05": {"STEPS": 1, "MODEL": tmp_path / "base", **SHORT},
    }
    small_models.model().save_pretrained(tmp_path / "base")
    small_models.tokenizer().save_pretrained(tmp_path / "base")
    together = nbformat.v4.new_notebook()
    for name, script in NOTEBOOKS.items():
        changed = {key: str(value) for key, value in settings[name[:2]].items()}
        together.cells.append(nbformat.v4.new_code_cell(f"import os; os.environ.update({changed!r})"))
        together.cells += notebook(script).cells
    for place, cell in enumerate(together.cells):
        cell["id"] = f"cell-{place}"
    client = nbclient.NotebookClient(together, timeout=1200, resources={"metadata": {"path": str(tmp_path)}})
    client.execute()
    printed = "".join(
        str(output.get("text", "")) for cell in together.cells for output in cell.get("outputs", ())
    )
    for text in ("because:", "success", "drinks/report.html", "36 new trajectories", "real success: "):
        assert text in printed
