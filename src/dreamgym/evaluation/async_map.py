"""An async map with bounded concurrency that keeps the order."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeAlias, TypeVar

Question = TypeVar("Question")
Answer = TypeVar("Answer")

OnCount: TypeAlias = Callable[[int, int], None]
"""Receives how many of how many are done."""


async def ask_all(
    ask: Callable[[Question], Awaitable[Answer]],
    questions: Sequence[Question],
    *,
    in_flight: int,
    on_count: OnCount | None = None,
) -> list[Answer]:
    """`ask` for each question, at most `in_flight` at a time; the first error ends all.

    Args:
        on_count: called at the start and after each answer.

    >>> async def double(number: int) -> int:
    ...     return 2 * number
    >>> asyncio.run(ask_all(double, [1, 2, 3], in_flight=2))
    [2, 4, 6]
    """
    if in_flight < 1:
        raise ValueError(f"expected at least 1 question in flight, got {in_flight!r}")
    waiting = iter(enumerate(questions))
    answers: dict[int, Answer] = {}
    count = on_count or (lambda done, total: None)
    count(0, len(questions))

    async def work() -> None:
        for place, question in waiting:
            answers[place] = await ask(question)
            count(len(answers), len(questions))

    workers = [asyncio.create_task(work()) for _ in range(min(in_flight, len(questions)))]
    try:
        await asyncio.gather(*workers)
    finally:
        for worker in workers:
            worker.cancel()
        await asyncio.gather(*workers, return_exceptions=True)
    return [answers[place] for place in range(len(questions))]
