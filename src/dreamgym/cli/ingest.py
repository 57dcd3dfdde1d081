"""`dreamgym ingest`: convert traces of other formats into trajectories."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, cast, get_args

import typer

from dreamgym.cli import console
from dreamgym.cli.options import Json
from dreamgym.config import nearest_name
from dreamgym.data.ingest import Defaults, detect, find_format
from dreamgym.data.ingest.dialogue import NoReward
from dreamgym.data.trajectories import TrajectoryWriter, encode_trajectory
from dreamgym.errors import ConfigError, DataError
from dreamgym.types import Trajectory

SHOWN_PROBLEMS = 20


@dataclass(slots=True)
class _Count:
    """Records so far, by file."""

    formats: dict[Path, str] = field(default_factory=dict)
    trajectories: Counter[Path] = field(default_factory=Counter)
    transitions: Counter[Path] = field(default_factory=Counter)
    successes: Counter[Path] = field(default_factory=Counter)
    without_reward: Counter[Path] = field(default_factory=Counter)
    bad: Counter[Path] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)


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
        str | None,
        typer.Option("--env", help="Name of their environment.", show_default=False),
    ] = None,
    split: Annotated[str, typer.Option(help="Split their tasks belong to.")] = "train",
    no_reward: Annotated[
        str,
        typer.Option(
            help="Records without a reward: keep (marked as unknown), or store as fail or success, or skip."
        ),
    ] = "keep",
    skip_bad: Annotated[
        bool, typer.Option("--skip-bad", help="Count bad records instead of stopping.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Convert chat messages, ATIF or OpenTelemetry GenAI spans into trajectories.

    All or nothing: the first bad record ends the command with its file and
    line, exit code 3, and nothing is stored. With --skip-bad the good ones are
    stored and the bad ones counted. A record that is there already (same id, or
    same content where it has no id) is not stored again.

    Examples:

    - dreamgym ingest chats.jsonl --env shop --out shop
    - dreamgym ingest runs/*.json --format atif --env sh --out sh
    - dreamgym ingest spans.jsonl.gz --env web --out web --skip-bad
    """
    count = _Count()
    for file in files:
        chosen = detect(file) if format == "auto" else find_format(format)
        count.formats[file] = chosen.name
    defaults = Defaults(environment=environment, split=split, no_reward=_no_reward(no_reward))
    with TrajectoryWriter(out) as writer:
        new = writer.add_shard(_read(files, defaults, count, skip_bad=skip_bad))
    for problem in count.problems[:SHOWN_PROBLEMS]:
        console.err.print(problem, markup=False, soft_wrap=True)
    if len(count.problems) > SHOWN_PROBLEMS:
        console.err.print(f"… and {len(count.problems) - SHOWN_PROBLEMS} more")
    if missing := count.without_reward.total():
        records = missing + count.trajectories.total() if no_reward == "skip" else count.trajectories.total()
        stored = "skipped" if no_reward == "skip" else "stored with reward 0, no success, source unknown"
        console.err.print(
            f"no reward found in {missing} of {records} records: {stored}. "
            "--no-reward fail, success or skip stores them otherwise",
            soft_wrap=True,
        )
    _show(count, new, out, as_json=as_json)


def _no_reward(name: str) -> NoReward:
    known = get_args(NoReward)
    if name not in known:
        raise ConfigError(f"unknown --no-reward {name!r}{nearest_name(name, known)}")
    return cast(NoReward, name)


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
                if not trajectory.graded:
                    count.without_reward[file] += 1
                    if defaults.no_reward == "skip":
                        continue
                count.trajectories[file] += 1
                count.successes[file] += trajectory.success
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
                "successes": count.successes[file],
                "no_reward": count.without_reward[file],
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
        "successes",
        "no reward",
        "bad",
        rows=[list(row.values()) for row in result["files"]],
    )
    console.show(result, table, as_json=as_json)
