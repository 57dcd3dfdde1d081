"""Reads the tasks of an MCP server from a file of the user's: JSON lines, one task each."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import Field

from dreamgym.config import Section
from dreamgym.data.ingest.json_reader import read_records
from dreamgym.data.schema import check
from dreamgym.errors import ConfigError, DataError
from dreamgym.types import Task


class TaskRow(Section):
    """One line of a tasks file."""

    instruction: str = Field(min_length=1)
    id: str | None = Field(None, min_length=1, description="default: SPLIT-NUMBER")
    split: str = Field("train", min_length=1)
    family: str = ""
    parameters: dict[str, Any] = Field(default_factory=dict, description="for the check")
    setup: tuple[str, ...] = Field((), description="calls before the episode starts, which no agent sees")
    solution: tuple[str, ...] = Field((), description="calls that solve the task: the expert")


class McpTasks:
    """The tasks of a server by split, with what only the environment knows of each."""

    def __init__(self, rows: Sequence[TaskRow], environment: str) -> None:
        self._environment = environment
        self._splits: dict[str, list[Task]] = {}
        self._rows: dict[str, TaskRow] = {}
        for row in rows:
            found = self._splits.setdefault(row.split, [])
            task = self._task(row, row.id or f"{row.split}-{len(found)}")
            if task.id in self._rows:
                raise DataError(f"expected one task with the id {task.id!r}, got two")
            found.append(task)
            self._rows[task.id] = row

    @property
    def splits(self) -> tuple[str, ...]:
        """``train`` first: it is what other splits are held out from."""
        return tuple(sorted(self._splits, key=lambda split: split != "train"))

    def of(self, split: str) -> Sequence[Task]:
        return self._splits[split]

    def row(self, task: Task) -> TaskRow | None:
        return self._rows.get(task.id)

    def _task(self, row: TaskRow, name: str) -> Task:
        return Task(
            id=name,
            instruction=row.instruction,
            environment=self._environment,
            split=row.split,
            family=row.family,
            parameters=row.parameters,
        )


def read_tasks(path: Path, environment: str) -> McpTasks:
    """
    Raises:
        ConfigError: there is no such file, or it holds no tasks.
        DataError: a line is not a task; the message starts with ``file:line``.
    """
    if not path.is_file():
        raise ConfigError(f"tasks: expected a file of JSON lines, found nothing at {str(path)!r}")
    rows: list[TaskRow] = []
    for record in read_records(path):
        try:
            rows.append(check(TaskRow, record.value))
        except DataError as error:
            raise record.refuse(error) from None
    if not rows:
        raise ConfigError(f"tasks: expected at least one task in {str(path)!r}, found none")
    try:
        return McpTasks(rows, environment)
    except DataError as error:
        raise DataError(f"{path}: {error}") from None
