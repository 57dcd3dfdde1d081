"""Counts what a set of trajectories holds: episodes, success, steps, by family, policy and source."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path

from dreamgym.data.trajectories import read_trajectories, shards
from dreamgym.files import OnRead
from dreamgym.types import Trajectory

KINDS = ("environment", "family", "policy", "source")


@dataclass(slots=True, kw_only=True)
class Tally:
    """Counts of some episodes."""

    episodes: int = 0
    graded: int = 0
    """Episodes whose success is known."""
    successes: int = 0
    transitions: int = 0

    def count(self, trajectory: Trajectory) -> None:
        self.episodes += 1
        self.graded += trajectory.graded
        self.successes += trajectory.success
        self.transitions += len(trajectory)

    @property
    def success_rate(self) -> float:
        return self.successes / self.graded if self.graded else 0.0

    @property
    def mean_steps(self) -> float:
        return self.transitions / self.episodes if self.episodes else 0.0


@dataclass(slots=True, kw_only=True)
class DatasetStats:
    """Counts of all episodes, and of each kind of them."""

    bytes: int
    """Size of the files on disk."""
    shards: int
    total: Tally = field(default_factory=Tally)
    kinds: dict[str, dict[str, Tally]] = field(
        default_factory=lambda: {kind: defaultdict(Tally) for kind in KINDS}
    )
    """By kind, then by name."""


def stats(path: Path, *, on_read: OnRead | None = None) -> DatasetStats:
    """Read every trajectory at `path` once and count. Raises what `read_trajectories` raises."""
    files = shards(path)
    counted = DatasetStats(bytes=sum(file.stat().st_size for file in files), shards=len(files))
    for trajectory in read_trajectories(path, on_read=on_read):
        counted.total.count(trajectory)
        for kind, tallies in counted.kinds.items():
            of_task = kind in ("environment", "family")
            tallies[getattr(trajectory.task if of_task else trajectory.provenance, kind)].count(trajectory)
    return counted
