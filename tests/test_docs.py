"""The documentation is checked: links, commands, complete Python blocks, quotes, names of files.

A Python block is a program that runs by itself, or it is quoted from a file: a comment
``<!-- from PATH -->`` or ``<!-- from PATH:SECTION -->`` stands above it, and the block equals the file, or
the lines between ``# --8<-- [start:SECTION]`` and ``# --8<-- [end:SECTION]``. A block that continues
the reader's own code is fenced as ``python fragment``; `test_doc_sessions.py` runs it.
"""

from __future__ import annotations

import ast
import importlib.util
import re
import shlex
import textwrap
import tomllib
from pathlib import Path

import pytest
import typer.main

from dreamgym.cli import app
from dreamgym.config import Config, settings
from tests.command import python
from tests.conftest import ROOT

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
PAGES += sorted((ROOT / "src").rglob("*.md"))
SESSION_PYTHON = {"your-own-traces.md", "trajectories.md", "replay-buffer.md", "experience-model.md"}
"""Guides whose Python needs the files of their shell sessions: `test_doc_sessions.py` runs it."""
QUOTE = re.compile(r"^<!-- from (\S+?)(?::(\w+))? -->\n```python\n(.*?)^```", re.M | re.S)


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(encoding="utf-8"), re.M | re.S)


def quotes(page: Path) -> list[tuple[str, str, str]]:
    return QUOTE.findall(page.read_text(encoding="utf-8"))


def quoted(path: str, section: str) -> str:
    text = (ROOT / path).read_text(encoding="utf-8")
    if section:
        start, end = (f"# --8<-- [{which}:{section}]\n" for which in ("start", "end"))
        text = text[text.index(start) + len(start) : text.index(end)].rstrip(" ")
    return textwrap.dedent(text)


def commands() -> list[tuple[str, str]]:
    found: list[tuple[str, str]] = []
    for page in PAGES:
        text = "\n".join(blocks(page, "(?:console|text)")).replace("\\\n", " ")
        found += [(page.name, line) for line in re.findall(r"^\$ (dreamgym .+)$", text, re.M)]
    return found


def test_there_is_documentation_to_check() -> None:
    assert len(PAGES) > 10
    assert len(commands()) > 15
    assert any(map(quotes, PAGES))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_between_pages_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text(encoding="utf-8")):
        if "://" not in target:
            assert (page.parent / target).exists(), f"{page}: {target}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_quotes_equal_the_files_that_they_are_from(page: Path) -> None:
    for path, section, block in quotes(page):
        assert block == quoted(path, section), f"{page}: copy {path}:{section} again"


@pytest.mark.parametrize(
    "page",
    [page for page in PAGES if page.name != "log.md"],
    ids=lambda page: page.relative_to(ROOT).as_posix(),
)
def test_files_and_modules_that_are_named_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    for path in re.findall(
        r"`((?:src/dreamgym|tests|benchmarks|examples|results|docs)/[\w./-]+?\.\w+)`", text
    ):
        assert (ROOT / path).exists(), f"{page}: {path}"
    for block in [*blocks(page, "python"), *blocks(page, "python fragment")]:
        compile(block, str(page), "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT | ast.PyCF_ONLY_AST)
        for node in ast.walk(ast.parse(block)):
            if isinstance(node, ast.ImportFrom) and str(node.module).startswith("dreamgym"):
                assert importlib.util.find_spec(str(node.module)), f"{page}: {node.module}"
                module = importlib.import_module(str(node.module))
                assert all(hasattr(module, alias.name) for alias in node.names), f"{page}: {node.module}"


@pytest.mark.parametrize("name", ["architecture.md", "paper.md"])
def test_source_files_in_the_maps_exist(name: str) -> None:
    text = (ROOT / "docs" / name).read_text(encoding="utf-8")
    for path in re.findall(r"`((?:\w+/)*\w+\.py)`", text):
        assert (ROOT / "src" / "dreamgym" / path).exists() or (ROOT / path).exists(), path


def test_the_tree_names_every_module_and_package_and_no_other() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    tree = text.partition("src/dreamgym/\n")[2].partition("```")[0]
    package = ROOT / "src" / "dreamgym"
    held = {path.name for path in package.glob("*.py")} | {
        path.parent.name for path in package.glob("*/__init__.py")
    }
    named = set(re.findall(r"\b(\w+\.py)\b", tree)) | set(re.findall(r"(?:── |  )(\w+)/", tree))
    assert held - {"__main__.py"} <= named
    assert {name for name in named if name.endswith(".py")} <= held


def test_every_extra_is_explained() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    table = (
        (ROOT / "docs" / "start.md")
        .read_text(encoding="utf-8")
        .partition("| extra |")[2]
        .partition("\n## ")[0]
    )
    assert set(re.findall(r"^\| `(\w+)` \|", table, re.M)) == set(project["optional-dependencies"])
    (test,) = [each for each in project["optional-dependencies"]["test"] if each.startswith("dreamgym[")]
    row = re.findall(r"^\| `test` \| (.*) \|$", table, re.M)[0]
    left_out = set(project["optional-dependencies"]) - {"test", *re.findall(r"\w+", test)}
    assert set(re.findall(r"`(\w+)`", row)) == left_out
    for page in PAGES:
        for names in re.findall(r"(?:dreamgym|\.)\[([\w,]+)\]", page.read_text(encoding="utf-8")):
            assert set(names.split(",")) <= set(project["optional-dependencies"]), page


@pytest.mark.parametrize(
    "page",
    [page for page in PAGES if page.name != "log.md"],
    ids=lambda page: page.relative_to(ROOT).as_posix(),
)
def test_settings_that_are_named_exist(page: Path) -> None:
    known = {name for name, *_ in settings(Config)}
    sections = "|".join(sorted({name.partition(".")[0] for name in known if "." in name}))
    text = page.read_text(encoding="utf-8")
    for name in re.findall(rf"(?:`|--set )((?:{sections})(?:\.\w+)+)(?:=[^`\n]*)?(?:`|\s)", text):
        file = name in ("replay.sqlite", "replay.json", "agent.updating")
        assert file or name.startswith("environment.options.") or name in known, f"{page}: {name}"


@pytest.mark.parametrize("heading", ["One transition", "One synthetic turn"])
def test_a_way_through_the_code_has_at_most_25_hops(heading: str) -> None:
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    section = text.partition(f"## {heading}")[2].partition("\n## ")[0]
    assert 10 <= len(re.findall(r"^\| \d+ \|", section, re.M)) <= 25


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
    [page for page in PAGES if blocks(page, "python") and page.name not in SESSION_PYTHON],
    ids=lambda page: page.relative_to(ROOT).as_posix(),
)
def test_python_blocks_run(page: Path, tmp_path: Path) -> None:
    known = [block for *_, block in quotes(page)]
    for example in blocks(page, "python"):
        if example in known:
            continue  # a quote: the examples' own tests run it
        run = python(example, cwd=tmp_path)
        assert run.returncode == 0, f"{page}:\n{example}\n{run.stderr}"


USES = [ROOT / "README.md", *sorted((ROOT / "docs/guides").glob("*.md"))]
USES += [*sorted((ROOT / "examples").rglob("*.py")), *sorted((ROOT / "benchmarks").rglob("*.py"))]
USES += sorted((ROOT / "src").rglob("*.toml"))


@pytest.mark.parametrize("name", [name for name, *_ in settings(Config)])
def test_a_guide_an_example_a_benchmark_or_a_preset_names_every_setting(name: str) -> None:
    key = name.rpartition(".")[2]
    form = re.compile(rf"\b{re.escape(name)}\b|`{key}`|\b{key}\s*=")
    assert any(form.search(page.read_text(encoding="utf-8")) for page in USES), (
        f"{name}: say in a guide when to set it, or remove it"
    )
