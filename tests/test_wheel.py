"""The wheel: it contains the data files, installs into a fresh virtual environment, and runs there."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

from tests.conftest import ROOT

pytestmark = pytest.mark.slow
LOOP = """
import asyncio
import dreamgym as dg

assert "site-packages/dreamgym" in dg.__file__, dg.__file__

class Lamp:
    "Switch the lamp on."
    def start(self): return "The lamp is off."
    def step(self, action): return "The lamp is on.", 1.0, action == "switch on"

class Presser:
    name = "presser"
    async def act(self, task, history, state):
        from dreamgym.types import Decision
        return Decision(action="switch on")

async def main():
    lamp = dg.make(Lamp)
    tasks = dg.TaskPool(await lamp.tasks("train", 4))
    groups = await dg.rollout(lambda *_: Presser(), lamp, tasks.sample(2), group_size=2)
    print(tasks.record(groups), sum(1 for _ in dg.read_trajectories(dg.builtin_dataset())))

asyncio.run(main())
"""


def build(out: Path) -> Path:
    """With the backend that is installed: nothing is downloaded."""
    from hatchling.builders.wheel import WheelBuilder

    return Path(next(iter(WheelBuilder(str(ROOT)).build(directory=str(out)))))


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("dist"))


def test_it_contains_every_data_file_of_the_package(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    source = ROOT / "src"
    expected = {
        path.relative_to(source).as_posix()
        for path in (source / "dreamgym").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts and path.suffix != ".pyc"
    }
    assert expected <= names
    for ending in (".md", ".jsonl.xz", ".css", ".js", ".toml", "py.typed"):
        assert any(name.endswith(ending) for name in names), ending


def test_it_runs_in_a_fresh_virtual_environment(wheel: Path, tmp_path: Path) -> None:
    venv.create(tmp_path / "venv", with_pip=False)
    python = tmp_path / "venv" / "bin" / "python"
    site = Path(
        subprocess.run(
            [str(python), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"],
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()
    )
    installed = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--no-deps",
        "--no-index",
        "--target",
        str(site),
        str(wheel),
    ]
    subprocess.run([*installed, "--quiet"], check=True, capture_output=True)
    # Its dependencies are those of this environment; what it installed itself comes first.
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n", encoding="utf-8")

    def run(*words: str) -> str:
        command = [str(python), *words]
        done = subprocess.run(
            command, cwd=tmp_path, env={"PATH": "/usr/bin:/bin"}, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr[-3000:]
        return done.stdout

    assert "0.2.0" in run("-m", "dreamgym", "--version")
    assert "textworld" in run("-m", "dreamgym", "envs", "list")
    assert "1500" in run("-c", LOOP)
