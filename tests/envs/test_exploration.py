"""The policy `explore` and the coverage of actions: an unknown environment, from its texts alone."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import dreamgym as dg
from dreamgym.data.trajectories import read_trajectories
from dreamgym.envs import registry
from dreamgym.envs.coverage import OTHER, Coverage
from dreamgym.envs.exploration import ExplorationMemory, ExplorePolicy, action_kind
from dreamgym.types import Trajectory
from tests.conftest import ROOT

VENDING = f"{ROOT}/examples/environments/vending.py:Vending"


@pytest.fixture(autouse=True)
def _no_leftovers() -> Iterator[None]:
    yield
    registry._registered.pop("switch", None)


class Switch:
    """Press the red button. It lists no actions, and has an expert that must not be asked."""

    horizon = 8

    def start(self) -> str:
        return "A panel with a red and a green button."

    def step(self, action: str) -> tuple[str, float, bool]:
        if action in ("press red", "press green"):
            return f"You press {action[6:]}.", float(action == "press red"), action == "press red"
        return "No.", 0.0, False

    def expert_action(self) -> str:
        raise AssertionError("explore must not use the expert")


async def recorded(out: Path, environment: object = VENDING, **settings: Any) -> list[Trajectory]:
    await dg.collect(environment, out, policy="explore", **settings)
    return sorted(read_trajectories(out), key=lambda trajectory: trajectory.id)


def played(trajectories: list[Trajectory]) -> list[tuple[str, str, list[str]]]:
    return [(each.id, each.task.id, [step.action for step in each.transitions]) for each in trajectories]


async def test_explore_tries_admissible_actions_and_makes_errors_on_purpose(tmp_path: Path) -> None:
    found = await recorded(tmp_path / "data", episodes=192, episodes_per_task=4)
    steps = [step for each in found for step in each.transitions]
    listed = sum(step.action in (step.state.admissible_actions or ()) for step in steps)
    assert 0.5 < listed / len(steps) < 0.95
    replies = {step.outcome.next_state.text for step in steps}
    assert {"You cannot do that.", "That is not in the tray.", "There is no such slot."} <= replies
    assert 0.03 < sum(each.success for each in found) / len(found) < 0.3


async def test_one_task_is_played_several_times(tmp_path: Path) -> None:
    found = await recorded(tmp_path / "data", episodes=10, episodes_per_task=4)
    tasks = [each.task.id for each in found]
    assert [tasks.count(task) for task in dict.fromkeys(tasks)] == [4, 4, 2]


async def test_exploration_does_not_depend_on_interruptions_or_concurrency(tmp_path: Path) -> None:
    whole = await recorded(tmp_path / "whole", episodes=150, episodes_per_task=4)
    alone = await recorded(tmp_path / "alone", episodes=150, episodes_per_task=4, concurrency=1)
    for episodes in (3, 70, 150):
        resumed = await recorded(tmp_path / "resumed", episodes=episodes, episodes_per_task=4)
    assert played(whole) == played(alone) == played(resumed)
    assert any(each.success for each in whole)


async def test_without_listed_actions_it_starts_from_templates_and_the_texts(tmp_path: Path) -> None:
    found = await recorded(tmp_path / "given", Switch, episodes=100, actions=["press {}"])
    actions = {step.action for each in found for step in each.transitions}
    assert {"press red", "press green"} <= actions
    assert any(each.success for each in found)
    blind = await recorded(tmp_path / "blind", Switch, episodes=3)
    texts = f"{Switch.__doc__} {Switch().start()} You press red. green No"
    words = {word.strip(".,") for word in texts.split()}
    assert {word for each in blind for step in each.transitions for word in step.action.split()} <= words


async def test_a_success_elsewhere_is_followed_with_the_words_of_the_new_task() -> None:
    factory = dg.make(VENDING)
    tasks = await factory.tasks("train", 400)
    [old, new] = [
        next(task for task in tasks if task.instruction == f"Get the {each}.") for each in ("nuts", "gum")
    ]
    memory = ExplorationMemory(successes=[(old.instruction, ("look", "take nuts"))], episodes=10, won=1)
    plans = [ExplorePolicy(seed, memory=memory)._choose_plan(new) for seed in range(20)]
    assert ["look", "take gum"] in plans
    assert [] in plans
    memory.won = 9  # enough successes: nothing is repeated any more
    assert not any(ExplorePolicy(seed, memory=memory)._choose_plan(new) for seed in range(20))


async def test_coverage_counts_kinds_refusals_and_admissible_actions(tmp_path: Path) -> None:
    report = await dg.collect(VENDING, tmp_path / "data", policy="explore", episodes=40)
    rows = {row.kind: row for row in report.coverage.kinds()}
    assert set(rows) - {OTHER} == {"look", "read", "insert", "press", "refund", "shake", "take"}
    assert sum(row.tried for row in rows.values()) == report.steps
    assert rows[OTHER].in_vain / rows[OTHER].tried > 0.8
    assert 0.5 < (report.coverage.admissible_tried() or 0) <= 1
    stored = json.loads((tmp_path / "data" / "coverage.json").read_text())
    assert stored == report.coverage.to_dict()
    again = await dg.collect(VENDING, tmp_path / "data", policy="explore", episodes=40)
    assert again.episodes == 0
    assert again.coverage.to_dict() == stored


async def test_a_kind_that_was_hardly_tried_is_named(tmp_path: Path) -> None:
    await dg.collect(VENDING, tmp_path / "data", policy="random", episodes=1)
    few = Coverage()
    few.add(list(read_trajectories(tmp_path / "data")))
    assert set(few.rare()) == {row.kind for row in few.kinds() if row.tried < 5 and row.kind != OTHER}
    assert few.rare()


@pytest.mark.parametrize(("action", "kind"), [("", ""), ("Go north", "go"), ("🙂", "🙂")])
def test_the_kind_of_an_action_is_its_first_word(action: str, kind: str) -> None:
    assert action_kind(action) == kind
