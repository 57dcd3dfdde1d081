"""Parquet, one row a transition: what `datasets`, DuckDB and pandas read directly.

A trajectory is the rows that share its ``trajectory_id``, in order of ``position``. An episode without a
single transition has no row, so it is left out.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

from dreamgym.data.schema import SCHEMA_VERSION, dump_json, parse_json, row_of, shorten, trajectory_from_row
from dreamgym.errors import DataError, MissingExtraError
from dreamgym.files import OnBad, OnRead, atomic_write, report
from dreamgym.types import Trajectory

ROW_GROUP = 5000

TASK = ("instruction", "environment", "split", "family", "origin")
OUTCOME = ("reward", "terminated", "truncated", "success", "reasoning", "confidence", "reward_source")
PROVENANCE = ("source", "policy", "policy_version", "experience_model", "recorded_at")


def _pyarrow() -> tuple[Any, Any]:
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError:
        raise MissingExtraError("Parquet", "parquet") from None
    return pyarrow, parquet


def _schema(pa: Any) -> Any:
    integer, number, truth, texts = pa.int64(), pa.float64(), pa.bool_(), pa.list_(pa.string())
    names = [
        *("schema_version", "trajectory_id", "position", "task_id", *TASK, "parameters", "state"),
        *("admissible_actions", "thought", "action", "next_state", "next_admissible_actions"),
        *(*OUTCOME, *PROVENANCE, "seed", "sheet", "given"),
    ]
    kinds = {
        **dict.fromkeys(("schema_version", "position", "policy_version", "seed", "given"), integer),
        **dict.fromkeys(("reward", "confidence", "recorded_at"), number),
        **dict.fromkeys(("terminated", "truncated", "success"), truth),
        **dict.fromkeys(("admissible_actions", "next_admissible_actions"), texts),
    }
    return pa.schema([(name, kinds.get(name, pa.string())) for name in names])


def write(trajectories: Iterable[Trajectory], path: Path) -> int:
    """Write a Parquet file that appears whole or not at all; return how many trajectories are in it.

    Raises:
        MissingExtraError: pyarrow is not installed.
        DataError: a value does not fit its column.
        StoreError: the file cannot be written.
    """
    pa, parquet = _pyarrow()
    schema = _schema(pa)
    written, rows = 0, []
    try:
        with (
            atomic_write(path) as partial,
            parquet.ParquetWriter(partial, schema, compression="zstd") as writer,
        ):
            for trajectory in trajectories:
                written += bool(trajectory.transitions)
                rows += _rows(trajectory)
                if len(rows) >= ROW_GROUP:
                    writer.write_table(pa.Table.from_pylist(rows, schema=schema))
                    rows = []
            writer.write_table(pa.Table.from_pylist(rows, schema=schema))
    except (pa.ArrowException, OverflowError) as error:
        raise DataError(f"{path}: expected values that fit the columns, got {error}") from None
    return written


def read(
    path: Path, *, on_bad: OnBad | None = None, on_read: OnRead | None = None
) -> Iterator[tuple[str, Trajectory]]:
    """(place, trajectory) of each trajectory of a file that `write` made; a place counts rows as lines.

    Raises:
        DataError: the file is not Parquet, lacks a column, or its rows do not make a trajectory.
    """
    pa, parquet = _pyarrow()
    try:
        with parquet.ParquetFile(path) as file:
            names = _schema(pa).names
            if missing := [name for name in names if name not in file.schema_arrow.names]:
                raise DataError(f"{path}:1: expected the column {missing[0]!r}, got none")
            batches = file.iter_batches(batch_size=ROW_GROUP, columns=names)
            rows = enumerate((row for batch in batches for row in batch.to_pylist()), 1)
            for _, group in groupby(rows, key=lambda row: row[1]["trajectory_id"]):
                numbered = list(group)
                where = f"{path}:{numbered[0][0]}"
                try:
                    trajectory = _trajectory([row for _, row in numbered])
                except DataError as error:
                    report(DataError(f"{where}: {error}"), on_bad)
                else:
                    yield where, trajectory
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"{path}:1: expected a Parquet file, got {shorten(str(error), 200)}") from None
    if on_read is not None:
        on_read(path.stat().st_size)


def _rows(trajectory: Trajectory) -> list[dict[str, Any]]:
    row_of(trajectory)  # checks that the turns follow one another
    task, provenance, what = trajectory.task, trajectory.provenance, f"trajectory {trajectory.id!r}"
    whole = {
        "schema_version": SCHEMA_VERSION,
        "trajectory_id": trajectory.id,
        "task_id": task.id,
        **{name: getattr(task, name) for name in TASK},
        "parameters": dump_json(dict(task.parameters), what=what),
        **{name: getattr(provenance, name) for name in PROVENANCE},
        "seed": trajectory.seed,
        "sheet": None if trajectory.sheet is None else dump_json(trajectory.sheet.facts, what=what),
        "given": trajectory.given,
    }
    return [
        whole
        | {
            "position": position,
            "state": turn.state.text,
            "admissible_actions": turn.state.admissible_actions,
            "thought": turn.thought,
            "action": turn.action,
            "next_state": turn.outcome.next_state.text,
            "next_admissible_actions": turn.outcome.next_state.admissible_actions,
            **{name: getattr(turn.outcome, name) for name in OUTCOME},
        }
        for position, turn in enumerate(trajectory.transitions)
    ]


def _trajectory(rows: list[dict[str, Any]]) -> Trajectory:
    first, before = rows[0], (rows[0]["state"], rows[0]["admissible_actions"])
    turns = []
    for position, row in enumerate(rows):
        if row["position"] != position:
            raise DataError(f"expected position {position} of the trajectory, got {row['position']!r}")
        if (row["state"], row["admissible_actions"]) != before:
            raise DataError(f"expected position {position} to start in the state before it, got another")
        before = (row["next_state"], row["next_admissible_actions"])
        next_state = {"text": row["next_state"], "admissible_actions": row["next_admissible_actions"]}
        outcome = {"next_state": next_state, **{name: row[name] for name in OUTCOME}}
        turns.append({"action": row["action"], "thought": row["thought"], "outcome": outcome})
    return trajectory_from_row(
        {
            "schema_version": first["schema_version"],
            "id": first["trajectory_id"],
            "task": {
                "id": first["task_id"],
                **{name: first[name] for name in TASK},
                "parameters": parse_json(first["parameters"] or "{}"),
            },
            "start": {"text": first["state"], "admissible_actions": first["admissible_actions"]},
            "turns": turns,
            "provenance": {name: first[name] for name in PROVENANCE},
            "seed": first["seed"],
            "sheet": None if first["sheet"] is None else {"facts": parse_json(first["sheet"])},
            "given": first["given"],
        }
    )
