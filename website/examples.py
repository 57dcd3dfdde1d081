"""Turns a script of `examples/` into cells: text and code that a notebook or a tutorial page shows."""

from __future__ import annotations

import ast
import re
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

ROOT = Path(__file__).resolve().parents[1]
EXAMPLES = sorted((ROOT / "examples").glob("[0-9]*.py"))


@dataclass(frozen=True, slots=True)
class Cell:
    """One cell of a notebook."""

    kind: Literal["markdown", "code"]
    text: str


def title(script: Path) -> str:
    """
    >>> title(Path("examples/01_play_a_dream.py"))
    'Play a dream'
    """
    return script.stem.partition("_")[2].replace("_", " ").capitalize()


def cells(script: Path) -> list[Cell]:
    """The docstring as text, then imports, settings, definitions and the body of `main` as code.

    A notebook has a running event loop: the body of `main` stands at the top level, with its `await`, and
    `asyncio.run(main())` is left out.
    """
    source = script.read_text(encoding="utf-8")
    parsed = ast.parse(source)
    opening = ast.get_docstring(parsed) or ""
    found = [Cell("markdown", f"# {title(script)}\n\n{opening}")]
    found += [Cell("code", text) for text in _code(parsed, source.splitlines())]
    return found


def _code(parsed: ast.Module, lines: list[str]) -> Iterator[str]:
    """Consecutive statements of one kind are one cell."""
    kinds: list[tuple[str, str]] = []
    end = parsed.body[0].end_lineno or 0
    for statement in parsed.body[1:]:
        text = "\n".join(lines[end : statement.end_lineno]).strip()
        end = statement.end_lineno or end
        if isinstance(statement, ast.AsyncFunctionDef) and statement.name == "main":
            body = lines[statement.body[0].lineno - 1 : statement.end_lineno]
            opening = _comments_before(lines, statement.body[0].lineno - 1)
            kinds.append(("main", textwrap.dedent("\n".join([*opening, *body]))))
        elif isinstance(statement, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            kinds.append((statement.name, text))
        elif "asyncio" not in text:
            kind = "import" if isinstance(statement, ast.Import | ast.ImportFrom) else "settings"
            kinds.append((kind, text))
    merged: dict[str, list[str]] = {}
    for kind, text in kinds:
        merged.setdefault(kind, []).append(text)
    for texts in merged.values():
        yield re.sub(r"^# --8<--.*\n?", "", "\n".join(texts), flags=re.M).strip()


def _comments_before(lines: list[str], place: int) -> list[str]:
    first = place
    while first and lines[first - 1].strip().startswith("#"):
        first -= 1
    return lines[first:place]
