"""`dreamgym data`: show, count, validate and export trajectories on disk."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Group
from rich.panel import Panel
from rich.text import Text

from dreamgym.cli import console
from dreamgym.cli.options import Json, Source
from dreamgym.data import ingest as formats
from dreamgym.data.schema import row_of
from dreamgym.data.stats import DatasetStats, Tally, stats
from dreamgym.data.trajectories import read_trajectories, shards
from dreamgym.errors import ConfigError, DataError
from dreamgym.files import OnRead
from dreamgym.types import State, Trajectory

app = console.group(help="Show, count, validate and export trajectories on disk.")


@console.command(app, "show")
def show_trajectory(
    path: Source,
    id: Annotated[str | None, typer.Option(help="Show the trajectory with this id.")] = None,  # noqa: A002
    index: Annotated[int, typer.Option(help="Show the n-th trajectory, from 0.", min=0)] = 0,
    as_json: Json = False,
) -> None:
    """Show one episode: its task, states, actions and end.

    Examples:

    - dreamgym data show trajectories
    - dreamgym data show trajectories --index 7
    - dreamgym data show trajectories --id alfworld-train-0-12 --json
    """
    trajectory = _find(path, id, index)
    if as_json:
        console.show(row_of(trajectory), [], as_json=True)
    else:
        console.out.print(_episode(trajectory))


@console.command(app, "stats")
def show_stats(path: Source, as_json: Json = False) -> None:
    """Count episodes, success and steps, by environment, family, policy, source.

    Examples:

    - dreamgym data stats trajectories
    - dreamgym data stats builtin:alfworld --json
    """
    with _reading(path) as on_read:
        counted = stats(path, on_read=on_read)
    table = console.table(
        f"{path}: {counted.shards} files, {counted.bytes / 1e6:.1f} MB",
        *("by", "name", "episodes", "success", "transitions", "mean steps"),
    )
    table.add_row(*_stats_row("all", "", counted.total))
    for kind, tallies in counted.kinds.items():
        table.add_section()
        for name, tally in _largest(tallies):
            table.add_row(*_stats_row(kind, name, tally))
    console.show(_stats_json(counted), table, as_json=as_json)


@console.command(app, "validate")
def validate(
    path: Source,
    limit: Annotated[int, typer.Option(help="Problems to list; all are counted.", min=1)] = 20,
    as_json: Json = False,
) -> None:
    """Check every row, and that no id occurs twice; exit code 3 if one does.

    Examples:

    - dreamgym data validate trajectories
    - dreamgym data validate shard.jsonl.xz --limit 100 --json
    """
    shown: list[str] = []
    valid = problems = 0
    seen: set[str] = set()

    def on_bad(problem: object) -> None:
        nonlocal problems
        problems += 1
        if len(shown) < limit:  # a small compressed file can hold millions of bad lines
            shown.append(str(problem))

    with _reading(path) as on_read:
        for trajectory in read_trajectories(path, on_bad=on_bad, on_read=on_read):
            if trajectory.id in seen:
                on_bad(f"{path}: expected each id once, got {trajectory.id!r} again")
            seen.add(trajectory.id)
            valid += 1
    tables = [console.table(f"checked {path}", "valid rows", "problems", rows=[(valid, problems)])]
    if problems:
        title = f"the first {len(shown)} problems"
        tables.append(console.table(title, "problem", rows=[[each] for each in shown]))
    result = {"valid": valid, "problem_count": problems, "problems": shown}
    console.show(result, tables, as_json=as_json)
    if problems:
        raise typer.Exit(DataError.exit_code)


@console.command(app, "export")
def export(
    path: Source,
    format: Annotated[str, typer.Option(help="messages, atif, parquet or trajectories.")],  # noqa: A002
    out: Annotated[Path, typer.Option(help="File to write; for lines, .gz and .xz compress.")],
    id: Annotated[str | None, typer.Option(help="Only the trajectory with this id.")] = None,  # noqa: A002
    force: Annotated[bool, typer.Option("--force", help="Replace an existing file.")] = False,
    as_json: Json = False,
) -> None:
    """Write trajectories as chat messages, ATIF 1.7, Parquet, or as they are into one file.

    `dreamgym ingest` reads the first three back: Parquet without loss; messages and
    ATIF with texts, rewards and success.

    Examples:

    - dreamgym data export trajectories --format messages --out chats.jsonl
    - dreamgym data export trajectories --format atif --id e3 --out e3.json
    - dreamgym data export trajectories --format parquet --out all.parquet
    - dreamgym data export trajectories --format trajectories --out all.jsonl.xz
    """
    if format == "atif" and out.suffix == ".json" and id is None:
        raise ConfigError(f"expected --id, since {str(out)!r} can hold one document only; or name it .jsonl")
    if out.exists() and not force:
        raise ConfigError(f"{out} exists; choose another --out, or replace it with --force")
    if format == "trajectories" and out.resolve().parent == path.resolve():
        raise ConfigError(f"--out {out}: expected a file outside {path}, or every row would be in it twice")
    if not out.parent.is_dir():
        raise ConfigError(
            f"--out {out}: there is no directory {out.parent}; make it, or choose another --out"
        )
    with _reading(path) as on_read:
        chosen = read_trajectories(path, on_read=on_read) if id is None else [_find(path, id, 0)]
        written = formats.export(chosen, out, format=format)
    result = {"out": str(out), "format": format, "trajectories": written, "bytes": out.stat().st_size}
    console.show_row(f"exported to {out}", result, as_json=as_json)


@contextmanager
def _reading(path: Path) -> Iterator[OnRead]:
    """A bar over the bytes of the files at `path`."""
    with console.progress() as bar:
        work = bar.add_task("reading", total=sum(file.stat().st_size for file in shards(path)), note="bytes")
        yield lambda step: bar.advance(work, step)


def _find(path: Path, identity: str | None, index: int) -> Trajectory:
    found = read_trajectories(path)
    if identity is not None:
        found = (trajectory for trajectory in found if trajectory.id == identity)
        index = 0
    for trajectory in islice(found, index, None):
        return trajectory
    wanted = f"at index {index}" if identity is None else f"with id {identity!r}"
    raise DataError(f"{path}: expected a trajectory {wanted}, found none; `dreamgym data stats` counts them")


def _episode(trajectory: Trajectory) -> Group:
    task, provenance = trajectory.task, trajectory.provenance
    head = console.visible(task.instruction, "bold")
    about = [task.environment, task.split, task.family, provenance.source, provenance.policy]
    head.append("\n").append_text(console.visible(" · ".join(filter(None, about)), "dim"))
    top = Panel(head, title=console.visible(trajectory.id), title_align="left")
    parts: list[Panel | Text] = [top, _state(trajectory.start)]
    for number, transition in enumerate(trajectory.transitions, 1):
        if transition.thought:
            parts.append(console.visible(f"  ({transition.thought})", "italic dim"))
        parts.append(console.visible(f"{number:3d} > {transition.action}", "bold cyan"))
        if transition.outcome.reward:
            parts.append(Text(f"      reward {transition.outcome.reward:g}", style="green"))
        parts.append(_state(transition.outcome.next_state))
    parts.append(Panel(Text(_ending(trajectory)), title="end", title_align="left"))
    return Group(*parts)


def _state(state: State) -> Text:
    text = console.visible(state.text)
    if state.admissible_actions is not None:
        text.append(f"\n[{len(state.admissible_actions)} admissible actions]", style="dim")
    return text


def _ending(trajectory: Trajectory) -> str:
    last = trajectory.transitions[-1].outcome if trajectory.transitions else None
    end = "unfinished"
    if last is not None and last.over:
        end = "terminated" if last.terminated else "truncated"
    if not trajectory.graded:
        return f"{end}, success and reward unknown, {len(trajectory)} steps"
    verdict = "success" if trajectory.success else "no success"
    return f"{end}, {verdict}, reward {trajectory.total_reward:g} in {len(trajectory)} steps"


def _stats_row(kind: str, name: str, tally: Tally) -> list[Text]:
    counts = [
        tally.episodes,
        f"{tally.success_rate:.1%}" if tally.graded else "unknown",
        tally.transitions,
        f"{tally.mean_steps:.1f}",
    ]
    return [console.visible(str(cell)) for cell in (kind, name, *counts)]


def _largest(tallies: Any) -> list[tuple[str, Tally]]:
    return sorted(tallies.items(), key=lambda item: (-item[1].episodes, item[0]))


def _stats_json(counted: DatasetStats) -> dict[str, Any]:
    def row(tally: Tally) -> dict[str, Any]:
        return asdict(tally) | {"success_rate": tally.success_rate, "mean_steps": tally.mean_steps}

    by = {kind: {name: row(tally) for name, tally in _largest(all_)} for kind, all_ in counted.kinds.items()}
    return {"bytes": counted.bytes, "shards": counted.shards, **row(counted.total), "by": by}
