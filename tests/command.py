"""Runs the real `dreamgym` command in a process of its own."""

from __future__ import annotations

import atexit
import gc
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Self

from tests.processes import PRELOADED

DREAMGYM = [sys.executable, "-m", "dreamgym"]

# Tests run in the background may inherit an ignored Ctrl-C.
INTERRUPTIBLE = [
    sys.executable,
    "-c",
    "import os, signal as s, sys; s.signal(s.SIGINT, s.SIG_DFL); os.execv(sys.argv[1], sys.argv[1:])",
    *DREAMGYM,
]

# Importing torch and transformers takes longer than most commands of the tests: one process imports them,
# and each command is a fork of it.
PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload(PRELOADED)


def dreamgym(
    *arguments: object, cwd: Path | None = None, typed: str = "", seconds: float = 1200
) -> subprocess.CompletedProcess[str]:
    """`typed` is its standard input. The time limit only ends a command that hangs: on a busy machine one of
    seconds may take minutes."""
    return _forked(_command, ["dreamgym", *map(str, arguments)], cwd, {}, typed, seconds)


def run_command(words: list[str]) -> None:
    """The whole life of a process that a test may signal: `tests.killable.started`."""
    sys.argv = ["dreamgym", *words]
    _command(words)


def python(
    script: Path | str, *, cwd: Path, variables: Mapping[str, str] | None = None, seconds: float = 1200
) -> subprocess.CompletedProcess[str]:
    """Run a script, given as its file or as its text, as `python` would; `variables` of its environment."""
    target = _file if isinstance(script, Path) else _text
    return _forked(target, [str(script)], cwd, variables or {}, "", seconds)


def _forked(
    target: Callable[[list[str]], None],
    words: list[str],
    cwd: Path | None,
    variables: Mapping[str, str],
    typed: str,
    seconds: float,
) -> subprocess.CompletedProcess[str]:
    with Running(words, target=target, cwd=cwd, variables=variables, typed=typed) as running:
        running.wait(seconds)
        return running.completed()


class Running:
    """A process that the test goes on beside, and may stop. Forked: it begins at once. Killed in the end."""

    def __init__(
        self,
        words: Sequence[object],
        *,
        target: Callable[[list[str]], None] | None = None,
        cwd: Path | None = None,
        variables: Mapping[str, str] | None = None,
        typed: str = "",
        in_background: bool = False,
    ) -> None:
        """`words` of a command, "dreamgym" being the first. With `in_background`, Ctrl-C is ignored, as in
        what a shell without job control starts so."""
        self.words = list(map(str, words))
        self._folder = tempfile.TemporaryDirectory()
        files = [Path(self._folder.name, name) for name in ("in", "out", "err")]
        for file in files:
            file.write_text(typed if file.name == "in" else "", encoding="utf-8")
        _, self.out, self.err = files
        environment = {**os.environ, **(variables or {})}
        folder = str(cwd or Path.cwd())
        given = (target or _command, self.words, folder, environment, files, in_background)
        self.process = PROCESSES.Process(target=_run, args=given)
        self.process.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.exitcode is None:
            self.process.kill()
            self.process.join()
        self._folder.cleanup()

    def line(self, number: int, file: Path, *, seconds: float = 600) -> str:
        """A line that it has written or will write, counted from 0."""
        limit = time.monotonic() + seconds
        while True:
            ended = self.process.exitcode is not None
            if len(lines := file.read_text(encoding="utf-8").splitlines(keepends=True)) > number + (
                not lines or not lines[-1].endswith("\n")
            ):
                return lines[number]
            assert not ended, self.err.read_text(encoding="utf-8")
            assert time.monotonic() < limit
            time.sleep(0.02)

    def send_signal(self, number: int) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, number)

    def wait(self, seconds: float = 1200) -> int:
        """Its exit code."""
        self.process.join(seconds)
        if self.process.exitcode is None:
            raise subprocess.TimeoutExpired(self.words, seconds)
        return self.process.exitcode

    def completed(self) -> subprocess.CompletedProcess[str]:
        out, err = (file.read_text(encoding="utf-8") for file in (self.out, self.err))
        return subprocess.CompletedProcess(self.words, self.wait(), out, err)


def _run(
    target: Callable[[list[str]], None],
    words: list[str],
    folder: str,
    environment: dict[str, str],
    files: Sequence[Path],
    in_background: bool,
) -> None:
    gc.freeze()
    # What started the tests may ignore Ctrl-C.
    signal.signal(signal.SIGINT, signal.SIG_IGN if in_background else signal.default_int_handler)
    for number, file in enumerate(files):
        os.dup2(os.open(file, os.O_RDWR), number)
    sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = words
    try:
        target(words)
    except Exception:
        traceback.print_exc()
        sys.exit(1)
    finally:
        atexit._run_exitfuncs()


def _command(words: list[str]) -> None:
    from dreamgym.cli import main

    main()


def _file(words: list[str]) -> None:
    runpy.run_path(words[0], run_name="__main__")


def _text(words: list[str]) -> None:
    exec(compile(words[0], "<text>", "exec"), {"__name__": "__main__"})
