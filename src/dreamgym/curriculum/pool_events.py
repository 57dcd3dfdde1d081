"""The rows of a task pool's file: tasks added, results of a step, and where a run resumed."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Annotated, Literal, TypeAlias

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from dreamgym.data.schema import TaskRow
from dreamgym.errors import DataError
from dreamgym.types import Task


class _Row(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


class SeedRow(_Row):
    """A task that was given."""

    event: Literal["seed"] = "seed"
    task: TaskRow


class GeneratedRow(_Row):
    """The tasks of one round of the task generator; a round is stored as a whole."""

    event: Literal["generated"] = "generated"
    step: int = Field(ge=0)
    tasks: list[TaskRow]
    counts: dict[str, int] = Field(default_factory=dict)
    """Candidates by result: accepted, or the reason of their rejection."""


class TaskResult(_Row):
    """The rollouts of one task in one step."""

    task: str
    episodes: int = Field(ge=0)
    successes: int = Field(ge=0)
    entropy: float = Field(ge=0)


class StepRow(_Row):
    """The results of one step."""

    event: Literal["step"] = "step"
    step: int = Field(ge=0)
    results: list[TaskResult]


class ResumedRow(_Row):
    """The run resumed before this step: earlier rows of this step and of later ones are void."""

    event: Literal["resumed"] = "resumed"
    step: int = Field(ge=0)


PoolRow: TypeAlias = Annotated[SeedRow | GeneratedRow | StepRow | ResumedRow, Field(discriminator="event")]
_ADAPTER: TypeAdapter[SeedRow | GeneratedRow | StepRow | ResumedRow] = TypeAdapter(PoolRow)


def task_row(task: Task) -> TaskRow:
    fields = {name: getattr(task, name) for name in TaskRow.model_fields}
    return TaskRow(**fields | {"parameters": dict(task.parameters)})


def task_of(row: TaskRow) -> Task:
    return Task(**dict(row))


def encode(rows: Iterable[PoolRow]) -> list[bytes]:
    """JSON objects, each parsed before it is returned: a row that cannot be read must not get on disk."""
    lines = [json.dumps(row.model_dump(), allow_nan=False).encode() for row in rows]
    for line in lines:
        _ADAPTER.validate_json(line)
    return lines


def decode(line: bytes) -> PoolRow:
    try:
        return _ADAPTER.validate_json(line)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(map(str, first["loc"])) or "row"
        raise DataError(
            f"expected a row of a task pool: {where}: {first['msg']}, got {line[:80]!r}"
        ) from None
