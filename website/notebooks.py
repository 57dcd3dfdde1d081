"""Writes `notebooks/` from the examples: `python -m website.notebooks`; a test compares the two."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jupytext
import nbformat

from website.examples import ROOT, cells

FOLDER = ROOT / "notebooks"
NOTEBOOKS = {
    "01_play_a_dream": "examples/01_play_a_dream.py",
    "02_train_and_judge": "examples/02_train_in_a_dream.py",
    "03_your_own_environment": "examples/03_own_environment.py",
    "04_your_own_traces": "examples/04_own_traces.py",
    "05_serve_it_to_trl": "examples/07_serve_to_trl.py",
}
"""Name of a notebook, and the script that it is made from."""


def notebook(script: str) -> Any:
    """The cells of a script as a notebook, the same every time."""
    opening, *code = cells(ROOT / script)
    shown = "\n".join(f"# {line}".rstrip() for line in opening.text.splitlines())
    where = f'Made from `{script}`. Install first, in a checkout: `pip install ".[models,alfworld]"`.'
    text = f"# %% [markdown]\n{shown}\n#\n# {where}"
    text += "".join(f"\n\n# %%\n{cell.text}" for cell in code)
    made = jupytext.reads(text, "py:percent")
    for place, cell in enumerate(made.cells):
        cell["id"] = f"cell-{place}"
    made.metadata = {"kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"}}
    return made


def write(folder: Path = FOLDER) -> None:
    folder.mkdir(exist_ok=True)
    for name, script in NOTEBOOKS.items():
        text = nbformat.writes(notebook(script), version=4)
        (folder / f"{name}.ipynb").write_text(text.rstrip() + "\n", encoding="utf-8")


if __name__ == "__main__":
    write()
