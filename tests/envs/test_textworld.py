"""TextWorld in process: the games are TextWorld's, play as the compiled ones do, and the same everywhere."""

from __future__ import annotations

import asyncio
import hashlib
import os
import random
import re
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dreamgym.config import validate
from dreamgym.envs.registry import open_environment
from dreamgym.envs.scripted_policies import make_policy
from dreamgym.envs.textworld import SPEC, TextWorldFactory, TextWorldOptions
from dreamgym.envs.textworld.logic_engine import INVALID, GameSession
from dreamgym.envs.textworld.task_source import CookingGame, GameSettings, TreasureGame, make_game, task_of
from dreamgym.errors import ConfigError, EpisodeFailedError, EpisodeOverError
from dreamgym.protocols import EnvironmentFactory
from dreamgym.testing import check_environment
from dreamgym.types import FailureKind, Outcome, Task

COOKING = CookingGame(split="train", seed=3)
TREASURE = TreasureGame(split="train", seed=3)


def factory(**options: Any) -> TextWorldFactory:
    return TextWorldFactory(validate(TextWorldOptions, options))


async def played(
    worlds: EnvironmentFactory, task: Task, policy: str, seed: int = 0
) -> list[tuple[str, Outcome]]:
    environment = worlds.make(task)
    player = make_policy(policy, environment, seed=seed)
    turns: list[tuple[str, Outcome]] = []
    state = await environment.start()
    while not (turns and turns[-1][1].over):
        action = (await player.act(task, (), state)).action
        turns.append((action, await environment.step(action)))
        state = turns[-1][1].next_state
    await environment.aclose()
    return turns


async def success(worlds: EnvironmentFactory, tasks: Sequence[Task], policy: str) -> float:
    episodes = [await played(worlds, task, policy, seed) for seed, task in enumerate(tasks)]
    return sum(turns[-1][1].success for turns in episodes) / len(episodes)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["cooking", "treasure"])
async def test_the_expert_wins_and_the_random_policy_does_not(family: str) -> None:
    worlds = factory(family=family)
    by_chance = []
    for split in worlds.splits:
        tasks = list(await worlds.tasks(split, 4))
        assert {(task.family, task.split) for task in tasks} == {(family, split)}
        assert await success(worlds, tasks, "expert") == 1
        by_chance.append(await success(worlds, tasks, "random"))
    assert sum(by_chance) / len(by_chance) < 0.2


async def test_the_expert_finds_back_from_where_chance_has_led() -> None:
    worlds = factory(family="treasure")
    for task in await worlds.tasks("test", 3):
        environment = worlds.make(task)
        state = await environment.start()
        wander = random.Random(1)
        for _ in range(8):
            ways = [action for action in state.admissible_actions or () if not action.startswith("take")]
            state = (await environment.step(wander.choice(ways))).next_state
        outcome = await environment.step(await environment.expert_action("planner"))
        while not outcome.over:
            outcome = await environment.step(await environment.expert_action())
        assert outcome.success


@pytest.mark.filterwarnings("ignore:Game .* is not fully supported")
@pytest.mark.parametrize(
    "settings",
    [
        COOKING,
        CookingGame(split="test", seed=200_004, ingredients=3, rooms=9),
        TreasureGame(split="train", seed=4),
    ],
)
def test_a_game_is_the_one_that_textworld_itself_makes(settings: GameSettings) -> None:
    """Theirs is made with their own knowledge base, all constraints and a compiled walkthrough."""
    import textworld
    from textworld.challenges.tw_cooking import cooking
    from textworld.challenges.tw_treasure_hunter import treasure_hunter

    from dreamgym.envs.textworld.task_source import _cooking_arguments

    options = textworld.GameOptions()
    options.seeds = settings.seed
    if isinstance(settings, CookingGame):
        theirs = cooking.make(_cooking_arguments(settings), options)
    else:
        theirs = treasure_hunter.make({"level": settings.level}, options)
    ours = make_game(settings)
    assert ours.world == theirs.world
    assert ours.infos == theirs.infos
    assert ours.metadata == theirs.metadata
    assert ours.objective == theirs.objective


@pytest.mark.filterwarnings("ignore:Game .* is not fully supported")
@pytest.mark.parametrize(
    "settings", [CookingGame(split="train", seed=9, ingredients=2), TreasureGame(split="test", seed=200_003)]
)
def test_a_game_goes_as_the_compiled_one_goes(settings: GameSettings, tmp_path: Path) -> None:
    """Step by step: the same actions are possible, the same things carried, the same end reached."""
    import textworld

    options = textworld.GameOptions()
    options.path = str(tmp_path / "game.z8")
    game = make_game(settings)
    wanted = textworld.EnvInfos(won=True, lost=True, admissible_commands=True, inventory=True)
    compiled = textworld.start(textworld.generator.compile_game(game, options), wanted)
    ends = set()
    for seed in range(6):
        chance, play = random.Random(seed), GameSession(game)
        compiled.reset()
        for _ in range(150):
            led = chance.random() < seed / 5
            action = play.expert_action() if led else chance.choice([*play.actions, "prepare meal"])
            text = play.act(action)
            theirs, _, _ = compiled.step(action)
            assert (theirs["won"], theirs["lost"]) == (play.won, play.lost), action
            if play.won or play.lost:
                ends.add("won" if play.won else "lost")
                break
            assert words(theirs["inventory"]) == words(play.act("inventory")), action
            # Ours knows when a meal can be prepared, and that one can look at what one carries.
            mine, possible = set(play.actions), set(theirs["admissible_commands"])
            assert possible - mine <= {"prepare meal"}
            assert all(each.startswith("examine ") for each in mine - possible)
            if action == "prepare meal" and text != INVALID:
                assert text in theirs.feedback.replace("-= Kitchen =-", "kitchen")
    assert ends == {"won", "lost"}


def words(inventory: str) -> list[str]:
    return sorted(re.sub(r"\b(an?|some|and|carrying)\b|\W", " ", inventory).split())


async def test_the_same_task_reads_the_same_in_every_process() -> None:
    """Python shuffles its sets anew in each process; that must not show."""
    code = (
        "import asyncio; from tests.envs.test_textworld import fingerprint; print(asyncio.run(fingerprint()))"
    )
    environment = {**os.environ, "PYTHONHASHSEED": "7"}
    other = await asyncio.create_subprocess_exec(
        sys.executable, "-c", code, env=environment, stdout=asyncio.subprocess.PIPE
    )
    printed, _ = await other.communicate()
    assert printed.decode().strip() == await fingerprint()


async def fingerprint() -> str:
    """Everything there is to see of two games, a long random one and the expert's."""
    worlds, seen = factory(), []
    for settings in (CookingGame(split="train", seed=5, ingredients=3), TreasureGame(split="train", seed=5)):
        task = task_of(settings)
        environment = worlds.make(task)
        seen.append(repr((task, await environment.start(), await environment.world_sheet())))
        seen += [repr(await played(worlds, task, policy)) for policy in ("noisy:0.5", "expert")]
    return hashlib.sha256("\n".join(seen).encode()).hexdigest()


async def test_it_passes_the_conformance_checks() -> None:
    report = await check_environment("textworld", episodes=96, concurrency=32)
    assert report.passed, report.to_dict()
    assert {check.status for check in report.checks} == {"pass"}


async def test_splits_share_no_game_and_orders_begin_alike() -> None:
    worlds = factory(family="cooking")
    ids = {split: {task.id for task in await worlds.tasks(split, 50)} for split in worlds.splits}
    assert sum(map(len, ids.values())) == len(set().union(*ids.values())) == 150
    assert list(await worlds.tasks("test", 5)) == list((await worlds.tasks("test"))[:5])
    assert list(await worlds.tasks("test", 5, seed=1)) != list(await worlds.tasks("test", 5, seed=2))
    foods = {split: await foods_of(worlds, split) for split in worlds.splits}
    assert foods["test"] - foods["train"], "held-out games have foods that training has not"


async def foods_of(worlds: TextWorldFactory, split: str) -> set[str]:
    foods = set()
    for task in await worlds.tasks(split, 6):
        environment = worlds.make(task)
        await environment.start()
        foods |= {fact[1] for fact in (await environment.world_sheet()).facts if fact[0] == "recipe"}
    return foods


async def test_the_world_sheet_holds_what_an_agent_has_to_find() -> None:
    environment = factory().make(task_of(COOKING))
    start = await environment.start()
    sheet = await environment.world_sheet()
    (food, *_), *_ = [fact[1:] for fact in sheet.facts if fact[0] == "recipe"]
    assert any(fact[0] in ("in", "on", "at") for fact in sheet.facts if food in fact[1:])
    assert food not in start.text
    hunt = factory().make(task_of(TREASURE))
    await hunt.start()
    facts = (await hunt.world_sheet()).facts
    wanted = next(fact[1] for fact in facts if fact[0] == "wins")
    assert wanted in hunt.task.instruction
    assert any(fact[0] == "loses" for fact in facts)


async def test_the_recipe_can_be_read_and_followed() -> None:
    environment = factory(family="cooking", rooms=1).make(
        task_of(CookingGame(split="train", seed=8, rooms=1, open=False))
    )
    assert "You are in the kitchen." in (await environment.start()).text
    recipe = (await environment.step("examine cookbook")).next_state.text
    assert "Ingredients:\n" in recipe
    assert "prepare meal" in recipe
    refused = (await environment.step("prepare meal")).next_state.text
    assert refused == "You still miss something."
    assert refused in SPEC.refusals


async def test_letters_and_spaces_of_an_action_do_not_matter() -> None:
    environment = factory().make(task_of(COOKING))
    start = await environment.start()
    assert (await environment.step("  LOOK \n")).next_state == start
    assert (await environment.step("look around")).next_state.text == INVALID
    assert INVALID in SPEC.refusals


async def test_a_task_from_elsewhere_costs_its_episode_only() -> None:
    task = task_of(COOKING)
    for wrong in ({}, {"family": "chess"}, {**task.parameters, "seed": -1}, {**task.parameters, "rooms": 7}):
        environment = factory().make(replace(task, parameters=wrong))
        with pytest.raises(EpisodeFailedError, match="take tasks from") as failure:
            await environment.start()
        assert failure.value.kind is FailureKind.INVALID_TASK


async def test_an_episode_is_used_once() -> None:
    environment = factory().make(task_of(COOKING))
    with pytest.raises(EpisodeOverError):
        await environment.world_sheet()
    await environment.start()
    with pytest.raises(EpisodeOverError):
        await environment.start()
    with pytest.raises(ConfigError, match="did you mean 'planner'"):
        await environment.expert_action("planer")


async def test_a_seed_whose_map_has_no_quest_still_gives_a_game() -> None:
    tasks = [task_of(TreasureGame(split="train", seed=seed, level=10)) for seed in (8, 9)]
    assert await success(factory(), tasks, "expert") == 1


async def test_impossible_requests_are_refused_before_anything_starts() -> None:
    with pytest.raises(
        ConfigError, match="unknown split 'valid' of environment 'textworld'; it has: train, validation, test"
    ):
        await factory().tasks("valid", 1)
    with pytest.raises(ConfigError, match="has 10000 tasks, 10001 were requested"):
        await factory().tasks("test", 10_001)
    with pytest.raises(ConfigError, match="level"):
        open_environment("textworld", {"level": 31})
    assert SPEC.options is TextWorldOptions


async def test_a_step_takes_milliseconds_and_many_episodes_share_a_loop() -> None:
    worlds = factory(horizon=20)
    tasks = list(await worlds.tasks("train", 4)) * 16
    started = time.process_time()  # not the clock: others may use this core too
    episodes = await asyncio.gather(
        *(played(worlds, task, "random", seed) for seed, task in enumerate(tasks))
    )
    steps = sum(map(len, episodes))
    assert (time.process_time() - started) / steps < 0.05  # about 1 ms, making games aside
