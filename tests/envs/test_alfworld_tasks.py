"""Generated and official ALFWorld games: reproducible, solvable, rooms kept apart."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import tarfile
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest
import pytest_asyncio

from dreamgym.envs.alfworld import AlfworldFactory, AlfworldOptions, episode_process
from dreamgym.envs.alfworld.episode_process import complete_game
from dreamgym.envs.alfworld.generate import FAMILIES, generate_game
from dreamgym.envs.alfworld.rooms import UNSEEN_ROOMS, room, room_numbers
from dreamgym.envs.scripted_policies import make_policy
from dreamgym.errors import ConfigError, DataError, EpisodeFailedError
from dreamgym.rollouts import run_episode
from dreamgym.types import FailureKind, Task, Trajectory
from tests.envs.official_layout import write_official_game

one_loop = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def factory() -> AsyncIterator[AlfworldFactory]:
    """One for all tests in one loop: its engines take longer to start than most games to play."""
    made = AlfworldFactory(AlfworldOptions())
    yield made
    await made.aclose()


async def play(factory: AlfworldFactory, task: Task, policy: str, seed: int = 0) -> Trajectory:
    result = await run_episode(
        lambda: factory.make(task),
        lambda environment: make_policy(policy, environment, seed=seed),
        trajectory_id=task.id,
        task=task,
        seed=seed,
        retries=0,
    )
    assert isinstance(result, Trajectory), result
    return result


def test_the_wheel_ships_all_120_rooms_and_each_can_be_furnished() -> None:
    assert len(room_numbers()) == 120
    assert all(len(room(number).receptacles) >= 3 for number in room_numbers())


def test_a_game_is_the_same_whenever_it_is_made() -> None:
    assert generate_game("train", 3, 11, 0) == generate_game("train", 3, 11, 0)
    problems = {generate_game("train", seed, 11, attempt).problem for seed in (3, 4) for attempt in (0, 1)}
    assert len(problems) == 4


def test_unseen_rooms_serve_the_unseen_split_and_no_other() -> None:
    rooms = {
        split: {generate_game(split, 0, index, 0).room for index in range(600)}
        for split in ("train", "valid_seen", "valid_unseen")
    }
    assert rooms["valid_unseen"] == set(UNSEEN_ROOMS)
    assert not (rooms["train"] | rooms["valid_seen"]) & set(UNSEEN_ROOMS)
    assert len(rooms["train"]) > 80


@pytest.mark.slow
@one_loop
async def test_the_expert_solves_unseen_rooms_and_chance_does_not(factory: AlfworldFactory) -> None:
    tasks = await factory.tasks("valid_unseen", 6)
    assert Counter(task.family for task in tasks) == dict.fromkeys(FAMILIES, 1)
    expert = await asyncio.gather(*(play(factory, task, "expert") for task in tasks))
    chance = await asyncio.gather(*(play(factory, task, "random") for task in tasks))
    assert all(trajectory.success for trajectory in expert)
    assert sum(trajectory.success for trajectory in chance) < 0.10 * len(tasks)
    for trajectory in [*expert, *chance]:
        last = trajectory.transitions[-1].outcome
        assert last.terminated == trajectory.success == (trajectory.total_reward == 1.0)
        assert last.truncated == (not trajectory.success)
        assert sum(t.outcome.reward for t in trajectory.transitions[:-1]) == 0
        if last.truncated:
            assert len(trajectory) == 50


@one_loop
async def test_the_planner_walks_straight_to_the_goal(factory: AlfworldFactory) -> None:
    task = (await factory.tasks("train", 1))[0]
    planned, searched = await play(factory, task, "expert:planner"), await play(factory, task, "expert")
    assert planned.success
    assert len(planned) <= len(searched)


@one_loop
async def test_an_unknown_expert_is_refused_with_the_nearest_one(factory: AlfworldFactory) -> None:
    environment = factory.make((await factory.tasks("train", 1))[0])
    await environment.start()
    with pytest.raises(ConfigError, match="did you mean 'planner'"):
        await environment.expert_action("planer")
    await environment.aclose()


@one_loop
async def test_the_world_sheet_holds_what_later_states_show(factory: AlfworldFactory) -> None:
    for task in await factory.tasks("train", 3):
        trajectory = await play(factory, task, "expert")
        assert trajectory.sheet is not None
        where = {fact[1]: fact[2] for fact in trajectory.sheet.facts if fact[0] == "inreceptacle"}
        first_take = next(t for t in trajectory.transitions if t.action.startswith("take"))
        thing, place = first_take.action.removeprefix("take ").split(" from ")
        assert where[thing] == place
        closed = re.findall(
            r"The (\w+ \d+) is closed", " ".join(t.outcome.next_state.text for t in trajectory.transitions)
        )
        assert all(("openable", name) in trajectory.sheet.facts for name in closed)


@one_loop
async def test_a_task_can_be_played_where_its_game_was_never_made(
    factory: AlfworldFactory, cache: Path
) -> None:
    task = (await factory.tasks("train", 1))[0]
    before = await play(factory, task, "random", seed=5)
    shutil.rmtree(cache / "alfworld" / "games-1")
    elsewhere = AlfworldFactory(AlfworldOptions())
    elsewhere._pool = factory._pool  # a second one would take longer to start than the test
    after = await play(elsewhere, task, "random", seed=5)
    assert [t.outcome for t in before.transitions] == [t.outcome for t in after.transitions]


@one_loop
async def test_a_task_that_names_no_game_is_a_typed_failure(factory: AlfworldFactory, tmp_path: Path) -> None:
    task = (await factory.tasks("train", 1))[0]
    with pytest.raises(EpisodeFailedError, match="does not name a generated game") as caught:
        factory.make(replace(task, parameters={"source": "official", "game": "x"}))
    assert caught.value.kind is FailureKind.INVALID_TASK
    write_official_game(tmp_path, "train", 0)
    official = AlfworldFactory(AlfworldOptions(data=tmp_path))
    with pytest.raises(EpisodeFailedError, match="is not an official game"):
        official.make(replace(task, parameters={"source": "official", "game": "../../../etc/passwd"}))


async def test_the_official_layout_lists_solvable_games_by_their_official_names(tmp_path: Path) -> None:
    for index in range(4):
        write_official_game(tmp_path, "train", index, solvable=index != 2)
    write_official_game(tmp_path, "valid_seen", 5)
    factory = AlfworldFactory(AlfworldOptions(data=tmp_path))
    assert factory.splits == ("train", "valid_seen")
    tasks = await factory.tasks("train", seed=1)
    assert len(tasks) == 3
    assert {task.family for task in tasks} == {FAMILIES[0], FAMILIES[1], FAMILIES[3]}
    assert all(task.id.startswith("train/") and task.instruction for task in tasks)
    assert tasks == await factory.tasks("train", seed=1)
    trajectory = await play(factory, tasks[0], "expert")
    assert trajectory.success
    assert trajectory.start.text.endswith(f"Your task is to: {tasks[0].instruction}.")
    with pytest.raises(ConfigError, match="split 'train' has 3 tasks, 9 were requested"):
        await factory.tasks("train", 9)
    with pytest.raises(ConfigError, match="it has: train, valid_seen"):
        await factory.tasks("valid_sen", 1)
    await factory.aclose()


async def test_the_error_for_a_folder_without_games_states_the_expected_layout(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"expected ALFWorld games as SPLIT/TASK/TRIAL/game\.tw-pddl"):
        AlfworldFactory(AlfworldOptions(data=tmp_path))
    path = write_official_game(tmp_path, "train", 0)
    (path.parent / "traj_data.json").unlink()
    with pytest.raises(DataError, match=r"expected an ALFWorld game with its traj_data.json"):
        await AlfworldFactory(AlfworldOptions(data=tmp_path)).tasks("train")


async def test_old_official_wording_and_the_repaired_expert_understand_each_other(
    tmp_path: Path,
) -> None:
    """Games as distributed say `put X in/on Y`; the expert was written for `move X to Y`."""
    path = write_official_game(tmp_path, "train", 5)  # two things are put down
    text = path.read_text(encoding="utf-8")
    path.write_text(text.replace("move {o} to {r}", "put {o} in/on {r}"), encoding="utf-8")
    for wording, verb in (("as_is", "put "), ("current", "move "), ("older", "put ")):
        factory = AlfworldFactory(AlfworldOptions.model_validate({"data": tmp_path, "wording": wording}))
        for task in await factory.tasks("train"):
            trajectory = await play(factory, task, "expert")
            assert trajectory.success
            assert any(t.action.startswith(verb) for t in trajectory.transitions)
        await factory.aclose()


def test_the_older_wording_is_that_of_official_games(real_data: Path, tmp_path: Path) -> None:
    with tarfile.open(real_data / "alfworld" / "official_layout_sample.tar.xz") as archive:
        archive.extractall(tmp_path, filter="data")
    for path in tmp_path.rglob("game.tw-pddl"):
        official = json.loads(path.read_text(encoding="utf-8"))
        older = complete_game(official, "older")
        assert older["grammar"].strip() == official["grammar"].strip()
        assert complete_game(official, "as_is") == official
        assert "action help" in complete_game(official, "current")["grammar"]


def test_texts_of_another_version_are_not_rewritten_by_guess(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(episode_process, "_shipped", lambda: ("(define)", "carry {o} to {r}"))
    with pytest.raises(ConfigError, match=r"needs the texts of alfworld 0\.4"):
        episode_process._older.__wrapped__()
