"""`dreamgym tasks`: the task pool of a run, the results of its tasks, and the origin of generated ones."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from dreamgym.cli import console
from dreamgym.cli.options import Json
from dreamgym.config import nearest_name
from dreamgym.curriculum.task_pool import TaskPool, TaskRecord, lineage, pool_path, read_pool
from dreamgym.errors import ConfigError

app = console.group(help="List the tasks of a run, with their results and origin.")

Pool = Annotated[Path, typer.Argument(metavar="RUN|POOL.jsonl", help="A run, or the file of its task pool.")]


@console.command(app, "list")
def list_tasks(
    pool: Pool,
    generated: Annotated[bool, typer.Option("--generated", help="Only generated tasks.")] = False,
    limit: Annotated[int, typer.Option(help="Rows of the table; JSON has all.", min=1)] = 50,
    as_json: Json = False,
) -> None:
    """List the tasks, highest reward entropy first, and count the candidates of the task generator.

    Examples:

    - dreamgym tasks list runs/agent
    - dreamgym tasks list runs/agent --generated
    - dreamgym tasks list runs/agent/tasks.jsonl --json
    """
    found = _read(pool)
    records = found.generated if generated else list(found.records)
    records.sort(key=lambda each: -1.0 if each.entropy is None else each.entropy, reverse=True)
    counts = dict(sorted(found.counts.items()))
    made = len(found.generated)
    summary = f"{len(found)} tasks: {len(found) - made} seed, {made} generated"
    shown = f"; the first {limit} of {len(records)}" if len(records) > limit else ""
    columns = ("task", "origin", "episodes", "success", "entropy", "since step", "varies")
    tables = [console.table(summary + shown, *columns, rows=[_row(each) for each in records[:limit]])]
    if counts:
        tables.append(console.table("candidates", "result", "count", rows=list(counts.items())))
    result = {"tasks": [_fields(each) for each in records], "candidates": counts}
    console.show(result | {"seed": len(found) - made, "generated": made}, tables, as_json=as_json)


@console.command(app, "show")
def show_task(
    pool: Pool,
    task: Annotated[str, typer.Argument(help="The id of a task, or its instruction.")],
    as_json: Json = False,
) -> None:
    """Show one task: its results by step, its ancestors, and its variations.

    Examples:

    - dreamgym tasks show runs/agent generated/pick_and_place_simple-Mug-None-Desk
    - dreamgym tasks show runs/agent "put a mug in desk" --json
    """
    found = _read(pool)
    record = _find(found, task)
    name = record.task.id
    variations = [each.task for each in found.generated if _parent(each) == name]
    ancestry = found.ancestry(name)
    tables = [console.table(name, "", "", rows=_about(record))]
    for title, tasks in (("lineage, newest first", ancestry), ("variations", variations)):
        if len(tasks) > (tasks is ancestry):  # a task is the first of its own lineage
            rows = [(each.instruction, each.origin, each.id) for each in tasks]
            tables.append(console.table(title, "task", "origin", "id", rows=rows))
    if record.history:
        counted = [(step, r.episodes, r.successes, _number(r.entropy)) for step, r in record.history]
        columns = ("step", "episodes", "successes", "entropy")
        tables.append(console.table("results by step", *columns, rows=counted))
    result = {
        **_fields(record),
        "ancestry": [each.id for each in ancestry[1:]],
        "variations": [each.id for each in variations],
        "history": [{"step": step, **result.model_dump(exclude={"task"})} for step, result in record.history],
        "parameters": dict(record.task.parameters),
    }
    console.show(result, tables, as_json=as_json)


def _read(pool: Path) -> TaskPool:
    path = pool_path(pool)
    if not path.exists() and pool.is_dir():
        raise ConfigError(
            f"{pool} has no task pool ({path.name}): only runs with a curriculum have one (training in the "
            "dream, curriculum.generator other than none, an environment that can check new tasks)"
        )
    return read_pool(path)


def _find(pool: TaskPool, wanted: str) -> TaskRecord:
    if wanted in pool:
        return pool[wanted]
    same = [each for each in pool.records if each.task.instruction == wanted]
    if len(same) == 1:
        return same[0]
    if same:
        names = ", ".join(each.task.id for each in same[:8])
        raise ConfigError(f"{len(same)} tasks have the instruction {wanted!r}; choose one by its id: {names}")
    known = [each.task.id for each in pool.records]
    close = nearest_name(wanted, known + [each.task.instruction for each in pool.records])
    hint = close if "did you mean" in close else "; dreamgym tasks list shows all"
    raise ConfigError(f"no task {wanted!r} in the pool of {len(known)}{hint}")


def _about(record: TaskRecord) -> list[tuple[str, object]]:
    rows: list[tuple[str, object]] = [
        ("instruction", record.task.instruction),
        ("origin", record.task.origin),
        ("family", record.task.family),
        ("episodes", record.episodes),
        ("success", _share(record)),
        ("reward entropy", _number(record.entropy)),
    ]
    origin = lineage(record.task)
    if origin is not None:
        rows += [("since step", record.step), ("generator", origin.generator), ("reason", origin.reason)]
    return rows


def _row(record: TaskRecord) -> tuple[object, ...]:
    return (
        record.task.instruction,
        record.task.origin,
        record.episodes,
        _share(record),
        _number(record.entropy),
        "" if record.step is None else record.step,
        _parent(record) or "",
    )


def _fields(record: TaskRecord) -> dict[str, Any]:
    origin = lineage(record.task)
    own = {
        name: getattr(record.task, name) for name in ("id", "instruction", "environment", "family", "origin")
    }
    counted = {name: getattr(record, name) for name in ("step", "episodes", "successes", "entropy")}
    return own | counted | {"lineage": asdict(origin) if origin else None}


def _parent(record: TaskRecord) -> str | None:
    origin = lineage(record.task)
    return origin.parent if origin else None


def _share(record: TaskRecord) -> str:
    return f"{record.successes / record.episodes:.0%}" if record.episodes else ""


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}"
