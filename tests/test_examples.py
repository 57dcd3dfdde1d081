"""The examples run as they are, with short settings: a tiny experience model of real cooking games."""

from __future__ import annotations

import ast
import asyncio
import re
from pathlib import Path
from typing import Any

import nbclient
import nbformat
import pytest
from website.notebooks import FOLDER, NOTEBOOKS, notebook

import dreamgym as dg
from tests.command import python
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


@pytest.fixture(scope="module")
def before(runs: Path) -> dict[Path, bytes]:
    return contents(runs / "experience")


async def _fill(folder: Path) -> None:
    await dg.collect("textworld", folder / "data", episodes=8, policy="expert", options=COOKING)
    # A model of three updates does not end its replies.
    short: dict[str, Any] = {"model": "nano", "steps": 3, "batch": 4, "max_tokens": 40, "attempts": 1}
    await dg.fine_tune(folder / "data", folder / "experience", options=COOKING, **short)
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
    variables = {key: str(value) for key, value in settings.items()}
    done = python(script, cwd=folder, variables=variables)
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


@pytest.fixture(scope="module")
def executed(
    runs: Path, before: dict[Path, bytes], tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, dict[str, str]]:
    """The folder, and what the cells of each notebook printed. One kernel for all, which loads torch once.

    A notebook has the code of its script: these scripts are not run a second time.
    """
    folder = tmp_path_factory.mktemp("notebooks")
    settings: dict[str, dict[str, object]] = {
        "01": {"RUN": runs / "experience", "ACTIONS": "look,open fridge"},
        "02": {"STEPS": 1, "WARM_START": 2, "MODEL": "nano", **SHORT},
        "03": {"OUT": folder / "drinks", "SCALE": 0.01, "MODEL": "nano"},
        "04": {"OUT": folder / "shop", "SCALE": 0.01, "MODEL": "nano"},
        "05": {"STEPS": 1, "MODEL": folder / "base", **SHORT},
    }
    small_models.model().save_pretrained(folder / "base")
    small_models.tokenizer().save_pretrained(folder / "base")
    together, made_from = nbformat.v4.new_notebook(), []
    for name, script in NOTEBOOKS.items():
        changed = {key: str(value) for key, value in settings[name[:2]].items()}
        cells = [nbformat.v4.new_code_cell(f"import os; os.environ.update({changed!r})")]
        cells += notebook(script).cells
        together.cells += cells
        made_from += [name[:2]] * len(cells)
    for place, cell in enumerate(together.cells):
        cell["id"] = f"cell-{place}"
    nbclient.NotebookClient(together, timeout=1200, resources={"metadata": {"path": str(folder)}}).execute()
    printed = dict.fromkeys(settings, "")
    for number, cell in zip(made_from, together.cells, strict=True):
        printed[number] += "".join(each.get("text", "") for each in cell.get("outputs", []))
    return folder, printed


def test_every_notebook_runs_from_its_first_cell_to_its_last(executed: tuple[Path, dict[str, str]]) -> None:
    folder, printed = executed
    assert "> look" in printed["01"]
    assert "because:" in printed["01"]
    assert "success" in printed["02"]
    assert (folder / "runs" / "my-agent" / "config.json").exists()
    assert "drinks/agent@0" in printed["03"]
    assert "drinks/report.html" in printed["03"]
    assert "36 new trajectories" in printed["04"]
    assert (folder / "shop" / "agent" / "config.json").exists()


def test_the_loop_leaves_the_experience_model_as_it_was(
    runs: Path, before: dict[Path, bytes], executed: tuple[Path, dict[str, str]]
) -> None:
    assert contents(runs / "experience") == before
