"""The documentation builds as a site without a warning, holds every page, and is legible on a phone."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from website.examples import EXAMPLES, cells

import dreamgym
from tests.conftest import ROOT
from tests.report.browser import find_browser, open_page

SECTIONS = ["Start", "Tutorials", "Guides", "Concepts", "Reference", "Results", "Decisions"]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    built = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        timeout=1200,
        check=False,
    )
    assert built.returncode == 0, built.stdout + built.stderr
    return folder


def test_every_page_of_the_documentation_is_in_the_navigation(site: Path) -> None:
    home = (site / "index.html").read_text(encoding="utf-8")
    for section in SECTIONS:
        assert re.search(rf"\b{section}\b", home), section
    for page in (ROOT / "docs").rglob("*.md"):
        name = page.relative_to(ROOT / "docs").with_suffix("").as_posix().removesuffix("README")
        assert f'href="{name.strip("/")}/"' in home.replace('href="."', 'href="/"') or name == "", name


def test_the_reference_has_every_public_name(site: Path) -> None:
    text = "".join(path.read_text(encoding="utf-8") for path in (site / "reference").rglob("index.html"))
    for name in dreamgym.__all__:
        assert f'id="dreamgym.{dreamgym._HOME[name]}.{name}"' in text, name


def test_every_command_and_setting_is_in_the_reference(site: Path) -> None:
    commands = (site / "reference" / "commands" / "index.html").read_text(encoding="utf-8")
    assert "dreamgym experience audit" in commands
    assert "warm_start_success" in (site / "reference" / "settings" / "index.html").read_text(
        encoding="utf-8"
    )


@pytest.mark.parametrize("script", EXAMPLES, ids=lambda path: path.name)
def test_an_example_becomes_a_page_with_all_of_its_code(site: Path, script: Path) -> None:
    assert (site / "tutorials" / script.stem / "index.html").is_file()
    code = "\n".join(cell.text for cell in cells(script) if cell.kind == "code")
    lines = [line.strip() for line in script.read_text(encoding="utf-8").splitlines()]
    lines = lines[lines.index("import dreamgym as dg") :]
    kept = [line for line in lines if line and "--8<--" not in line and "main()" not in line]
    assert all(line in code for line in kept)
    compile(code, script.name, "exec", flags=0x2000)  # ast.PyCF_ALLOW_TOP_LEVEL_AWAIT


@pytest.mark.skipif(find_browser() is None, reason="needs Chromium, Chrome or Edge")
def test_the_site_asks_nobody_for_anything_and_fits_a_phone(site: Path) -> None:
    with open_page(str(find_browser())) as page:
        page.resize(400, 800)
        page.open((site / "start" / "index.html").as_uri())
        assert page.evaluate("document.documentElement.scrollWidth") <= 400
        assert all(url.startswith(("file:", "data:", "blob:")) for url in page.requests)
