"""Shared by every command: output streams, error handling, progress and tables.

Results go to standard output (a table, or one JSON document with `--json`); progress and messages go to
standard error, so a pipe never receives them.
"""

from __future__ import annotations

import functools
import json
import shlex
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import typer
from pydantic import BaseModel
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table
from rich.text import Text
from typer.core import TyperCommand, TyperGroup

from dreamgym.config import config_json
from dreamgym.errors import DreamGymError, StoreError
from dreamgym.printable import printable

out = Console()
err = Console(stderr=True)

INTERRUPTED = 130
LINE_EVERY = 10.0
"""Seconds between lines of progress where standard error is no terminal."""

P = ParamSpec("P")
R = TypeVar("R")


class _Plain:
    """Help that shows no type next to a flag."""

    def get_params(self, ctx: Any) -> list[Any]:
        found: list[Any] = super().get_params(ctx)  # type: ignore[misc]
        for each in found:
            if getattr(each, "is_flag", False):
                each.metavar = ""
        return found


class Command(_Plain, TyperCommand): ...


class Group(_Plain, TyperGroup): ...


def group(**settings: Any) -> typer.Typer:
    """An empty group of commands."""
    return typer.Typer(no_args_is_help=True, cls=Group, rich_markup_mode="markdown", **settings)


def command(app: typer.Typer, name: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Adds a function to a group of commands."""

    def add(function: Callable[P, R]) -> Callable[P, R]:
        return app.command(name, cls=Command)(with_exit_codes(function))

    return add


def with_exit_codes(function: Callable[P, R]) -> Callable[P, R]:
    """Typed errors in one line with their exit code; after Ctrl-C the command that resumes, and 130."""

    @functools.wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return function(*args, **kwargs)
        except DreamGymError as error:
            fail(str(error))
            raise typer.Exit(error.exit_code) from None
        except KeyboardInterrupt:
            say(f"interrupted; what was done so far is saved. Resume with: {this_command()}")
            raise typer.Exit(INTERRUPTED) from None
        except BrokenPipeError:
            sys.stderr.close()  # the reader of the pipe has gone
            raise typer.Exit(0) from None
        except OSError as error:
            where = "" if error.filename is None else f"{error.filename}: "
            fail(f"{where}{(error.strerror or str(error)).lower()}")
            raise typer.Exit(StoreError.exit_code) from None

    return run


def this_command() -> str:
    """The command line of this process, to be typed again."""
    program = Path(sys.argv[0]).name
    return shlex.join(["dreamgym" if program == "__main__.py" else program, *sys.argv[1:]])


def fail(text: str) -> None:
    err.print(
        Text("error: ", style="bold red").append_text(visible(text, "not bold default")), soft_wrap=True
    )


def say(text: str, style: str = "") -> None:
    """A message on standard error."""
    err.print(visible(text, style), soft_wrap=True)


class ProgressBar(Progress):
    """Jobs with counts, elapsed and estimated remaining time: a bar on a terminal, else a line now and then.

    >>> with ProgressBar(console=Console(stderr=True)) as bar:
    ...     job = bar.add_task("training", total=10)
    ...     bar.update(job, completed=3, note="loss 0.5")
    """

    def __init__(self, **settings: Any) -> None:
        super().__init__(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("elapsed"),
            TimeElapsedColumn(),
            TextColumn("about"),
            TimeRemainingColumn(),
            TextColumn("left"),
            TextColumn("{task.fields[note]}", markup=False),
            **settings,
        )
        self._printed = time.monotonic()

    def add_task(self, description: str, *args: Any, **fields: Any) -> TaskID:
        return super().add_task(description, *args, **{"note": "", **fields})

    def update(self, task_id: TaskID, **changes: Any) -> None:
        super().update(task_id, **changes)
        self._print_line(task_id)

    def advance(self, task_id: TaskID, advance: float = 1, *, note: str | None = None) -> None:
        super().advance(task_id, advance)
        if note is not None:
            super().update(task_id, note=note)
        self._print_line(task_id)

    def _print_line(self, task_id: TaskID) -> None:
        task, now = self._tasks[task_id], time.monotonic()
        if self.console.is_terminal or not task.visible:
            return
        if task.completed > 0:  # what was prepared before, or done before a resume, says nothing of the speed
            task.fields.setdefault("first", (task.completed, task.elapsed or 0))
        if now - self._printed < LINE_EVERY and not (task.finished and task.finished_time):
            return
        if task.fields.get("printed") == task.completed:
            return
        task.fields["printed"] = task.completed
        self._printed = now
        self.console.print(
            visible(
                progress_line(
                    task.description,
                    task.completed,
                    task.total,
                    task.elapsed or 0,
                    task.fields.get("note", ""),
                    first=task.fields.get("first", (0, 0)),
                )
            ),
            soft_wrap=True,
        )


def progress_line(
    what: str,
    done: float,
    total: float | None,
    elapsed: float,
    note: str = "",
    *,
    first: tuple[float, float] = (0, 0),
) -> str:
    """`first` is an earlier count with its elapsed time, from which the speed is measured.

    >>> progress_line("train", 12, 100, 47.2, "success 31%")
    'train 12/100, elapsed 0:00:47, about 0:05:46 left, success 31%'
    >>> progress_line("train", 12, 100, 47.2, first=(2, 42.2))
    'train 12/100, elapsed 0:00:47, about 0:00:44 left'
    >>> progress_line("train", 2, 100, 42.2, first=(2, 42.2))
    'train 2/100, elapsed 0:00:42'
    """
    count = f"{done:.0f}" if total is None else f"{done:.0f}/{total:.0f}"
    parts = [f"{what} {count}", f"elapsed {timedelta(seconds=int(elapsed))}"]
    since, waited = done - first[0], elapsed - first[1]
    if total is not None and since > 0 and done < total:
        parts.append(f"about {timedelta(seconds=int(waited * (total - done) / since))} left")
    return ", ".join([*parts, *([note] if note else [])])


def progress(**settings: Any) -> ProgressBar:
    return ProgressBar(console=err, disable=not err.is_terminal, **settings)


def show(result: Any, table: Table | Sequence[Table], *, as_json: bool) -> None:
    """Print a result as tables, or as one JSON document."""
    if as_json:
        sys.stdout.write(json.dumps(result, indent=2, default=str) + "\n")
        return
    for each in [table] if isinstance(table, Table) else table:
        out.print(each)


def show_row(title: str, result: dict[str, Any], *, as_json: bool) -> None:
    """Print a flat result as a table of one row, or as a JSON document."""
    show(result, table(title, *headings(result), rows=[list(result.values())]), as_json=as_json)


def headings(names: Iterable[str]) -> list[str]:
    """
    >>> headings(["size_bytes", "recall_at_8"])
    ['size bytes', 'recall@8']
    """
    return [name.replace("_at_", "@").replace("_", " ") for name in names]


def table(title: str, *columns: str, rows: Sequence[Sequence[object]] = ()) -> Table:
    made = Table(title=title, title_justify="left", header_style="bold")
    for column in columns:
        made.add_column(column)
    for row in rows:
        made.add_row(*(visible("-" if cell is None else str(cell)) for cell in row))
    return made


def visible(text: str, style: str = "") -> Text:
    """Untrusted text: no markup, and control characters escaped."""
    return Text(printable(text), style=style)


def show_config(config: BaseModel) -> None:
    """Print every setting with its final value (`--dry-run`)."""
    sys.stdout.write(config_json(config) + "\n")
