"""Inner-product top-k kernels: FAISS where it is installed, NumPy elsewhere, each on one thread.

A search shares its cores with models that compute. BLAS and OpenMP threads that wait for the next product at
full speed would take time from them: up to 1.5 s of CPU in a training step of 5 s (decision 0002).
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt
from threadpoolctl import ThreadpoolController

from dreamgym.errors import MissingExtraError
from dreamgym.protocols import Keys

Scores: TypeAlias = npt.NDArray[np.float32]
Ids: TypeAlias = npt.NDArray[np.int64]

_QUERIES_AT_ONCE: Final = 64
_FAISS_QUERIES: Final = 4
"""Fewer queries are faster one by one with NumPy: each is one matrix-vector product."""
_BLAS_LOCK: Final = threading.Lock()


@functools.cache
def load_faiss() -> Any:
    """
    Raises:
        MissingExtraError: FAISS is not installed.
    """
    try:
        import faiss
    except ImportError:
        raise MissingExtraError("the approximate index", "faiss") from None
    # One matrix product instead of one scan per query; the default is 128,000 queries.
    faiss.cvar.distance_compute_blas_threshold = _FAISS_QUERIES
    return faiss


@functools.cache
def has_faiss() -> bool:
    try:
        load_faiss()
    except MissingExtraError:
        return False
    return True


def top_k(queries: Keys, keys: Keys, k: int) -> tuple[Scores, Ids]:
    """The k largest inner products of each query, best first, as scores and row numbers `(queries, k)`.

    Scores have single precision; rows that differ by less than that may come in any order.
    """
    k = min(k, len(keys))
    if len(queries) >= _FAISS_QUERIES and has_faiss():
        faiss = load_faiss()
        faiss.omp_set_num_threads(1)  # holds for the calling thread
        scores, ids = faiss.knn(queries, keys, k, metric=faiss.METRIC_INNER_PRODUCT)
        return scores, ids
    scores, ids = np.empty((len(queries), k), np.float32), np.empty((len(queries), k), np.int64)
    width = 1 if has_faiss() else _QUERIES_AT_ONCE
    for start in range(0, len(queries), width):
        part = slice(start, start + width)
        with one_blas_thread():
            products = queries[part] @ keys.T if width > 1 else (keys @ queries[start])[None]
        best = np.argpartition(products, len(keys) - k, axis=1)[:, len(keys) - k :]
        found = np.take_along_axis(products, best, axis=1)
        order = np.argsort(-found, axis=1)
        scores[part] = np.take_along_axis(found, order, axis=1)
        ids[part] = np.take_along_axis(best, order, axis=1)
    return scores, ids


@functools.cache
def _numpy_blas() -> Any:
    """NumPy's own BLAS only: PyTorch may load one of the same name, and keeps its threads."""
    found = ThreadpoolController()
    paths = [
        each["filepath"]
        for each in found.info()
        if each["user_api"] == "blas" and Path(each["filepath"]).parent.name.startswith("numpy")
    ]
    return found.select(filepath=paths).lib_controllers


@contextmanager
def one_blas_thread() -> Iterator[None]:
    """Run NumPy's matrix products on the calling thread alone."""
    with _BLAS_LOCK:  # the limit holds for the whole process
        before = [each.num_threads for each in _numpy_blas()]
        _set_threads([1] * len(before))
        try:
            yield
        finally:
            _set_threads(before)


def _set_threads(counts: list[int]) -> None:
    for each, count in zip(_numpy_blas(), counts, strict=True):
        # From threadpoolctl 3.8 on, only the first thread that sets a limit may set it again.
        free = getattr(each, "clear_controlling_thread", lambda **_: None)
        free(force=True)
        each.set_num_threads(count)
        free(force=True)
