"""The guide's Python runs as printed, and its shell commands exist."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

from typer.testing import CliRunner

from dreamgym.cli.buffer import app

GUIDE = (Path(__file__).parents[2] / "docs" / "guides" / "replay-buffer.md").read_text(encoding="utf-8")


def test_the_python_of_the_guide_runs(tmp_path: Path) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", GUIDE, re.DOTALL)
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) == 4


def test_every_option_the_guide_names_exists() -> None:
    commands = re.findall(r"^\$ dreamgym buffer (\w+) (.*?)(?:\s+#.*)?$", GUIDE, re.MULTILINE)
    assert {name for name, _ in commands} == {"build", "stats", "search", "compact"}
    for name, rest in commands:
        shown = CliRunner().invoke(app, [name, "--help"], env={"COLUMNS": "200"}).stdout
        for word in shlex.split(rest):
            assert not word.startswith("--") or word in shown
