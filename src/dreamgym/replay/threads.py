"""One thread for the matrix products of searches.

NumPy's BLAS shares even a small product with threads of its own, which then wait for the next one at full
speed: beside models that compute, that took up to 1.5 s of CPU of a training step of 5 s (decision 0002).
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

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
        self._limiter: Any = None

    @contextmanager
    def __call__(self) -> Iterator[None]:
        with self._lock:
            self._inside += 1
            if self._inside == 1:
                self._limiter = _BLAS.limit(limits=1)
        try:
            yield
        finally:
            with self._lock:
                self._inside -= 1
                if self._inside == 0:
                    self._limiter.restore_original_limits()


one_thread: Final = _OneThread()
