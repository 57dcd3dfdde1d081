"""Which processes run now: they may end while they are looked at."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress

import psutil

PRELOADED = ["tests.preloaded"]
"""Of the process that others are forked from."""


def with_word(processes: Iterable[psutil.Process], word: str) -> list[psutil.Process]:
    """Those that run and have this word on their command line."""
    found = []
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            if process.status() != psutil.STATUS_ZOMBIE and word in process.cmdline():
                found.append(process)
    return found
