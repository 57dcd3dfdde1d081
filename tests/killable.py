"""Processes that a test may kill, forked from one that imported torch: that takes longer than all they do."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path

from tests.command import PROCESSES


def started(errors: Path, does: Callable[..., None], *arguments: object) -> BaseProcess:
    """A process of its own that calls a function of a module; what it says to stderr goes to a file."""
    errors.touch()
    process = PROCESSES.Process(target=_child, args=(errors, does, *arguments), daemon=True)
    process.start()
    return process


def _child(errors: Path, does: Callable[..., None], *arguments: object) -> None:
    gc.freeze()
    with errors.open("wb") as file:
        os.dup2(file.fileno(), 2)
    does(*arguments)
