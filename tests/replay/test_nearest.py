"""Searches keep NumPy's own threads at rest, whichever thread searches."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
from threadpoolctl import ThreadpoolController

from dreamgym.replay.nearest import one_blas_thread


def threads() -> list[int]:
    found = ThreadpoolController().select(user_api="blas").info()
    return [each["num_threads"] for each in found if "numpy" in each["filepath"]]


@pytest.fixture(autouse=True)
def two_threads() -> Iterator[None]:
    """Whatever the variables of the process say, there is something to keep at rest."""
    blas = ThreadpoolController().select(user_api="blas")
    ours = [each for each in blas.lib_controllers if "numpy" in each.filepath]
    before = [each.num_threads for each in ours]

    def set_threads(counts: list[int]) -> None:
        for each, count in zip(ours, counts, strict=True):
            each.clear_controlling_thread(force=True)
            each.set_num_threads(count)
            each.clear_controlling_thread(force=True)

    set_threads([2] * len(ours))
    assert threads() == [2], "NumPy's BLAS is not known to threadpoolctl"
    yield
    set_threads(before)


def test_inside_there_is_one_thread_and_afterwards_as_many_as_before() -> None:
    with one_blas_thread():
        assert threads() == [1]
    assert threads() == [2]


def test_it_holds_in_every_thread_whichever_was_first() -> None:
    seen: list[list[int]] = []

    def limited() -> None:
        with one_blas_thread():
            seen.append(threads())

    limited()
    for _ in range(3):
        thread = threading.Thread(target=limited)
        thread.start()
        thread.join()
    assert seen == [[1]] * 4
    assert threads() == [2]
