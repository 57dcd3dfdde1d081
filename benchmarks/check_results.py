"""Compares the tables of `docs/results.md` with those made from the files in `results/`.

Called by ``python benchmarks/claim.py --check``. A table of the document is found by its first line.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import claim
import expert_iteration
import imitation

ROOT = Path(__file__).parent.parent
DOCUMENT = ROOT / "docs" / "results.md"


def tables(results: Path) -> dict[str, str]:
    """By name; those without a file in `results` are left out."""
    makers = {
        "claim": [claim.table],
        "imitation": [imitation.table],
        "expert_iteration": [expert_iteration.table, expert_iteration.family_table],
    }
    return {
        f"{folder}, table {number}": make(results / folder)
        for folder, several in makers.items()
        if any((results / folder).glob("*.json"))
        for number, make in enumerate(several, 1)
    }


def written(document: str, first: str) -> list[str]:
    """The lines of the table that begins with `first`; empty if there is none.

    >>> written("text\\n| a |\\n|---|\\n| 1 |\\n\\ntext", "| a |")
    ['| a |', '|---|', '| 1 |']
    """
    lines = document.splitlines()
    if first not in lines:
        return []
    rest = lines[lines.index(first) :]
    length = next((n for n, line in enumerate(rest) if not line.startswith("|")), len(rest))
    return rest[:length]


def disagreements(results: Path = ROOT / "results", document: Path = DOCUMENT) -> Iterator[str]:
    """What differs, one line each."""
    text = document.read_text(encoding="utf-8")
    for name, table in tables(results).items():
        expected = table.splitlines()
        found = written(text, expected[0])
        if not found:
            yield f"{name}: {document.name} has no table that begins with {expected[0]}"
        else:
            yield from (f"{name}: not in {document.name}: {line}" for line in expected if line not in found)
            yield from (f"{name}: not in the files: {line}" for line in found if line not in expected)
    cells = results / "claim"
    for file, made in (("table.md", f"{claim.table(cells)}\n"), ("success.svg", claim.plot(cells))):
        if (cells / file).read_text(encoding="utf-8") != made:
            yield f"claim: {file} is not that of the files; python benchmarks/claim.py --table writes it"
