"""The task filter: checks that a candidate is well-formed by the environment's own rules, new and possible,
where the paper trusts its model."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from enum import StrEnum

from dreamgym.types import Task, WorldSheet

ParseInstruction = Callable[[str], Task | None]
"""The task that an instruction describes; equivalent tasks have the same id. None if it cannot be parsed."""
FindSheet = Callable[[Task], WorldSheet | None]
"""A world sheet on which a task can succeed; None if none is found."""

_MAX_LENGTH = 400
"""Characters of an instruction."""


class Rejection(StrEnum):
    """Why a candidate did not become a task."""

    FAILED = "failed"
    """The language model did not answer."""
    UNREADABLE = "unreadable"
    """The reply could not be parsed."""
    MALFORMED = "malformed"
    """The environment cannot parse the instruction."""
    KNOWN = "known"
    """The pool holds an equivalent task."""
    RESERVED = "reserved"
    """The evaluation holds an equivalent task."""
    IMPOSSIBLE = "impossible"
    """No world sheet was found on which it can succeed."""
    NOT_SELECTED = "not_selected"
    """It was valid, and another candidate was selected."""


class TaskFilter:
    """Accepts instructions that are well-formed, new and possible."""

    def __init__(
        self, parse: ParseInstruction, find_sheet: FindSheet, *, reserved: Iterable[str] = ()
    ) -> None:
        """`reserved` are the instructions of the evaluation splits."""
        self._parse = parse
        self._find_sheet = find_sheet
        self._ids: dict[str, str] = {}
        self._reserved = frozenset(map(self._id, reserved))

    def task_ids(self, tasks: Iterable[Task]) -> set[str]:
        """Ids that are independent of wording: equivalent tasks have the same one."""
        return {self._id(task.instruction) for task in tasks}

    def check(self, instruction: str, known: Collection[str]) -> Task | Rejection:
        """The task of a candidate, or why it is rejected; `known` are the `task_ids` of the pool."""
        text = instruction.strip()
        if not text or len(text) > _MAX_LENGTH or not text.isprintable():
            return Rejection.MALFORMED
        task = self._parse(text)
        if task is None:
            return Rejection.MALFORMED
        if task.id in self._reserved:
            return Rejection.RESERVED
        if task.id in known:
            return Rejection.KNOWN
        return task if self._find_sheet(task) is not None else Rejection.IMPOSSIBLE

    def _id(self, instruction: str) -> str:
        found = self._ids.get(instruction)
        if found is None:
            task = self._parse(instruction)
            # No candidate that can be parsed equals an instruction that cannot.
            found = self._ids[instruction] = task.id if task else f"unparsed: {instruction}"
        return found
