"""The start of a synthetic episode: task, world sheet and first state of a real or a recorded episode."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from dreamgym.config import nearest_name
from dreamgym.errors import ConfigError
from dreamgym.experience.hindsight import with_sheet
from dreamgym.protocols import EnvironmentFactory, find_world_sheet
from dreamgym.types import State, Task, Trajectory, WorldSheet


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeStart:
    """What is known of an episode before its first action."""

    task: Task
    sheet: WorldSheet
    first: State


async def real_start(factory: EnvironmentFactory, task: Task, *, seed: int = 0) -> EpisodeStart:
    """The start of a task in the real environment.

    Raises:
        ConfigError: the environment does not disclose its hidden facts.
    """
    environment = factory.make(task, seed=seed)
    try:
        disclosing = find_world_sheet(environment)
        if disclosing is None:
            raise ConfigError(
                f"environment {factory.name!r} does not disclose its hidden facts: "
                "give trajectories that hold them (--trajectories)"
            )
        first = await environment.start()
        return EpisodeStart(task=task, sheet=await disclosing.world_sheet(), first=first)
    finally:
        await environment.aclose()


def recorded_start(
    trajectories: Iterable[Trajectory], environment: str, *, split: str | None, wanted: str
) -> EpisodeStart:
    """The start of a recorded task, by its position among the tasks of these trajectories or by its id.

    A trajectory without a world sheet gets the one that its later states prove, as in fine-tuning.
    """
    found: dict[str, EpisodeStart] = {}
    for each in trajectories:
        matches = each.task.environment == environment and split in (None, each.task.split)
        if matches and each.task.id not in found:
            sheet = with_sheet(each).sheet or WorldSheet(facts=())
            found[each.task.id] = EpisodeStart(task=each.task, sheet=sheet, first=each.start)
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
