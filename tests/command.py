"""Runs the real `dreamgym` command in a process of its own."""

from __future__ import annotations

import atexit
import multiprocessing
import os
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Sequence
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

# Importing torch and transformers takes longer than most commands of the tests: one process imports them,
# and each command is a fork of it.
_PROCESSES = multiprocessing.get_context("forkserver")
_PROCESSES.set_forkserver_preload(
    ["dreamgym.cli", "dreamgym.training.trainer", "transformers.models.llama.modeling_llama"]
)


def dreamgym(
    *arguments: object, cwd: Path | None = None, seconds: float = 1200
) -> subprocess.CompletedProcess[str]:
    """The time limit only ends a command that hangs: on a busy machine one of seconds may take minutes."""
    words = list(map(str, arguments))
    with tempfile.NamedTemporaryFile("r") as out, tempfile.NamedTemporaryFile("r") as err:
        given = (words, str(cwd or Path.cwd()), dict(os.environ), out.name, err.name)
        process = _PROCESSES.Process(target=_command, args=given)
        process.start()
        process.join(seconds)
        if process.exitcode is None:
            process.kill()
            process.join()
            raise subprocess.TimeoutExpired(words, seconds)
        return subprocess.CompletedProcess(words, process.exitcode, out.read(), err.read())


def _command(words: Sequence[str], folder: str, environment: dict[str, str], out: str, err: str) -> None:
    from dreamgym.cli import main

    for number, path in ((0, os.devnull), (1, out), (2, err)):
        os.dup2(os.open(path, os.O_RDWR), number)
    sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = ["dreamgym", *words]
    try:
        main()
    except Exception:
        traceback.print_exc()
        sys.exit(1)
    finally:
        atexit._run_exitfuncs()
