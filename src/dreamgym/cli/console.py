"""What every command shares: where output goes, how errors end, progress and tables.

Results go to standard output (a table, or one JSON document with `--json`); progress and messages go to
standard error, so a pipe never sees them.
"""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, TypeVar

import typer
from pydantic import BaseModel
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table
from rich.text import Text

from dreamgym.config import config_json
from dreamgym.errors import DreamGymError

out = Console()
err = Console(stderr=True)

INTERRUPTED = 130

P = ParamSpec("P")
R = TypeVar("R")


def command(function: Callable[P, R]) -> Callable[P, R]:
    """End a command as promised: typed errors in one line with their exit code, Ctrl-C cleanly with 130."""

    @functools.wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return function(*args, **kwargs)
        except DreamGymError as error:
            err.print(
                Text("error: ", style="bold red").append_text(visible(str(error), "not bold default")),
                soft_wrap=True,
            )
            raise typer.Exit(error.exit_code) from None
        except KeyboardInterrupt:
            err.print("interrupted; what was acknowledged is on disk, run the same command again to go on")
            raise typer.Exit(INTERRUPTED) from None
        except BrokenPipeError:
            sys.stderr.close()  # the reader of our pipe has left: nothing to say to anyone
            raise typer.Exit(0) from None

    return run


def progress(**settings: Any) -> Progress:
    """A bar with counts, time spent and an estimate of what is left; silent when nobody watches."""
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
        TextColumn("{task.fields[note]}"),
        console=err,
        disable=not err.is_terminal,
        **settings,
    )


def show(result: Any, table: Table | Sequence[Table], *, as_json: bool) -> None:
    """Print a result for a person (tables) or for a program (one JSON document)."""
    if as_json:
        sys.stdout.write(json.dumps(result, indent=2, default=str) + "\n")
        return
    for each in [table] if isinstance(table, Table) else table:
        out.print(each)


def table(title: str, *columns: str, rows: Sequence[Sequence[object]] = ()) -> Table:
    made = Table(title=title, title_justify="left", header_style="bold")
    for column in columns:
        made.add_column(column)
    for row in rows:
        made.add_row(*(visible(str(cell)) for cell in row))
    return made


def visible(text: str, style: str = "") -> Text:
    """Text from outside as it is: not read as markup, and unable to steer the terminal."""
    shown = "".join(
        letter if letter.isprintable() or letter in "\n\t" else f"\\x{ord(letter):02x}" for letter in text
    )
    return Text(shown, style=style)


def show_config(config: BaseModel) -> None:
    """What `--dry-run` prints: every setting with its final value."""
    sys.stdout.write(config_json(config) + "\n")
