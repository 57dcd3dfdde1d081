"""Tests every adapter with the framework that it is for, each in a virtual environment of its own.

    make test-integrations                          # all; the first time it also installs them
    make test-distributed                           # ray
    python integrations/run.py openenv skyrl        # some
    python integrations/run.py trl --python PATH    # one, with a Python that has it installed

Versions and results are written to results/integrations.json.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import venv
import xml.etree.ElementTree as ET
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "results" / "integrations.json"
NOTES = {
    "mcp": "servers as environments: time and git of PyPI, files of npm; all stages with time",
    "ray": "two nodes of this machine: equality; workers, nodes, database and driver lost; "
    "dashboard, metrics",
    "openenv": "server, client, validator and checker over loopback",
    "skyrl": "skyrl-gym's registry and base class; SkyRL's trainer needs CUDA and is not started",
    "trl": "GRPOTrainer trains in the dream on a CPU, judged in the real environment",
    "verifiers": "vf-eval with a scripted and a tiny model; prime-rl needs CUDA and is not started",
    "verl": "verl's worker, dataset, advantages and loss; its servers and trainer need CUDA",
    "webarena": "tasks, splits and evaluators, on pages of our own in Chromium; the sites need Docker",
}
PACKAGES = {
    "mcp": ("mcp", "mcp-server-time", "mcp-server-git"),
    "openenv": ("openenv", "websockets"),
    "ray": ("ray", "torch", "psycopg"),
    "skyrl": ("skyrl-gym",),
    "trl": ("trl", "transformers", "torch"),
    "verifiers": ("verifiers", "torch"),
    "verl": ("verl", "transformers", "torch"),
    "webarena": ("webarena-verified", "playwright"),
}


def prepare(name: str) -> Path:
    """The Python of the virtual environment, made once for each list of requirements."""
    folder = ROOT / ".venvs" / name
    python = folder / "bin" / "python"
    wanted = (ROOT / "integrations" / name / "requirements.txt").read_text()
    stamp = folder / "installed.txt"
    if not stamp.exists() or stamp.read_text() != wanted:
        print(f"== installing {name} into {folder}", flush=True)
        venv.create(folder, with_pip=True)
        pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        subprocess.run(
            [*pip, "--editable", str(ROOT), "-r", str(ROOT / "integrations" / name / "requirements.txt")],
            check=True,
        )
        stamp.write_text(wanted)
    return python


def run(name: str, python: Path) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as temporary:
        report, details = Path(temporary) / "report.xml", Path(temporary) / "details.json"
        paths = f"{ROOT / 'src'}{os.pathsep}{ROOT}"
        environ = os.environ | {"PYTHONPATH": paths, "INTEGRATION_DETAILS": str(details)}
        command = [str(python), "-m", "pytest", "-q", "-c", os.devnull, "-p", "no:cacheprovider"]
        if name in ("mcp", "openenv", "ray", "webarena"):
            command += ["-o", "asyncio_mode=auto"]
        if name == "ray":
            command = [*only_loopback(), *command]
        folder = f"integrations/{name}"
        started = time.perf_counter()
        subprocess.run(
            [*command, "--rootdir", folder, f"--junitxml={report}", folder],
            cwd=ROOT,
            env=environ,
            check=False,
        )
        suite = ET.parse(report).getroot().find("testsuite")
        assert suite is not None
        counts = {key: int(suite.get(key, "0")) for key in ("tests", "failures", "errors", "skipped")}
        found: dict[str, Any] = {**counts, "seconds": round(time.perf_counter() - started, 1)}
        if details.exists():
            found["details"] = json.loads(details.read_text())
    return found | {"versions": versions(name, python), "covers": NOTES[name], "date": _today()}


def only_loopback() -> list[str]:
    """Begins a command that sees only loopback: Ray listens on the host's address. PostgreSQL refuses to run
    as root, so there is no user namespace for root, and a second one for others."""
    if os.geteuid() == 0:
        return ["unshare", "-n", "sh", "-c", 'ip link set lo up && exec "$@"', "sh"]
    user = "unshare -U --map-user=1000 --map-group=1000"
    return ["unshare", "-rn", "sh", "-c", f'ip link set lo up && exec {user} "$@"', "sh"]


def versions(name: str, python: Path) -> dict[str, str]:
    code = (
        "import platform, sys; from importlib.metadata import version\n"
        "print(platform.python_version(), *map(version, sys.argv[1:]))"
    )
    command = [str(python), "-c", code, *PACKAGES[name]]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return dict(zip(("python", *PACKAGES[name]), done.stdout.split(), strict=True))


def _today() -> str:
    return datetime.now(UTC).date().isoformat()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("names", nargs="*", help=f"some of {', '.join(NOTES)}; default: all but ray")
    parser.add_argument("--python", type=Path, help="use this Python instead of a virtual environment")
    options = parser.parse_args()
    failed = 0
    for name in options.names or [name for name in NOTES if name != "ray"]:
        found = run(name, options.python or prepare(name))
        failed += found["failures"] + found["errors"]
        known = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}  # another run may have written
        RESULTS.write_text(json.dumps(known | {name: found}, indent=2, sort_keys=True) + "\n")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
