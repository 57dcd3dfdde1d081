"""Rollout groups that begin within a known episode: where they begin, what is learnt, how starts move."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dreamgym.api import rollout
from dreamgym.config import Config, TrainConfig, load_config
from dreamgym.data.schema import decode_trajectory, encode_trajectory
from dreamgym.data.trajectories import read_trajectories
from dreamgym.errors import ConfigError
from dreamgym.protocols import Environment
from dreamgym.rl.packing import pack
from dreamgym.training.dream_loading import Dream
from dreamgym.training.metrics import read_metrics
from dreamgym.training.resets import Resets
from dreamgym.training.uniform_tasks import UniformTasks
from dreamgym.types import (
    Completion,
    Decision,
    Outcome,
    Prediction,
    RolloutGroup,
    State,
    Task,
    Trajectory,
    Transition,
    WorldSheet,
)
from tests.training.training_run import CorridorDream, record, run, settings


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> list[Trajectory]:
    folder = tmp_path_factory.mktemp("corridors") / "offline"
    asyncio.run(record(folder))
    return list(read_trajectories(folder))


def longest(recorded: Sequence[Trajectory]) -> Trajectory:
    return max(recorded, key=len)


class Opener:
    """Opens the door it stands at, with tokens as a language model would sample them."""

    name = "opener"

    async def act(self, task: Task, history: Sequence[Transition], state: State) -> Decision:
        read = tuple(range(10 * len(history) + 5))
        return Decision(
            action="open door",
            completion=Completion(text="open door", token_ids=(1, 2), prompt_token_ids=read),
        )


def opener(environment: Environment, trajectory_id: str, seed: int) -> Opener:
    return Opener()


CORRIDOR: Config = load_config(overrides=["environment.name=corridor", "train.horizon=6"])


async def played(
    recorded: Sequence[Trajectory], turns: Sequence[Transition], model: Any = None
) -> list[RolloutGroup]:
    dream = Dream(model or CorridorDream(), recorded, CORRIDOR)
    dream.begin_after = lambda task: turns
    return list(await rollout(opener, dream, [longest(recorded).task], group_size=2))


async def test_a_group_begins_after_the_given_turns_and_only_its_own_turns_are_trained(
    recorded: list[Trajectory],
) -> None:
    known = longest(recorded)
    (group,) = await played(recorded, known.transitions[:-1])
    for member in group.trajectories:
        assert (member.success, member.given, len(member.chosen)) == (True, len(known) - 1, 1)
        assert [turn.action for turn in member.transitions] == [turn.action for turn in known.transitions]
        assert member.start.text == known.start.text
        assert decode_trajectory(encode_trajectory(member)).given == member.given
    packed = pack(group.trajectories)
    assert (packed.turns, packed.tokens) == (2, 4)


async def test_without_given_turns_an_episode_begins_at_its_start(recorded: list[Trajectory]) -> None:
    (group,) = await played(recorded, ())
    assert [(member.given, member.success) for member in group.trajectories] == [(0, False)] * 2


async def test_given_turns_stop_before_the_end_of_the_episode(recorded: list[Trajectory]) -> None:
    known = longest(recorded)
    (group,) = await played(recorded, known.transitions)
    assert {member.given for member in group.trajectories} == {len(known) - 1}


class Wall(CorridorDream):
    """Refuses every second step."""

    async def predict(
        self, task: Task, sheet: WorldSheet, history: Sequence[Transition], state: State, action: str
    ) -> Prediction:
        found = await super().predict(task, sheet, history, state, action)
        if len(history) % 2 == 0:
            return found
        refusal = Outcome(next_state=State(text="Nothing happens."), reward=0.0, terminated=False)
        return Prediction(outcome=refusal, sheet=sheet, refused=True)


async def test_given_turns_stop_where_the_dream_refuses_what_reality_did_not(
    recorded: list[Trajectory],
) -> None:
    known = longest(recorded)
    assert len(known) > 2
    (group,) = await played(recorded, known.transitions[:-1], Wall())
    assert {member.given for member in group.trajectories} == {1}


def reset_group(known: Trajectory, *successes: bool, given: int) -> RolloutGroup:
    def ended(won: bool, number: int) -> Trajectory:
        *turns, last = known.transitions
        last = replace(last, outcome=replace(last.outcome, success=won))
        return replace(known, id=f"{known.id}-{number}", transitions=(*turns, last), given=given)

    members = tuple(ended(won, number) for number, won in enumerate(successes))
    return RolloutGroup(task=known.task, trajectories=members)


async def test_starts_move_back_as_success_rises_and_forward_again_as_it_falls(
    recorded: list[Trajectory],
) -> None:
    known = longest(recorded)
    tasks = UniformTasks([known.task], seed=0)
    chosen = TrainConfig(resets="backward", reset_fraction=1.0, reset_success=0.5)
    resets = Resets(tasks, chosen, {known.task.id: known})
    begun = []
    for successes in ((True, True), (True, False), (False, False), (True, True), (True, True)):
        await resets.sample(1)
        begun.append(len(resets.begin_after(known.task)))
        await resets.record([reset_group(known, *successes, given=len(known) - 1)])
    whole = len(known)
    assert begun == [whole - 1, whole - 2, whole - 3, whole - 2, whole - 3]
    resets.distance = whole
    await resets.sample(1)
    assert resets.begin_after(known.task) == (), "the whole task is practised in the end"


async def test_branches_begin_within_episodes_of_groups_with_different_ends(
    recorded: list[Trajectory],
) -> None:
    known, other = sorted(recorded, key=len)[-2:]
    tasks = UniformTasks([each.task for each in recorded], seed=0)
    chosen = TrainConfig(resets="branch", reset_fraction=0.5)
    resets, again = Resets(tasks, chosen), Resets(tasks, chosen)
    assert len(await resets.sample(4)) == 4
    metrics = await resets.record(
        [reset_group(known, True, False, given=0), reset_group(other, True, True, given=0)]
    )
    assert metrics["reset_groups"] == 0
    again.load_state_dict(resets.state_dict())
    for source in (resets, again):
        sampled = await source.sample(4)
        assert len(sampled) == 4
        assert sampled[-1].id == known.task.id
    turns = resets.begin_after(known.task)
    assert 0 < len(turns) < len(known)
    assert [turn.action for turn in turns] == [turn.action for turn in again.begin_after(known.task)]
    assert [turn.action for turn in turns] == [turn.action for turn in known.transitions[: len(turns)]]


async def test_a_run_with_resets_resumes_with_them(tmp_path: Path) -> None:
    await record(tmp_path / "offline")
    words = ("train.mode=dream", "train.gate=off", "train.resets=backward", "train.warm_start_steps=0")
    for steps in (1, 2):
        await run(settings(tmp_path / "x", *words, f"train.steps={steps}"))
    rows = read_metrics(tmp_path / "x" / "run" / "metrics.jsonl", "train")
    assert [row["tasks"]["reset_groups"] for row in rows] == [1, 1]
    assert all(row["tasks"]["given_turns"] >= 4 for row in rows), "a group of four begins after one turn"
    assert rows[0]["tasks"]["reset_distance"] == 1


@pytest.mark.parametrize(
    "word", ["train.mode=real", "train.start_states=recombined", "train.start_states=imagined"]
)
async def test_resets_need_a_dream_with_recorded_starts(tmp_path: Path, word: str) -> None:
    await record(tmp_path / "offline")
    config = settings(tmp_path / "x", "train.mode=dream", "train.resets=backward", word)
    with pytest.raises(ConfigError, match=r"train\.resets=backward"):
        await run(config)
