"""`dreamgym report`: the results of runs as a table and one self-contained page."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape
from rich.table import Table

from dreamgym.cli import console
from dreamgym.cli.options import Json
from dreamgym.printable import printable
from dreamgym.report.live import LiveReport, open_server
from dreamgym.report.tables import Sheet, as_json, cost_sheet, evaluation_sheet, overview, turned
from dreamgym.report.usage import usage_sheet
from dreamgym.report.write import write_report

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
    serve: Annotated[
        bool,
        typer.Option("--serve", help="Show the page at an address, and follow the runs while they train."),
    ] = False,
    host: Annotated[str, typer.Option(help="With --serve: the interface to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="With --serve; 0 chooses a free one.", min=0, max=65535)] = 8010,
    as_json_document: Json = False,
) -> None:
    """Print the results of runs as a table, and write one HTML file with all details.

    The page opens with real success before and after training and what it cost. It has learning curves,
    settings, the task pool, fidelity and drift, usage, and a viewer of the same actions in dream and reality
    and of the same tasks before and after. It needs no network and no server. Runs are only read, also while
    they are running; with --serve the page follows them.

    Examples:

    - dreamgym report runs/agent
    - dreamgym report --serve runs/quickstart
    - dreamgym report runs/agent runs/experience --out report.html --trajectories builtin:alfworld
    - dreamgym report runs --json
    """
    if serve:
        with open_server(LiveReport(runs, trajectories or (), episodes), host, port) as server:
            console.say(f"http://{host}:{server.server_port} follows {len(runs)} directories; Ctrl-C ends it")
            with suppress(KeyboardInterrupt):
                server.serve_forever()
        return
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


def _table(sheet: Sheet) -> Table:
    columns = [escape(printable(column)) for column in sheet.columns]  # names of runs are among them
    return console.table(sheet.title, *columns, rows=sheet.rows)
