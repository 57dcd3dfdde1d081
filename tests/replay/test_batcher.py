"""Concurrent requests are processed as one batch, and a lone one does not wait."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future

import pytest

from dreamgym.errors import StoreError
from dreamgym.replay.buffer import Batcher


class Groups:
    """Serves requests by their double, and remembers what it was asked together."""

    def __init__(self, *, linger: float = 0.0) -> None:
        self.seen: list[list[int]] = []
        self.open = threading.Event()
        self.gatherer = Batcher[int, int]("test", self.serve, linger=linger)

    def serve(self, group: Sequence[int]) -> list[int | Exception]:
        assert self.open.wait(30)
        self.seen.append(list(group))
        return [2 * each if each >= 0 else StoreError("negative") for each in group]

    def together(self, first: int, *others: int) -> tuple[Future[int], list[Future[int]]]:
        """Let the others come while the first is served."""
        blocker = self.gatherer.submit(first)
        while not blocker.running():
            time.sleep(0.001)
        rest = [self.gatherer.submit(each) for each in others]
        self.open.set()
        return blocker, rest


def test_what_comes_while_it_works_is_the_next_group() -> None:
    groups = Groups()
    first, rest = groups.together(1, 2, 3, -1)
    assert first.result(30) == 2
    assert [future.result(30) for future in rest[:2]] == [4, 6]
    with pytest.raises(StoreError, match="negative"):
        rest[2].result(30)
    assert groups.seen == [[1], [2, 3, -1]]
    groups.gatherer.close()


def test_a_group_waits_for_company_once_there_was_some() -> None:
    groups = Groups(linger=30.0)
    _, together = groups.together(0, 1, 2)
    assert [future.result(30) for future in together] == [2, 4]
    late = [groups.gatherer.submit(3)]
    time.sleep(0.05)
    assert not late[0].running()
    late.append(groups.gatherer.submit(4))
    groups.gatherer.close()  # no more requests can come
    assert [future.result(0) for future in late] == [6, 8]
    assert groups.seen == [[0], [1, 2], [3, 4]]


def test_a_lone_request_is_served_at_once() -> None:
    groups = Groups(linger=30.0)
    groups.open.set()
    for number in range(20):
        assert groups.gatherer.submit(number).result(10) == 2 * number
    groups.gatherer.close()


def test_a_few_requests_without_company_end_the_waiting() -> None:
    groups = Groups(linger=0.05)
    _, together = groups.together(0, 1, 2)
    assert [future.result(30) for future in together] == [2, 4]
    began = time.monotonic()
    for number in range(5):
        assert groups.gatherer.submit(number).result(30) == 2 * number
    assert time.monotonic() - began >= 4 * 0.05
    groups.gatherer._linger = 30.0
    assert groups.gatherer.submit(7).result(10) == 14
    groups.gatherer.close()
