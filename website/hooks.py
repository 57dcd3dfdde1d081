"""Hooks of MkDocs: tutorials from the examples, generated references, and links that leave `docs/`."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "src")]

from website.examples import EXAMPLES, cells, title  # noqa: E402

_LINK = re.compile(r"\]\(([^)#\s]+)(#[^)]*)?\)")
_SECTIONS = {"guides": "Guides", "reference": "Reference", "decisions": "Decisions", "": "Concepts"}
"""Directory of a page, and the section that lists it."""


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Pages that the navigation does not name are appended to the section of their directory."""
    nav: list[dict[str, Any]] = list(config.nav or ())
    sections = {name: pages for section in nav for name, pages in section.items()}
    sections["Tutorials"] += [_tutorial(script) for script in EXAMPLES]
    named = {page for pages in sections.values() for page in pages}
    for file in sorted(Path(config.docs_dir).rglob("*.md")):
        name = file.relative_to(config.docs_dir).as_posix()
        if name not in named:
            sections[_SECTIONS[str(PurePosixPath(name).parent).replace(".", "")]].append(name)
    config.nav = nav
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    for name, content in _generated():
        files.append(File.generated(config, name, content=content))
    outside = {
        target
        for page in files.documentation_pages()
        for target in _outside(page.src_uri, page.content_string)
    }
    while outside:
        path = outside.pop()
        place = _place(path)
        if files.get_file_from_path(place) is not None:
            continue
        if place.endswith(".md"):
            content = _shown(path)
            shown = File.generated(config, place, content=content, inclusion=InclusionLevel.NOT_IN_NAV)
            files.append(shown)
            outside |= set(_outside(place, content))
        else:
            files.append(File.generated(config, place, abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Links to files of the repository lead to the pages made of them."""
    here = page.file.src_uri

    def moved(found: re.Match[str]) -> str:
        path = _resolve(here, found[1])
        if path is None:
            return found[0]
        return f"]({os.path.relpath(_place(path), PurePosixPath(here).parent)}{found[2] or ''})"

    return re.sub(r"^```python fragment$", "```python", _LINK.sub(moved, markdown), flags=re.M)


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    return html.replace("Example::</p>", "Example:</p>")  # reStructuredText in docstrings


def _generated() -> Iterator[tuple[str, str]]:
    listed = [f"- [{title(script)}]({script.stem}.md): {_opening(script)}" for script in EXAMPLES]
    text = "# Tutorials\n\nScripts of `examples/` that the tests run; some are in `notebooks/`, too.\n\n"
    yield "tutorials/README.md", text + "\n".join(listed)
    for script in EXAMPLES:
        yield _tutorial(script), _tutorial_text(script)
    yield "reference/commands.md", _commands()
    yield "reference/settings.md", _settings()


def _tutorial(script: Path) -> str:
    return f"tutorials/{script.stem}.md"


def _opening(script: Path) -> str:
    return cells(script)[0].text.split("\n\n")[1].replace("\n", " ")


def _tutorial_text(script: Path) -> str:
    opening, *code = cells(script)
    blocks = [f"```python\n{cell.text}\n```" for cell in code]
    run = f"Run it: `python examples/{script.name}`. In a notebook the code below runs as it stands."
    return "\n\n".join([opening.text, run, *blocks])


def _commands() -> str:
    """The help of every command."""
    import typer.main
    from click import Context

    from dreamgym.cli import app

    def walk(name: str, command: Any) -> Iterator[str]:
        inner = getattr(command, "commands", {})
        with Context(command, info_name=name, terminal_width=100, max_content_width=100) as context:
            if not inner:
                yield f"## {name}\n\n```text\n{_plain_help(command, context)}\n```\n"
        for key in inner:
            yield from walk(f"{name} {key}", inner[key])

    body = "\n".join(walk("dreamgym", typer.main.get_command(app)))
    return f"# Commands\n\nWhat `--help` prints.\n\n{body}"


def _plain_help(command: Any, context: Any) -> str:
    lines = [f"usage: {context.command_path} {' '.join(command.collect_usage_pieces(context))}", ""]
    lines += [(command.help or "").replace("\b", "").strip(), ""]
    for parameter in command.get_params(context):
        record = parameter.get_help_record(context)
        if record is not None:
            lines += [f"  {record[0]}", f"      {record[1]}"]
    return "\n".join(lines)


def _settings() -> str:
    """Every setting with its default."""
    from dreamgym.config import Config, settings

    rows: dict[str, list[str]] = {}
    for name, kind, default, description in settings(Config):
        section, _, key = name.rpartition(".")
        cell = " ".join(str(part).replace("|", "\\|") for part in (description,))
        rows.setdefault(section or "top level", []).append(f"| `{key}` | {kind} | `{default!r}` | {cell} |")
    head = "| setting | type | default | meaning |\n|---|---|---|---|\n"
    parts = [f"## `{section}`\n\n{head}" + "\n".join(lines) for section, lines in rows.items()]
    return "# Settings\n\nOf a TOML file and of `--set section.key=value`.\n\n" + "\n\n".join(parts)


def _outside(here: str, text: str) -> Iterator[Path]:
    for target, _ in _LINK.findall(text):
        if (path := _resolve(here, target)) is not None:
            yield path


def _resolve(here: str, target: str) -> Path | None:
    """The file of the repository that a link leads to, if it is outside `docs/`."""
    if ":" in target:
        return None
    base = (
        PurePosixPath(here.removeprefix("files/"))
        if here.startswith("files/")
        else PurePosixPath("docs", here)
    )
    path = (ROOT / base.parent / target).resolve()
    if path.is_relative_to(ROOT / "docs") and not here.startswith("files/"):
        return None
    return path if path.exists() else None


def _place(path: Path) -> str:
    """Where the site shows a file of the repository."""
    name = path.relative_to(ROOT)
    if path in EXAMPLES:
        return _tutorial(path)
    if path == ROOT / "examples":
        return "tutorials/README.md"
    if path.is_relative_to(ROOT / "docs"):
        return path.relative_to(ROOT / "docs").as_posix()
    if path.suffix in (".svg", ".png", ".html"):
        return f"files/{name.as_posix()}"
    return f"files/{name.as_posix().removesuffix('.md')}.md"


def _shown(path: Path) -> str:
    """A text file of the repository as a page."""
    if path.suffix == ".md":
        return path.read_text(encoding="utf-8")
    files = sorted(path.iterdir()) if path.is_dir() else [path]
    name = path.relative_to(ROOT).as_posix()
    blocks = []
    for file in files:
        if file.is_file():
            language = {".py": "python", ".toml": "toml", ".json": "json"}.get(file.suffix, "text")
            blocks.append(f"`{file.name}`\n\n````{language}\n{file.read_text(encoding='utf-8')}\n````")
    return f"# {name}\n\n" + "\n\n".join(blocks)
