"""The lines of a task pool's file: what was added, what was played, and where a run went on from.

Lines are read with the same strictness with which all files are: unknown keys and wrong types are refused.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Annotated, Literal, TypeAlias

from pydantic import BaseModel, ConfigDict, Field, JsonValue, TypeAdapter, ValidationError

from dreamgym.errors import DataError
from dreamgym.types import Task


class _Row(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


class _TaskRow(_Row):
    id: str = Field(min_length=1)
    instruction: str
    environment: str = Field(min_length=1)
    split: str = "train"
    family: str = ""
    origin: Literal["seed", "generated"] = "seed"
    parameters: dict[str, JsonValue] = Field(default_factory=dict)

    def task(self) -> Task:
        return Task(**dict(self))


class SeedRow(_Row):
    """A task that was given."""

    event: Literal["seed"] = "seed"
    task: _TaskRow


class GeneratedRow(_Row):
    """What one round of the task generator brought: all of it, or nothing of it."""

    event: Literal["generated"] = "generated"
    step: int = Field(ge=0)
    tasks: list[_TaskRow]
    counts: dict[str, int] = Field(default_factory=dict)
    """How many candidates were asked for, accepted, and rejected for which reason."""


class Played(_Row):
    """What the rollouts of one task in one step came to."""

    task: str
    tries: int = Field(ge=0)
    successes: int = Field(ge=0)
    entropy: float = Field(ge=0)


class PlayedRow(_Row):
    """The results of one step."""

    event: Literal["played"] = "played"
    step: int = Field(ge=0)
    results: list[Played]


class ResumedRow(_Row):
    """The run went on with this step: what lines above say of it and of later ones is void."""

    event: Literal["resumed"] = "resumed"
    step: int = Field(ge=0)


PoolRow: TypeAlias = Annotated[SeedRow | GeneratedRow | PlayedRow | ResumedRow, Field(discriminator="event")]
_ADAPTER: TypeAdapter[SeedRow | GeneratedRow | PlayedRow | ResumedRow] = TypeAdapter(PoolRow)


def task_row(task: Task) -> _TaskRow:
    """
    Raises:
        ValueError: the task's parameters are not JSON.
    """
    return _TaskRow(
        id=task.id,
        instruction=task.instruction,
        environment=task.environment,
        split=task.split,
        family=task.family,
        origin=task.origin,
        parameters=dict(task.parameters),
    )


def encoded(rows: Iterable[PoolRow]) -> list[bytes]:
    """JSON objects, each parsed before it is returned: a row that cannot be read must not get on disk.

    Raises:
        ValueError: a text or number has no place in JSON (half of a surrogate pair, say).
    """
    lines = [json.dumps(row.model_dump(), allow_nan=False).encode() for row in rows]
    for line in lines:
        _ADAPTER.validate_json(line)
    return lines


def decode(line: bytes) -> PoolRow:
    """
    Raises:
        DataError: the line is not an event of a task pool.
    """
    try:
        return _ADAPTER.validate_json(line)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(map(str, first["loc"])) or "row"
        why = f"{where}: {first['msg']}, got {line[:80]!r}"
        raise DataError(f"expected a line of a task pool: {why}") from None
