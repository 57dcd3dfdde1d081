"""Keeps Python's garbage collector from going through all that is loaded, over and over.

PyTorch and transformers alone are 400,000 objects: a full collection takes 0.2 s in which nothing else goes
on, and thousands of waiting coroutines bring one about every few seconds.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

_lock: Final = threading.Lock()
_inside = 0


@contextmanager
def settled() -> Iterator[None]:
    """What is loaded by now is looked at again only afterwards; what is made meanwhile is collected as ever.

    >>> with settled():
    ...     gc.get_freeze_count() > 0
    True
    >>> gc.get_freeze_count()
    0
    """
    global _inside  # noqa: PLW0603  (so is what it counts: there is one collector)
    with _lock:
        _inside += 1
        if _inside == 1:
            gc.collect()  # garbage that is frozen stays
            gc.freeze()
    try:
        yield
    finally:
        with _lock:
            _inside -= 1
            if _inside == 0:
                gc.unfreeze()
