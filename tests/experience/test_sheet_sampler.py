"""Recombined sheets are new, and place objects only where their room had such objects."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from random import Random

import pytest

from dreamgym.data.datasets import builtin_dataset
from dreamgym.data.trajectories import read_trajectories
from dreamgym.envs.alfworld.goals import can_succeed, goal_met
from dreamgym.experience.world_sheet import INSIDE, SheetSampler, layout_of
from dreamgym.types import Trajectory, WorldSheet


@pytest.fixture(scope="module")
def recorded() -> Sequence[Trajectory]:
    return list(islice(read_trajectories(builtin_dataset()), 240))


def sheets_of(recorded: Sequence[Trajectory]) -> list[WorldSheet]:
    return [each.sheet for each in recorded if each.sheet is not None]


def by_room(sheets: Sequence[WorldSheet]) -> dict[object, list[WorldSheet]]:
    rooms: dict[object, list[WorldSheet]] = {}
    for sheet in sheets:
        rooms.setdefault(layout_of(sheet), []).append(sheet)
    return rooms


def lying(sheet: WorldSheet) -> dict[str, str]:
    return {fact[1]: fact[2] for fact in sheet.facts if fact[0] == "inreceptacle"}


def test_sheets_of_one_room_have_one_layout(recorded: Sequence[Trajectory]) -> None:
    rooms: dict[object, set[object]] = {}
    for each in recorded:
        assert each.sheet is not None
        rooms.setdefault(each.task.parameters["room"], set()).add(layout_of(each.sheet))
    assert all(len(found) == 1 for found in rooms.values())
    assert len(set().union(*rooms.values())) == len(rooms)


def test_a_recombined_sheet_keeps_its_layout_its_objects_and_their_kinds_of_places(
    recorded: Sequence[Trajectory],
) -> None:
    sheets = sheets_of(recorded)
    sampler, rooms = SheetSampler(sheets), by_room(sheets)
    new = 0
    for seed in range(40):
        made = sampler.recombine(Random(seed))
        same_room = rooms[layout_of(made)]
        base = next(sheet for sheet in same_room if lying(sheet).keys() == lying(made).keys())
        assert [f for f in made.facts if f[0] != "inreceptacle"] == [
            f for f in base.facts if f[0] != "inreceptacle"
        ]
        assert list(made.facts) == sorted(made.facts)
        held = {(thing.split()[0], place) for sheet in same_room for thing, place in lying(sheet).items()}
        assert all((thing.split()[0], place) in held for thing, place in lying(made).items())
        new += made not in sheets
    assert new > 20


def test_the_same_seed_gives_the_same_sheet_and_share_zero_a_known_one(
    recorded: Sequence[Trajectory],
) -> None:
    sheets = sheets_of(recorded)
    sampler = SheetSampler(sheets)
    assert sampler.recombine(Random(7)) == sampler.recombine(Random(7))
    assert sampler.recombine(Random(7), share=0.0) in sheets
    with pytest.raises(ValueError, match="at least one sheet"):
        SheetSampler([])


def test_objects_never_contain_each_other() -> None:
    sheet = WorldSheet(
        facts=(
            (INSIDE, "box 1", "box 2"),
            (INSIDE, "box 2", "shelf 1"),
            (INSIDE, "pen 1", "box 1"),
        )
    )
    for seed in range(50):
        made = SheetSampler([sheet]).recombine(Random(seed), share=1.0)
        assert (INSIDE, "box 2", "shelf 1") in made.facts
        assert made.facts[0][2] == "shelf 1"
        assert (INSIDE, "pen 1", "box 1") in made.facts


def test_the_task_can_succeed_on_a_sampled_sheet(recorded: Sequence[Trajectory]) -> None:
    sampler = SheetSampler(sheets_of(recorded))
    for number, each in enumerate(recorded[:30]):
        sheet = sampler.sample(each.task, Random(number), can_succeed)
        assert sheet is not None
        assert can_succeed(each.task, sheet)
        assert not goal_met(each.task, sheet)


def test_a_task_that_cannot_succeed_gets_no_sheet(recorded: Sequence[Trajectory]) -> None:
    def never(task: object, sheet: WorldSheet) -> bool:
        return False

    assert SheetSampler(sheets_of(recorded)[:3]).sample(recorded[0].task, Random(0), never) is None
