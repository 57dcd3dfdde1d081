"""`dreamgym track` and `--track`: a run's metrics in trackio, Weights & Biases or TensorBoard."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from dreamgym.cli import console
from dreamgym.cli.options import Json
from dreamgym.errors import DataError
from dreamgym.integrations.trackers import Mirror
from dreamgym.report.run_reader import METRICS

Track = Annotated[
    str | None,
    typer.Option(
        metavar="TRACKER",
        help="Also send metrics and some episodes to trackio, wandb or tensorboard; nothing leaves this "
        "machine unless the tracker is configured so.",
    ),
]


@contextmanager
def mirrored(run: Path, tracker: str | None) -> Iterator[Mirror | None]:
    """A mirror of this run while it is under way; None without a tracker."""
    if tracker is None:
        yield None
        return
    mirror = Mirror(run, tracker, warn=lambda text: console.say(f"warning: {text}"))
    try:
        yield mirror
    finally:
        mirror.close()


def track_command(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN…", help="Run directories of `dreamgym train`.")],
    to: Annotated[str, typer.Option(metavar="TRACKER", help="trackio, wandb or tensorboard")] = "trackio",
    as_json: Json = False,
) -> None:
    """Send the metrics of runs to a tracker: those that it does not have yet.

    The same as `--track` of `train` and `learn`, afterwards or after a crash. Needs the extra of the tracker.

    Examples:

    - dreamgym track runs/agent --to tensorboard
    - dreamgym track runs/quickstart/agent runs/second/agent --to wandb
    """
    sent = {}
    for run in runs:
        if not (run / METRICS).is_file():
            raise DataError(f"{run}: expected the directory of a training run, found no {METRICS} in it")
        with mirrored(run, to) as mirror:
            assert mirror is not None
            mirror.sync()
        sent[str(run)] = mirror.rows
    rows = [(name, str(count)) for name, count in sent.items()]
    console.show(
        {"tracker": to, "rows": sent}, console.table(to, "run", "new rows", rows=rows), as_json=as_json
    )
