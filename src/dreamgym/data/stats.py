"""Counts what a set of trajectories holds: episodes, success, steps, by family, policy and source."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from dreamgym.data.trajectories import read_trajectories, shards
from dreamgym.files import OnRead
from dreamgym.types import Trajectory


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


def _tallies() -> dict[str, Tally]:
    return defaultdict(Tally)


@dataclass(slots=True, kw_only=True)
class DatasetStats:
    """Counts of all episodes, and of each kind of them."""

    bytes: int
    """Size of the files on disk."""
    shards: int
    total: Tally = field(default_factory=Tally)
    environments: dict[str, Tally] = field(default_factory=_tallies)
    families: dict[str, Tally] = field(default_factory=_tallies)
    policies: dict[str, Tally] = field(default_factory=_tallies)
    sources: dict[str, Tally] = field(default_factory=_tallies)

    @property
    def kinds(self) -> Mapping[str, Mapping[str, Tally]]:
        return {
            "environment": self.environments,
            "family": self.families,
            "policy": self.policies,
            "source": self.sources,
        }


def stats(path: Path, *, on_read: OnRead | None = None) -> DatasetStats:
    """Read every trajectory at `path` once and count. Raises what `read_trajectories` raises."""
    files = shards(path)
    counted = DatasetStats(bytes=sum(file.stat().st_size for file in files), shards=len(files))
    for trajectory in read_trajectories(path, on_read=on_read):
        for tally in (
            counted.total,
            counted.environments[trajectory.task.environment],
            counted.families[trajectory.task.family],
            counted.policies[trajectory.provenance.policy],
            counted.sources[trajectory.provenance.source],
        ):
            tally.count(trajectory)
    return counted
