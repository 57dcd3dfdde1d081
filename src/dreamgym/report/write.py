"""Writes the page of some runs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from dreamgym.data.datasets import dataset_path
from dreamgym.files import atomic_write
from dreamgym.report.episodes import recorded
from dreamgym.report.page import page
from dreamgym.report.run_reader import Run, find_runs, read_run
from dreamgym.report.safe_reading import Problems
from dreamgym.types import Trajectory


def read_report(
    runs: Sequence[Path], trajectories: Sequence[str], episodes: int
) -> tuple[list[Run], list[Trajectory], Problems]:
    """The runs, recorded episodes of their tasks, and the problems while reading those."""
    found = [read_run(name, path, episodes=episodes) for name, path in find_runs(runs)]
    tasks = {each.task.id for run in found for each in run.kept.episodes}
    problems = Problems()
    return found, recorded([dataset_path(each) for each in trajectories], tasks, episodes, problems), problems


def write_report(
    runs: Sequence[Path], out: Path, trajectories: Sequence[str], episodes: int
) -> tuple[list[Run], list[Trajectory], Problems]:
    """Write the page; returns what `read_report` found."""
    found, recorded_episodes, problems = read_report(runs, trajectories, episodes)
    with atomic_write(out) as file:
        file.write_text(page(found, recorded_episodes), encoding="utf-8")
    return found, recorded_episodes, problems
