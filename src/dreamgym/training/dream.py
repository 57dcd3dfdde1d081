"""Starts of imagined episodes, taken from recorded ones."""

from __future__ import annotations

from collections.abc import Iterable
from random import Random

from dreamgym.envs.synthetic import EpisodeStart
from dreamgym.experience.hindsight import hindsight_sheet
from dreamgym.experience.sheet_sampler import CanSucceed, Worlds
from dreamgym.types import State, Task, Trajectory

_CACHED = 4096
"""Recombined starts kept for the other members of their rollout group."""


class RecordedStarts:
    """The starts of recorded tasks, as recorded or with their objects placed anew. A `StartFor`."""

    def __init__(self, trajectories: Iterable[Trajectory], *, recombine: CanSucceed | None = None) -> None:
        """
        Args:
            recombine: if given, objects are placed anew such that this returns true for the task.
        """
        self._recorded: dict[str, tuple[Task, EpisodeStart]] = {}
        for each in trajectories:
            if each.task.id not in self._recorded:
                # Experience models do not predict admissible actions, so the first state has none either.
                start = EpisodeStart(
                    sheet=each.sheet or hindsight_sheet(each), state=State(text=each.start.text)
                )
                self._recorded[each.task.id] = (each.task, start)
        self._recombine = recombine
        self._recombined: dict[tuple[str, int], EpisodeStart] = {}
        self._sampler = Worlds(start.sheet for _, start in self._recorded.values()) if recombine else None

    @property
    def tasks(self) -> list[Task]:
        return [task for task, _ in self._recorded.values()]

    def __call__(self, task: Task, seed: int) -> EpisodeStart | None:
        """The same task and seed give the same start."""
        _, recorded = self._recorded.get(task.id, (None, None))
        if recorded is None or self._sampler is None or self._recombine is None:
            return recorded
        if (task.id, seed) not in self._recombined:
            if len(self._recombined) >= _CACHED:
                self._recombined.clear()
            sheet = self._sampler.draw(task, Random(f"{task.id}/{seed}"), self._recombine)
            # The recorded first state does not fit other facts: the experience model imagines one.
            self._recombined[task.id, seed] = recorded if sheet is None else EpisodeStart(sheet=sheet)
        return self._recombined[task.id, seed]
