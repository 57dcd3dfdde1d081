"""The `dreamgym` command line: one file per noun, put together here."""

from __future__ import annotations

import signal
from importlib.metadata import version
from typing import Annotated

import typer

from dreamgym.cli import console
from dreamgym.cli.bench import bench_command
from dreamgym.cli.buffer import app as buffer_app
from dreamgym.cli.collect import collect_command
from dreamgym.cli.data import app as data_app
from dreamgym.cli.envs import app as envs_app
from dreamgym.cli.evaluate import evaluate_command
from dreamgym.cli.experience import app as experience_app
from dreamgym.cli.ingest import ingest
from dreamgym.cli.learn import learn_command, quickstart
from dreamgym.cli.models import app as models_app
from dreamgym.cli.play import play_command
from dreamgym.cli.report import report_command
from dreamgym.cli.serve import serve_command
from dreamgym.cli.tasks import app as tasks_app
from dreamgym.cli.track import track_command
from dreamgym.cli.train import train_command

app = console.group(
    name="dreamgym",
    invoke_without_command=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="""Train LLM agents inside a reasoning experience model instead of the real environment.

**A first tour**

    dreamgym quickstart                                   # the whole loop in about 10 minutes
    dreamgym learn --env FILE.py:CLASS                    # the same with your environment
    dreamgym envs list                                    # real environments
    dreamgym play --env alfworld                          # play one yourself
    dreamgym collect --env alfworld --episodes 50 --out trajectories
    dreamgym data stats trajectories
    dreamgym buffer build trajectories --store replay.sqlite
    dreamgym buffer search replay.sqlite --state "On the desk 1, you see a mug 2." --action "take mug 2"
    dreamgym experience train --data trajectories --out runs/experience
    dreamgym train --experience runs/experience --out runs/agent     # no real step is taken
    dreamgym evaluate runs/agent --against runs/agent@0              # in the real environment
    dreamgym bench textworld runs/agent                              # a fixed panel of tasks, with its hash
    dreamgym report runs/agent                                       # curves and episodes in one HTML file
    dreamgym serve runs/experience                                   # the dream, for other trainers
    dreamgym models check endpoint:NAME                              # capabilities of your server

Every command has `--help` with examples and prints JSON with `--json` (all but `play`). Ctrl-C saves what
was done; the same command resumes.

**Exit codes**: 0 done · 1 failed, or a check did not pass · 2 wrong usage or setting · 3 bad data ·
4 a missing extra · 5 a store cannot be opened or written · 6 an episode failed · 7 an endpoint failed ·
8 the budget is spent · 130 interrupted.
""",
)
console.command(app, "quickstart")(quickstart)
console.command(app, "learn")(learn_command)
console.command(app, "collect")(collect_command)
console.command(app, "ingest")(ingest)
console.command(app, "play")(play_command)
console.command(app, "train")(train_command)
console.command(app, "evaluate")(evaluate_command)
console.command(app, "bench")(bench_command)
console.command(app, "report")(report_command)
console.command(app, "serve")(serve_command)
console.command(app, "track")(track_command)
app.add_typer(envs_app, name="envs")
app.add_typer(data_app, name="data")
app.add_typer(buffer_app, name="buffer")
app.add_typer(experience_app, name="experience")
app.add_typer(tasks_app, name="tasks")
app.add_typer(models_app, name="models")


@app.callback()
def _main(
    show_version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
) -> None:
    if show_version:
        typer.echo(f"dreamgym {version('dreamgym')}")
        raise typer.Exit


def _stop(*_: object) -> None:
    """A scheduler's SIGTERM is handled like Ctrl-C: save, and print how to resume."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # in the background of a shell
        raise KeyboardInterrupt
    signal.raise_signal(signal.SIGINT)


def main() -> None:
    signal.signal(signal.SIGTERM, _stop)
    app()
