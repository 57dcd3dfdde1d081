"""Recombined worlds are new, and made of nothing that their room never held."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from random import Random

import pytest

from dreamgym.data.datasets import builtin_dataset
from dreamgym.data.trajectories import read_trajectories
from dreamgym.envs.alfworld.goals import can_succeed, goal_met
from dreamgym.experience.sheet_sampler import Worlds, recombine, room_of
from dreamgym.types import Trajectory, WorldSheet


@pytest.fixture(scope="module")
def recorded() -> Sequence[Trajectory]:
    return list(islice(read_trajectories(builtin_dataset()), 240))


def sheets_of(recorded: Sequence[Trajectory]) -> list[WorldSheet]:
    return [each.sheet for each in recorded if each.sheet is not None]


def by_room(sheets: Sequence[WorldSheet]) -> dict[object, list[WorldSheet]]:
    rooms: dict[object, list[WorldSheet]] = {}
    for sheet in sheets:
        rooms.setdefault(room_of(sheet), []).append(sheet)
    return rooms


def lying(sheet: WorldSheet) -> dict[str, str]:
    return {fact[1]: fact[2] for fact in sheet.facts if fact[0] == "inreceptacle"}


def test_a_room_is_told_by_what_stays_put(recorded: Sequence[Trajectory]) -> None:
    rooms: dict[object, set[object]] = {}
    for each in recorded:
        assert each.sheet is not None
        rooms.setdefault(each.task.parameters["room"], set()).add(room_of(each.sheet))
    assert all(len(found) == 1 for found in rooms.values())
    assert len(set().union(*rooms.values())) == len(rooms)


def test_a_recombined_sheet_keeps_its_room_its_things_and_their_kinds_of_places(
    recorded: Sequence[Trajectory],
) -> None:
    sheets = sheets_of(recorded)
    worlds, rooms = Worlds(sheets), by_room(sheets)
    new = 0
    for seed in range(40):
        made = worlds.recombine(Random(seed))
        same_room = rooms[room_of(made)]
        base = next(sheet for sheet in same_room if lying(sheet).keys() == lying(made).keys())
        assert [f for f in made.facts if f[0] != "inreceptacle"] == [
            f for f in base.facts if f[0] != "inreceptacle"
        ]
        assert list(made.facts) == sorted(made.facts)
        held = {(thing.split()[0], place) for sheet in same_room for thing, place in lying(sheet).items()}
        assert all((thing.split()[0], place) in held for thing, place in lying(made).items())
        new += made not in sheets
    assert new > 20


def test_the_same_dice_give_the_same_world_and_no_share_gives_the_old_one(
    recorded: Sequence[Trajectory],
) -> None:
    sheets = sheets_of(recorded)
    assert recombine(sheets, Random(7)) == recombine(sheets, Random(7))
    assert recombine(sheets, Random(7), share=0.0) in sheets
    with pytest.raises(ValueError, match="at least one sheet"):
        recombine([], Random(0))


def test_things_never_end_up_inside_each_other() -> None:
    sheet = WorldSheet(
        facts=(
            ("in", "box 1", "box 2"),
            ("in", "box 2", "shelf 1"),
            ("in", "pen 1", "box 1"),
        )
    )
    for seed in range(50):
        made = Worlds([sheet], within="in").recombine(Random(seed), share=1.0)
        assert ("in", "box 2", "shelf 1") in made.facts
        assert made.facts[0][2] == "shelf 1"
        assert ("in", "pen 1", "box 1") in made.facts


def test_a_drawn_sheet_is_one_on_which_the_task_can_succeed(recorded: Sequence[Trajectory]) -> None:
    worlds = Worlds(sheets_of(recorded))
    for number, each in enumerate(recorded[:30]):
        sheet = worlds.draw(each.task, Random(number), can_succeed)
        assert sheet is not None
        assert can_succeed(each.task, sheet)
        assert not goal_met(each.task, sheet)


def test_a_task_that_no_world_allows_gets_none(recorded: Sequence[Trajectory]) -> None:
    def never(task: object, sheet: WorldSheet) -> bool:
        return False

    assert Worlds(sheets_of(recorded)[:3]).draw(recorded[0].task, Random(0), never) is None
