"""Annotations on disk: one durable line for each trajectory and annotator; the newest line counts."""

from __future__ import annotations

from pathlib import Path
from typing import Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from dreamgym.errors import DataError
from dreamgym.files import AppendLog, read_log
from dreamgym.types import Annotation, Trajectory

FILE = "annotations.jsonl"


class _Row(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    schema_version: int = Field(1, ge=1, le=1)
    trajectory: str
    annotator: str
    annotation: Annotation


class RecordedAnnotator:
    """Reads the annotations by an annotator from a directory."""

    def __init__(self, folder: Path, name: str) -> None:
        self.name = name
        self._path = folder / FILE
        if not self._path.is_file():
            raise DataError(f"{self._path}: expected annotations, found none; annotate first")
        rows = dict(read_log(self._path, _decode))
        self._annotations = {
            trajectory: row for (trajectory, annotator), row in rows.items() if annotator == name
        }

    def __contains__(self, trajectory: Trajectory) -> bool:
        return _fits(self._annotations.get(trajectory.id), trajectory)

    async def annotate(self, trajectory: Trajectory) -> Annotation:
        if trajectory not in self:
            raise DataError(
                f"{self._path}: expected an annotation of {trajectory.id!r} with {len(trajectory)} notes by "
                f"{self.name!r}, found none; annotate it, or leave the trajectory out"
            )
        return self._annotations[trajectory.id]


def recorded_annotators(folder: Path) -> list[str]:
    """The names of the annotators in a directory."""
    path = folder / FILE
    return sorted({annotator for (_, annotator), _ in read_log(path, _decode)}) if path.is_file() else []


class AnnotationStore:
    """The annotations of one directory, with one writer at a time."""

    def __init__(self, folder: Path) -> None:
        self._log = AppendLog(folder / FILE, _decode)
        self._rows = dict(self._log.rows)

    def holds(self, trajectory: Trajectory, annotator: str) -> bool:
        """Whether it has an annotation by this annotator with a note for each step."""
        return _fits(self._rows.get((trajectory.id, annotator)), trajectory)

    def append(self, trajectory_id: str, annotator: str, annotation: Annotation) -> None:
        row = _Row(trajectory=trajectory_id, annotator=annotator, annotation=annotation)
        self._log.append([row.model_dump_json().encode()])
        self._rows[trajectory_id, annotator] = annotation

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._log.close()


def _decode(line: bytes) -> tuple[tuple[str, str], Annotation]:
    try:
        row = _Row.model_validate_json(line)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(map(str, first["loc"])) or "row"
        raise DataError(f"expected an annotation: {where}: {first['msg']}, got {line[:80]!r}") from None
    return (row.trajectory, row.annotator), row.annotation


def _fits(annotation: Annotation | None, trajectory: Trajectory) -> bool:
    return annotation is not None and len(annotation.notes) == len(trajectory)
