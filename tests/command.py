"""Runs the real `dreamgym` command in a process of its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

DREAMGYM = [sys.executable, "-m", "dreamgym"]

# Tests run in the background may inherit an ignored Ctrl-C.
INTERRUPTIBLE = [
    sys.executable,
    "-c",
    "import os, signal as s, sys; s.signal(s.SIGINT, s.SIG_DFL); os.execv(sys.argv[1], sys.argv[1:])",
    *DREAMGYM,
]

IN_BACKGROUND = [part.replace("SIG_DFL", "SIG_IGN") for part in INTERRUPTIBLE]
"""As a shell without job control starts a command in the background: Ctrl-C is ignored."""


def dreamgym(
    *arguments: object, cwd: Path | None = None, seconds: float = 1200
) -> subprocess.CompletedProcess[str]:
    """The time limit only ends a command that hangs: on a busy machine one of seconds may take minutes."""
    return subprocess.run(
        [*DREAMGYM, *map(str, arguments)],
        capture_output=True,
        text=True,
        cwd=cwd,
        timeout=seconds,
        check=False,
    )
