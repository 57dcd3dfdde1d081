"""`dreamgym report`: the results of runs as a table and one self-contained page."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape
from rich.table import Table

from dreamgym.cli import console
from dreamgym.cli.options import Json
from dreamgym.data.datasets import dataset_path
from dreamgym.files import atomic_write
from dreamgym.printable import printable
from dreamgym.report.episodes import recorded
from dreamgym.report.page import page
from dreamgym.report.run_reader import Run, find_runs, read_run
from dreamgym.report.safe_reading import Problems
from dreamgym.report.tables import Sheet, as_json, cost_sheet, evaluation_sheet, overview, turned
from dreamgym.report.usage import usage_sheet
from dreamgym.types import Trajectory

_ABREAST = 4
"""Runs per table in a terminal."""


def report_command(
    runs: Annotated[
        list[Path], typer.Argument(metavar="RUN…", help="Run directories, or directories of runs.")
    ],
    out: Annotated[Path, typer.Option(help="File of the page.")] = Path("report.html"),
    trajectories: Annotated[
        list[str] | None,
        typer.Option(
            metavar="PATH",
            help="Recorded trajectories (a path or builtin:alfworld); those of the runs' tasks are shown "
            "next to the synthetic ones. May be repeated.",
        ),
    ] = None,
    episodes: Annotated[int, typer.Option(help="Most episodes per run in the viewer.", min=0)] = 200,
    as_json_document: Json = False,
) -> None:
    """Print the results of runs as a table, and write one HTML file with all details.

    The page has learning curves in the dream and the real environment, reward entropy, the task pool,
    fidelity and drift, usage, and a viewer that compares synthetic and real episodes. It needs no network and
    no server. Runs are only read, also while they are running.

    Examples:

    - dreamgym report runs/agent
    - dreamgym report runs/agent runs/experience --out report.html --trajectories builtin:alfworld
    - dreamgym report runs --json
    """
    found, recorded_episodes, problems = write_report(runs, out, trajectories or (), episodes)
    unread = problems.count + sum(run.problems.count for run in found)
    result = {
        "report": str(out),
        "runs": as_json(found),
        "recorded": len(recorded_episodes),
        "problems": unread,
    }
    sides = [turned(overview(found[start : start + _ABREAST])) for start in range(0, len(found), _ABREAST)]
    sheets = [*sides, evaluation_sheet(found), cost_sheet(found), usage_sheet(found)]
    console.show(result, [_table(sheet) for sheet in sheets if sheet.rows], as_json=as_json_document)
    if unread:
        console.say(f"{unread} problems while reading; the page lists them")
    if not as_json_document:
        console.say(f"report: {out}")


def write_report(
    runs: Sequence[Path], out: Path, trajectories: Sequence[str], episodes: int
) -> tuple[list[Run], list[Trajectory], Problems]:
    """Write the page; returns the runs, the recorded episodes, and the problems while reading those."""
    found = [read_run(name, path, episodes=episodes) for name, path in find_runs(runs)]
    tasks = {each.task.id for run in found for each in run.kept.episodes}
    problems = Problems()
    recorded_episodes = recorded([dataset_path(each) for each in trajectories], tasks, episodes, problems)
    with atomic_write(out) as file:
        file.write_text(page(found, recorded_episodes), encoding="utf-8")
    return found, recorded_episodes, problems


def _table(sheet: Sheet) -> Table:
    columns = [escape(printable(column)) for column in sheet.columns]  # names of runs are among them
    return console.table(sheet.title, *columns, rows=sheet.rows)
