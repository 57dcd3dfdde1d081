"""The documentation, held to account: links lead somewhere, commands parse, Python examples run."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import typer.main

from dreamgym.cli import app
from tests.conftest import ROOT

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
PAGES += sorted((ROOT / "src").rglob("*.md"))


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(encoding="utf-8"), re.M | re.S)


def commands() -> list[tuple[str, str]]:
    found: list[tuple[str, str]] = []
    for page in PAGES:
        text = "\n".join(blocks(page, "console")).replace("\\\n", " ")
        found += [(page.name, line) for line in re.findall(r"^\$ (dreamgym .+)$", text, re.M)]
    return found


def test_there_is_documentation_to_check() -> None:
    assert len(PAGES) > 10
    assert len(commands()) > 15


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_between_pages_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text(encoding="utf-8")):
        if "://" not in target:
            assert (page.parent / target).exists(), f"{page}: {target}"


@pytest.mark.parametrize(("page", "line"), commands())
def test_every_command_in_the_documentation_parses(
    page: str, line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = typer.main.get_command(app)
    words = shlex.split(line, comments=True)[1:]
    while getattr(command, "commands", None):
        name = words.pop(0)
        assert name in command.commands, f"{page}: {line}"  # type: ignore[attr-defined]
        command = command.commands[name]  # type: ignore[attr-defined]
    monkeypatch.chdir(tmp_path)
    for word in words:
        if word.endswith((".json", ".jsonl", ".jsonl.gz", ".parquet")):  # files that must be there to be read
            Path(word).parent.mkdir(exist_ok=True)
            Path(word).touch()
    with command.make_context(line, words):
        pass


@pytest.mark.slow
@pytest.mark.parametrize(
    "page",
    [page for page in PAGES if blocks(page, "python")],
    ids=lambda page: page.relative_to(ROOT).as_posix(),
)
def test_python_examples_run(page: Path, tmp_path: Path) -> None:
    for example in blocks(page, "python"):
        if "asyncio.run(" not in example:
            continue  # a fragment that shows a shape, not a program
        run = subprocess.run(
            [sys.executable, "-c", example],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert run.returncode == 0, f"{page}:\n{example}\n{run.stderr}"
        assert run.stdout.strip()
