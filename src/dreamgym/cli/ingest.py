"""`dreamgym ingest`: other people's trajectories become ours."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import typer

from dreamgym.cli import console
from dreamgym.cli.options import Json
from dreamgym.data.ingest import Defaults, detect, find_format
from dreamgym.data.trajectories import TrajectoryWriter, encode_trajectory
from dreamgym.errors import DataError
from dreamgym.types import Trajectory

SHOWN_PROBLEMS = 20


@dataclass(slots=True)
class _Count:
    """What was found so far, by file."""

    formats: dict[Path, str] = field(default_factory=dict)
    trajectories: Counter[Path] = field(default_factory=Counter)
    transitions: Counter[Path] = field(default_factory=Counter)
    bad: Counter[Path] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)


@console.command
def ingest(
    files: Annotated[
        list[Path],
        typer.Argument(help="Files to read, .gz and .xz included.", exists=True, dir_okay=False),
    ],
    *,
    out: Annotated[Path, typer.Option(help="Directory of trajectories to add to; made if absent.")],
    format: Annotated[  # noqa: A002 - the option's name
        str, typer.Option(help="messages, atif, otel, parquet, or auto: by the first record of each file.")
    ] = "auto",
    environment: Annotated[
        str | None, typer.Option(help="Name of the environment the records come from.", show_default=False)
    ] = None,
    split: Annotated[str, typer.Option(help="Split their tasks belong to.")] = "train",
    skip_bad: Annotated[
        bool, typer.Option("--skip-bad", help="Count bad records instead of stopping.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Turn chat messages, ATIF or OpenTelemetry GenAI spans into trajectories.

    All or nothing: the first bad record ends the command with its file and
    line, exit code 3, and nothing is stored. With --skip-bad the good ones are
    stored and the bad ones counted. What is there already (same id, or same
    content where a record has no id) is not stored again.

    Examples:

      dreamgym ingest chats.jsonl --environment shop --out shop

      dreamgym ingest runs/*.json --format atif --environment sh --out sh

      dreamgym ingest spans.jsonl.gz --environment web --out web --skip-bad
    """
    count = _Count()
    for file in files:
        chosen = detect(file) if format == "auto" else find_format(format)
        count.formats[file] = chosen.name
    defaults = Defaults(environment=environment, split=split)
    with TrajectoryWriter(out) as writer:
        new = writer.add_shard(_read(files, defaults, count, skip_bad=skip_bad))
    for problem in count.problems[:SHOWN_PROBLEMS]:
        console.err.print(problem, markup=False, soft_wrap=True)
    if len(count.problems) > SHOWN_PROBLEMS:
        console.err.print(f"… and {len(count.problems) - SHOWN_PROBLEMS} more")
    _show(count, new, out, as_json=as_json)


def _read(files: list[Path], defaults: Defaults, count: _Count, *, skip_bad: bool) -> Iterator[Trajectory]:
    seen: dict[str, tuple[str, int]] = {}
    with console.progress() as bar:
        size = sum(file.stat().st_size for file in files)
        work = bar.add_task("reading", total=size, note="")
        for file in files:

            def on_bad(problem: DataError, file: Path = file) -> None:
                count.bad[file] += 1
                count.problems.append(str(problem))

            read = find_format(count.formats[file]).read
            places = read(file, defaults, on_bad if skip_bad else None, lambda step: bar.advance(work, step))
            for where, trajectory in places:
                try:
                    _check_id(where, trajectory, seen)
                except DataError as error:
                    if not skip_bad:
                        raise
                    on_bad(error)
                    continue
                count.trajectories[file] += 1
                count.transitions[file] += len(trajectory)
                bar.update(work, note=f"{count.trajectories.total()} trajectories")
                yield trajectory


def _check_id(where: str, trajectory: Trajectory, seen: dict[str, tuple[str, int]]) -> None:
    """Refuse two different records under one id, which would silently cost one of them."""
    fingerprint = hash(encode_trajectory(trajectory))
    before, other = seen.setdefault(trajectory.id, (where, fingerprint))
    if other != fingerprint:
        raise DataError(
            f"{where}: expected an id of its own, got {trajectory.id!r}, which {before} has already"
        )


def _show(count: _Count, new: int, out: Path, *, as_json: bool) -> None:
    found = count.trajectories.total()
    result: dict[str, Any] = {
        "out": str(out),
        "new": new,
        "already_there": found - new,
        "bad": count.bad.total(),
        "files": [
            {
                "file": str(file),
                "format": name,
                "trajectories": count.trajectories[file],
                "transitions": count.transitions[file],
                "bad": count.bad[file],
            }
            for file, name in count.formats.items()
        ],
        "problems": count.problems[:SHOWN_PROBLEMS],
    }
    table = console.table(
        f"{new} new in {out}, {found - new} already there",
        "file",
        "format",
        "trajectories",
        "transitions",
        "bad",
        rows=[list(row.values()) for row in result["files"]],
    )
    console.show(result, table, as_json=as_json)
