"""Processes that a test may kill, forked from one that imported torch: that takes longer than all they do."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path

_FORKS = multiprocessing.get_context("forkserver")
_FORKS.set_forkserver_preload(
    ["dreamgym.training.trainer", "dreamgym.models.local.language_model", "dreamgym.rl.policy_gradient"]
    + [f"transformers.models.{name}.modeling_{name}" for name in ("lfm2", "llama")]
)


def started(errors: Path, does: Callable[..., None], *arguments: object) -> BaseProcess:
    """A process of its own that calls a function of a module; what it says to stderr goes to a file."""
    errors.touch()
    process = _FORKS.Process(target=_child, args=(errors, does, *arguments), daemon=True)
    process.start()
    return process


def _child(errors: Path, does: Callable[..., None], *arguments: object) -> None:
    with errors.open("wb") as file:
        os.dup2(file.fileno(), 2)
    does(*arguments)
