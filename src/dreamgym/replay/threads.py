"""One thread for the matrix products of searches.

NumPy's BLAS shares even a small product with threads of its own, which then wait for the next one at full
speed: beside models that compute, that took up to 1.5 s of CPU of a training step of 5 s (decision 0002).
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import numpy  # noqa: F401  (its BLAS is there once it is)
from threadpoolctl import ThreadpoolController

_found: Final = ThreadpoolController()
# NumPy's own only: PyTorch may have a BLAS by the same name, and shall keep its threads.
_BLAS: Final = _found.select(
    filepath=[
        each["filepath"]
        for each in _found.info()
        if each["user_api"] == "blas" and Path(each["filepath"]).parent.name.startswith("numpy")
    ]
)


class _OneThread:
    """Counts who is inside, since the limit holds for the whole process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._inside = 0
        self._before: list[int] = []

    @contextmanager
    def __call__(self) -> Iterator[None]:
        with self._lock:
            self._inside += 1
            if self._inside == 1:
                self._before = [each.num_threads for each in _BLAS.lib_controllers]
                _set_threads([1] * len(self._before))
        try:
            yield
        finally:
            with self._lock:
                self._inside -= 1
                if self._inside == 0:
                    _set_threads(self._before)


def _set_threads(counts: Sequence[int]) -> None:
    for each, count in zip(_BLAS.lib_controllers, counts, strict=True):
        # From version 3.8 on, only the first thread that sets a limit may do so again, and others are ignored
        # silently. Who is inside is counted here, so whoever it is may.
        free = getattr(each, "clear_controlling_thread", None)
        if free is not None:
            free(force=True)
        each.set_num_threads(count)
        if free is not None:
            free(force=True)


one_thread: Final = _OneThread()
