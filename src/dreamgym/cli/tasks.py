"""`dreamgym tasks`: look at a run's pool of tasks, what came of each, and where generated ones come from."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from dreamgym.cli import console
from dreamgym.cli.options import Json
from dreamgym.config import nearest_name
from dreamgym.curriculum.task_pool import PoolView, Standing, lineage, pool_path, read_pool
from dreamgym.errors import ConfigError

app = typer.Typer(no_args_is_help=True, help="Look at a run's pool of tasks, and where they come from.")

Pool = Annotated[Path, typer.Argument(metavar="RUN|POOL.jsonl", help="A run, or the file of its task pool.")]


@app.command("list")
@console.command
def list_tasks(
    pool: Pool,
    generated: Annotated[bool, typer.Option("--generated", help="Only tasks that were generated.")] = False,
    limit: Annotated[int, typer.Option(help="Rows of the table; JSON has all.", min=1)] = 50,
    as_json: Json = False,
) -> None:
    """List the tasks, highest reward entropy first, and what became of generated candidates.

    Examples:

      dreamgym tasks list runs/agent

      dreamgym tasks list runs/agent --generated

      dreamgym tasks list runs/agent/tasks.jsonl --json
    """
    view = read_pool(pool_path(pool))
    found = view.generated if generated else list(view.standings)
    found.sort(key=lambda each: -1.0 if each.entropy is None else each.entropy, reverse=True)
    counts = dict(sorted(view.counts.items()))
    made = len(view.generated)
    summary = f"{len(view)} tasks: {len(view) - made} seed, {made} generated"
    shown = f"; the first {limit} of {len(found)}" if len(found) > limit else ""
    tables = [
        console.table(
            summary + shown,
            *("task", "origin", "tries", "success", "entropy", "since step", "varies"),
            rows=[_row(each) for each in found[:limit]],
        )
    ]
    if counts:
        tables.append(console.table("candidates", "what became of them", "count", rows=list(counts.items())))
    console.show(
        {"tasks": [_told(each) for each in found], "candidates": counts, "seed": len(view) - made,
         "generated": made},
        tables,
        as_json=as_json,
    )  # fmt: skip


@app.command("show")
@console.command
def show_task(
    pool: Pool,
    task: Annotated[str, typer.Argument(help="The id of a task, or its instruction.")],
    as_json: Json = False,
) -> None:
    """Show one task: what came of it step by step, what it varies, and what varies it.

    Examples:

      dreamgym tasks show runs/agent generated/pick_and_place_simple-Mug-None-Desk

      dreamgym tasks show runs/agent "put a mug in desk" --json
    """
    view = read_pool(pool_path(pool))
    standing = _find(view, task)
    name = standing.task.id
    children = [each for each in view.generated if _parent(each) == name]
    ancestry = view.ancestry(name)
    told = lineage(standing.task)
    about: list[tuple[str, object]] = [
        ("instruction", standing.task.instruction),
        ("origin", standing.task.origin),
        ("family", standing.task.family),
        ("tries", standing.tries),
        ("success", _share(standing)),
        ("reward entropy", _number(standing.entropy)),
    ]
    if told is not None:
        about += [
            ("since step", standing.step),
            ("written by", told.generator),
            ("chosen because", told.reason),
        ]
    tables = [console.table(name, "", "", rows=about)]
    if len(ancestry) > 1:
        rows = [(each.instruction, each.origin, each.id) for each in ancestry]
        tables.append(console.table("lineage, newest first", "task", "origin", "id", rows=rows))
    if children:
        rows = [(each.task.instruction, each.task.origin, each.task.id) for each in children]
        tables.append(console.table("variations of it", "task", "origin", "id", rows=rows))
    if standing.history:
        tables.append(
            console.table(
                "step by step",
                *("step", "tries", "successes", "entropy"),
                rows=[(s, p.tries, p.successes, _number(p.entropy)) for s, p in standing.history],
            )
        )
    result = {
        **_told(standing),
        "ancestry": [each.id for each in ancestry[1:]],
        "variations": [each.task.id for each in children],
        "history": [
            {"step": step, **played.model_dump(exclude={"task"})} for step, played in standing.history
        ],
        "parameters": dict(standing.task.parameters),
    }
    console.show(result, tables, as_json=as_json)


def _find(view: PoolView, wanted: str) -> Standing:
    if wanted in view:
        return view[wanted]
    same = [each for each in view.standings if each.task.instruction == wanted]
    if len(same) == 1:
        return same[0]
    if same:
        names = ", ".join(each.task.id for each in same[:8])
        raise ConfigError(f"{len(same)} tasks of the pool say {wanted!r}; choose one by its id: {names}")
    known = [each.task.id for each in view.standings]
    close = nearest_name(wanted, known + [each.task.instruction for each in view.standings])
    hint = close if "did you mean" in close else "; dreamgym tasks list shows what there is"
    raise ConfigError(f"no task {wanted!r} in the pool of {len(known)}{hint}")


def _row(standing: Standing) -> tuple[object, ...]:
    return (
        standing.task.instruction,
        standing.task.origin,
        standing.tries,
        _share(standing),
        _number(standing.entropy),
        "" if standing.step is None else standing.step,
        _parent(standing) or "",
    )


def _told(standing: Standing) -> dict[str, Any]:
    told = lineage(standing.task)
    return {
        "id": standing.task.id,
        "instruction": standing.task.instruction,
        "environment": standing.task.environment,
        "family": standing.task.family,
        "origin": standing.task.origin,
        "step": standing.step,
        "tries": standing.tries,
        "successes": standing.successes,
        "entropy": standing.entropy,
        "lineage": told.as_parameter() if told else None,
    }


def _parent(standing: Standing) -> str | None:
    told = lineage(standing.task)
    return told.parent if told else None


def _share(standing: Standing) -> str:
    return f"{standing.successes / standing.tries:.0%}" if standing.tries else ""


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}"
