"""The guide's table of the row is the row's schema."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

from pydantic import BaseModel

from dreamgym.data.schema import TrajectoryRow

GUIDE = Path(__file__).parents[2] / "docs" / "guides" / "trajectories.md"


def rows_inside(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [found for argument in get_args(annotation) for found in rows_inside(argument)]


def keys(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    for name, info in model.model_fields.items():
        inner = rows_inside(info.annotation)
        if not inner:
            yield prefix + name
        for row in inner:
            yield from keys(row, f"{prefix}{name}{'[]' if 'list' in str(info.annotation) else ''}.")


def test_the_guide_names_every_key_of_the_row_and_no_other() -> None:
    table = GUIDE.read_text(encoding="utf-8").partition("schema version 1")[2].partition("\n## ")[0]
    assert re.findall(r"^\| `([^`]+)` \|", table, re.MULTILINE) == list(keys(TrajectoryRow))
