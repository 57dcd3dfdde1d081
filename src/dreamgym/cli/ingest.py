"""`dreamgym ingest`: convert traces of other formats into trajectories."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, cast, get_args

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
    """Records of one file so far."""

    file: Path
    format: str
    trajectories: int = 0
    transitions: int = 0
    successes: int = 0
    no_reward: int = 0
    bad: int = 0


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
    counts = [
        _Count(file, (detect(file) if format == "auto" else find_format(format)).name) for file in files
    ]
    problems: list[str] = []
    defaults = Defaults(environment=environment, split=split, no_reward=_no_reward(no_reward))
    with TrajectoryWriter(out) as writer:
        new = writer.add_shard(_read(counts, defaults, problems if skip_bad else None))
    for problem in problems[:SHOWN_PROBLEMS]:
        console.err.print(problem, markup=False, soft_wrap=True)
    if len(problems) > SHOWN_PROBLEMS:
        console.err.print(f"… and {len(problems) - SHOWN_PROBLEMS} more")
    found = sum(each.trajectories for each in counts)
    if missing := sum(each.no_reward for each in counts):
        skipped = no_reward == "skip"
        stored = "skipped" if skipped else "stored as unknown, neither a success nor a failure"
        console.say(
            f"no reward found in {missing} of {found + missing * skipped} records: {stored}. "
            "--no-reward fail, success or skip stores them otherwise"
        )
    rows = [asdict(each) for each in counts]
    result = {"out": str(out), "new": new, "already_there": found - new, "bad": len(problems)}
    table = console.table(
        f"{new} new in {out}, {found - new} already there",
        *console.headings(rows[0]),
        rows=[list(row.values()) for row in rows],
    )
    console.show(result | {"files": rows, "problems": problems[:SHOWN_PROBLEMS]}, table, as_json=as_json)


def _no_reward(name: str) -> NoReward:
    known = get_args(NoReward)
    if name not in known:
        raise ConfigError(f"unknown --no-reward {name!r}{nearest_name(name, known)}")
    return cast(NoReward, name)


def _read(counts: list[_Count], defaults: Defaults, problems: list[str] | None) -> Iterator[Trajectory]:
    """The trajectories of all files; bad records are added to `problems`, or raise where that is None."""
    seen: dict[str, tuple[str, int]] = {}
    with console.progress() as bar:
        work = bar.add_task("reading", total=sum(each.file.stat().st_size for each in counts), note="")
        for count in counts:

            def on_bad(problem: DataError, count: _Count = count) -> None:
                if problems is None:
                    raise problem
                count.bad += 1
                problems.append(str(problem))

            read = find_format(count.format).read
            places = read(count.file, defaults, on_bad, lambda step: bar.advance(work, step))
            for where, trajectory in places:
                if (clash := _clash(where, trajectory, seen)) is not None:
                    on_bad(clash)
                    continue
                if not trajectory.graded:
                    count.no_reward += 1
                    if defaults.no_reward == "skip":
                        continue
                count.trajectories += 1
                count.successes += trajectory.success
                count.transitions += len(trajectory)
                bar.update(work, note=f"{sum(each.trajectories for each in counts)} trajectories")
                yield trajectory


def _clash(where: str, trajectory: Trajectory, seen: dict[str, tuple[str, int]]) -> DataError | None:
    """Two different records under one id, which would silently cost one of them."""
    fingerprint = hash(encode_trajectory(trajectory))
    before, other = seen.setdefault(trajectory.id, (where, fingerprint))
    if other == fingerprint:
        return None
    return DataError(f"{where}: expected an id of its own, got {trajectory.id!r}, which {before} has already")
