"""The validity gate: what a candidate must pass before it becomes a task of the pool.

The paper asks its model for tasks that are feasible and different, and believes the answer. Here a candidate
is read by the environment's own rules, must mean something that neither the pool nor the evaluation holds,
and needs a world sheet on which it can succeed.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from enum import StrEnum

from dreamgym.types import Task, WorldSheet

ReadInstruction = Callable[[str], Task | None]
"""The task that an instruction asks for; tasks that mean the same have the same id. None for nonsense."""
FindSheet = Callable[[Task], WorldSheet | None]
"""A world sheet on which a task can succeed; None where none is found."""

_LONGEST = 400
"""Characters of an instruction; more is refused unread."""


class Rejection(StrEnum):
    """Why a candidate did not become a task."""

    FAILED = "failed"
    """The language model gave no answer at all."""
    UNREADABLE = "unreadable"
    """The answer does not have the form that was asked for."""
    MALFORMED = "malformed"
    """It asks for nothing that the environment knows."""
    KNOWN = "known"
    """The pool holds a task that means the same."""
    RESERVED = "reserved"
    """A task of the evaluation means the same."""
    IMPOSSIBLE = "impossible"
    """No world sheet was found on which it can succeed."""
    NOT_SELECTED = "not_selected"
    """It was valid, and another one was preferred."""


class TaskFilter:
    """Lets through what is readable, new and possible."""

    def __init__(self, read: ReadInstruction, find_sheet: FindSheet, *, reserved: Iterable[str] = ()) -> None:
        """
        Args:
            reserved: instructions of the evaluation's splits.
        """
        self._read = read
        self._find_sheet = find_sheet
        self._meanings: dict[str, str] = {}
        self._reserved = frozenset(map(self._meaning, reserved))

    def meanings(self, tasks: Iterable[Task]) -> set[str]:
        """What these tasks ask for, whatever their wording."""
        return {self._meaning(task.instruction) for task in tasks}

    def judge(self, instruction: str, known: Collection[str]) -> Task | Rejection:
        """The task that a candidate makes, or why it makes none.

        Args:
            known: the `meanings` that are taken.
        """
        text = instruction.strip()
        if not text or len(text) > _LONGEST or not text.isprintable():
            return Rejection.MALFORMED
        task = self._read(text)
        if task is None:
            return Rejection.MALFORMED
        if task.id in self._reserved:
            return Rejection.RESERVED
        if task.id in known:
            return Rejection.KNOWN
        return task if self._find_sheet(task) is not None else Rejection.IMPOSSIBLE

    def _meaning(self, instruction: str) -> str:
        found = self._meanings.get(instruction)
        if found is None:
            task = self._read(instruction)
            # What cannot be read means no more than its words, which no candidate that is read can equal.
            found = self._meanings[instruction] = task.id if task else f"unread: {instruction}"
        return found
