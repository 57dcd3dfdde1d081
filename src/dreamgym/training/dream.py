"""Starts of imagined episodes, taken from recorded or real ones."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import replace
from random import Random

from dreamgym.config import nearest_name
from dreamgym.envs.synthetic import EpisodeStart
from dreamgym.errors import ConfigError
from dreamgym.experience.known_replies import task_sheets, with_seed
from dreamgym.experience.world_sheet import SheetSampler, TaskCheck, hindsight_sheet, with_sheet
from dreamgym.protocols import EnvironmentFactory, find_world_sheet
from dreamgym.types import State, Task, Trajectory, WorldSheet

_CACHED = 4096
"""Recombined starts kept for the other members of their rollout group."""


class RecordedStarts:
    """The starts of recorded tasks, as recorded or with their objects placed anew. A `StartFor`."""

    def __init__(
        self,
        trajectories: Iterable[Trajectory],
        *,
        recombine: TaskCheck | None = None,
        known_replies: bool = False,
        imagined: float = 0.0,
    ) -> None:
        """With `recombine`, objects are placed anew such that it returns true for the task. With
        `known_replies`, a sheet holds the replies that any recording of the task knows, except for the share
        `imagined` of the starts, which know none."""
        trajectories = list(trajectories)
        sheets = task_sheets(trajectories) if known_replies else {}
        self._recorded: dict[str, tuple[Task, EpisodeStart]] = {}
        for each in trajectories:
            if each.task.id not in self._recorded:
                # Experience models do not predict admissible actions, so the first state has none either.
                sheet = sheets.get(each.task.id) or each.sheet or hindsight_sheet(each)
                start = EpisodeStart(sheet=sheet, state=State(text=each.start.text))
                self._recorded[each.task.id] = (each.task, start)
        self._known_replies = known_replies
        self._imagined = imagined
        self._recombine = recombine
        self._recombined: dict[tuple[str, int], EpisodeStart] = {}
        self._sampler = (
            SheetSampler(start.sheet for _, start in self._recorded.values()) if recombine else None
        )

    @property
    def tasks(self) -> list[Task]:
        return [task for task, _ in self._recorded.values()]

    def __call__(self, task: Task, seed: int) -> EpisodeStart | None:
        """The same task and seed give the same start."""
        _, recorded = self._recorded.get(task.id, (None, None))
        if recorded is not None and self._known_replies:
            forgets = Random(f"imagined/{task.id}/{seed}").random() < self._imagined
            known = WorldSheet(facts=()) if forgets else recorded.sheet
            return replace(recorded, sheet=with_seed(known, seed))
        if recorded is None or self._sampler is None or self._recombine is None:
            return recorded
        if (task.id, seed) not in self._recombined:
            if len(self._recombined) >= _CACHED:
                self._recombined.clear()
            sheet = self._sampler.sample(task, Random(f"{task.id}/{seed}"), self._recombine)
            # The recorded first state does not fit other facts: the experience model imagines one.
            self._recombined[task.id, seed] = recorded if sheet is None else EpisodeStart(sheet=sheet)
        return self._recombined[task.id, seed]


async def real_start(factory: EnvironmentFactory, task: Task, *, seed: int = 0) -> EpisodeStart:
    """The start of a task in the real environment."""
    environment = factory.make(task, seed=seed)
    try:
        disclosing = find_world_sheet(environment)
        if disclosing is None:
            raise ConfigError(
                f"environment {factory.name!r} does not disclose its hidden facts: "
                "give trajectories that hold them (--trajectories)"
            )
        first = await environment.start()
        return EpisodeStart(sheet=await disclosing.world_sheet(), state=first)
    finally:
        await environment.aclose()


def recorded_start(
    trajectories: Iterable[Trajectory], environment: str, *, split: str | None, wanted: str
) -> tuple[Task, EpisodeStart]:
    """A recorded task and its start, by its position among the tasks of these trajectories or by its id."""
    found: dict[str, tuple[Task, EpisodeStart]] = {}
    for each in trajectories:
        matches = each.task.environment == environment and split in (None, each.task.split)
        if matches and each.task.id not in found:
            sheet = with_sheet(each).sheet or WorldSheet(facts=())
            found[each.task.id] = (each.task, EpisodeStart(sheet=sheet, state=each.start))
    where = f"environment {environment!r}" + (f", split {split!r}" if split else "")
    if not found:
        raise ConfigError(f"the trajectories hold no task of {where}")
    if wanted in found:
        return found[wanted]
    if not re.fullmatch(r"[0-9]{1,9}", wanted):
        raise ConfigError(f"no task {wanted!r} of {where}{nearest_name(wanted, list(found)[:64])}")
    if int(wanted) >= len(found):
        raise ConfigError(f"the trajectories hold {len(found)} tasks of {where}, asked for number {wanted}")
    return list(found.values())[int(wanted)]
