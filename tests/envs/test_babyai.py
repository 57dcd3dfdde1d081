"""BabyAI in words: the view, the refusals, the levels."""

from __future__ import annotations

from collections import deque

import pytest

import dreamgym as dg
from dreamgym.envs.babyai import LEVELS
from dreamgym.envs.babyai.grid import ACTIONS, GridGame
from dreamgym.envs.registry import ROLES, find_environment
from dreamgym.errors import ConfigError


def solution(level: str, seed: int, most: int) -> list[str] | None:
    """The shortest solution with turns and steps, by trying."""
    queue: deque[list[str]] = deque([[]])
    seen = set()
    while queue:
        done = queue.popleft()
        game = GridGame(level, seed)
        results = [game.act(action) for action in done]
        if results and results[-1][1]:
            return done
        if (facts := game._facts()) in seen or len(done) == most:
            continue
        seen.add(facts)
        queue.extend([*done, action] for action in ACTIONS[:3])
    return None


async def test_it_meets_the_contract_of_environments_and_gives_no_hints() -> None:
    report = await dg.check_environment("babyai", episodes=20, concurrency=8)
    assert report.passed, report.to_dict()
    spec = find_environment("babyai")
    assert not any(getattr(spec, role) for role in ROLES)


async def test_a_task_is_a_level_with_a_seed_and_no_seed_is_in_two_splits() -> None:
    factory = dg.make("babyai")
    tasks = {split: (await factory.tasks(split))[:40] for split in factory.splits}
    assert len(await factory.tasks("train")) >= 2_000
    assert len(await factory.tasks("test")) >= 400
    seeds = [{task.parameters["seed"] for task in found} for found in tasks.values()]
    assert len(set().union(*seeds)) == sum(map(len, seeds))
    assert {task.family for task in tasks["train"]} == set(LEVELS)
    (again,) = await factory.tasks("train", 1)
    assert again == tasks["train"][0]


def test_the_view_tells_where_things_are() -> None:
    game = GridGame("GoToRedBallNoDists", 0)
    assert game.mission == "go to the red ball"
    texts = {game.act("turn right")[0] for _ in range(4)}
    assert any("a red ball" in text and "step" in text for text in texts)
    assert all(text.startswith("You see ") for text in texts)


def test_an_action_without_effect_is_refused_and_changes_nothing() -> None:
    game = GridGame("GoToObj", 3)
    before = game.view()
    assert "drop" not in game.actions()
    assert game.act("drop") == (f"Nothing happens. {before}", False, False)
    assert game.view() == before
    while "go forward" in game.actions():
        assert not game.act("go forward")[2]
    assert game.act("go forward")[0].startswith("Nothing happens.")


def test_reaching_the_goal_succeeds() -> None:
    actions = solution("GoToRedBallNoDists", 1, 12)
    assert actions is not None
    game = GridGame("GoToRedBallNoDists", 1)
    results = [game.act(action) for action in actions]
    assert results[-1] == ("You have done it.", True, True)
    assert not any(over for _, _, over in results[:-1])


async def test_levels_are_an_option_and_unknown_ones_are_refused() -> None:
    factory = dg.make("babyai", levels="GoToObj, OpenDoor")
    assert {task.family for task in await factory.tasks("train", 20)} == {"GoToObj", "OpenDoor"}
    with pytest.raises(ConfigError, match="did you mean 'GoToObj'"):
        dg.make("babyai", levels=["GoToObjj"])
