"""Evaluation in reality: shares with intervals, families, pairs, and what episodes cost."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from dreamgym.data.trajectories import read_trajectories
from dreamgym.envs.scripted_policies import make_policy
from dreamgym.envs.wrappers import StepCounter
from dreamgym.errors import ConfigError, EpisodeFailedError
from dreamgym.evaluation.evaluate import (
    Comparison,
    Episode,
    Evaluation,
    compare,
    evaluate,
    evaluation_rows,
)
from dreamgym.evaluation.statistics import mcnemar, paired_difference, wilson
from dreamgym.protocols import Environment, Policy, find_expert, find_world_sheet
from dreamgym.testing import Corridor, CorridorFactory
from dreamgym.types import Decision, FailureKind, Outcome, State, Task, Transition

FACTORY = CorridorFactory(length=4, horizon=6)


def member(name: str) -> object:
    def made(environment: Environment, conversation: str, seed: int) -> Policy:
        return make_policy(name, environment, seed=seed)

    return made


async def played(name: str = "expert", factory: CorridorFactory = FACTORY, **changes: object) -> Evaluation:
    chosen: dict[str, Any] = {"split": "test", "episodes": 8, **changes}
    return await evaluate(factory, member(name), policy=name, **chosen)  # type: ignore[arg-type]


async def test_success_comes_with_its_wilson_interval_and_what_it_cost() -> None:
    found = await played()
    assert (found.success.value, found.success.count) == (1.0, 8)
    assert (found.success.low, found.success.high) == wilson(8, 8)
    assert found.real_steps == sum(episode.steps for episode in found.episodes) > 0
    assert found.to_dict()["steps_per_episode"] == found.real_steps / 8


async def test_every_policy_plays_the_same_episodes_with_the_same_dice() -> None:
    one, same, other = await played(), await played("random"), await played(seed=1)
    tasks = [(episode.number, episode.task) for episode in one.episodes]
    assert tasks == [(episode.number, episode.task) for episode in same.episodes]
    assert tasks != [(episode.number, episode.task) for episode in other.episodes]
    again = await played("random")
    assert [episode.success for episode in again.episodes] == [episode.success for episode in same.episodes]


async def test_a_split_with_fewer_tasks_than_episodes_is_gone_through_again() -> None:
    found = await played(episodes=11)
    assert len(found.episodes) == 11
    assert len({episode.task for episode in found.episodes}) == len(await FACTORY.tasks("test"))
    with pytest.raises(ConfigError, match="unknown split 'tset'"):
        await played(split="tset")


def slowly(environment: Environment, conversation: str, seed: int) -> Policy:
    """Chance that takes its time, as a model would."""
    policy = make_policy("random", environment, seed=seed)
    act = policy.act

    async def wait(task: Task, history: Sequence[Transition], state: State) -> Decision:
        await asyncio.sleep(0.001)
        return await act(task, history, state)

    policy.act = wait  # type: ignore[method-assign]
    return policy


async def test_an_evaluation_that_was_stopped_resumes_with_the_episodes_that_are_missing(
    tmp_path: Path,
) -> None:
    whole = await played("random", seed=3)
    ended: list[int] = []

    def stop() -> None:
        ended.append(1)
        if len(ended) == 4:
            playing.cancel()

    asked: dict[str, Any] = {"split": "test", "episodes": 8, "seed": 3, "concurrency": 1, "keep": tmp_path}
    playing = asyncio.create_task(evaluate(FACTORY, slowly, **asked, on_episode=stop))
    with pytest.raises(asyncio.CancelledError):
        await playing
    before = len(list(read_trajectories(tmp_path)))
    assert 0 < before < 8
    ends: list[int] = []
    again = await evaluate(FACTORY, slowly, **asked, on_episode=lambda: ends.append(1))
    assert again.episodes == whole.episodes
    assert again.real_steps == whole.real_steps
    assert len(ends) == len(list(read_trajectories(tmp_path))) == 8


class _Breaking(CorridorFactory):
    """Breaks in one of its tasks, each time, at the second step."""

    def __init__(self, broken: str) -> None:
        super().__init__(length=4, horizon=6)
        self._broken = broken

    def make(self, task: Task, *, seed: int = 0) -> Corridor:
        corridor = super().make(task, seed=seed)
        if task.id == self._broken:
            walk = corridor.step

            async def step(action: str) -> Outcome:
                await walk(action)
                raise EpisodeFailedError(FailureKind.CRASHED, "gone")

            corridor.step = step  # type: ignore[method-assign]
        return corridor


async def test_what_could_not_be_played_is_in_no_share_but_its_steps_are_counted() -> None:
    tasks = [task.id for task in await FACTORY.tasks("test")]
    found = await played(factory=_Breaking(tasks[0]), episodes=len(tasks), retries=1)
    assert found.failures == {"crashed": 1}
    assert found.success.count == len(tasks) - 1
    assert found.real_steps == sum(episode.steps for episode in found.episodes) + 2


def made(outcomes: Sequence[bool], *, seed: int = 0, families: Sequence[str] = ("a",)) -> Evaluation:
    return Evaluation(
        policy="p",
        environment="corridor",
        split="test",
        seed=seed,
        episodes=tuple(
            Episode(
                number=number,
                task=f"t{number}",
                family=families[number % len(families)],
                success=success,
                steps=3,
            )
            for number, success in enumerate(outcomes)
        ),
        failures={},
        real_steps=0,
        seconds=0.0,
    )


def test_families_are_listed_apart_where_there_are_several() -> None:
    found = made([True, False, True, False], families=("heat", "cool"))
    assert {name: share.value for name, share in found.by_family().items()} == {"heat": 1.0, "cool": 0.0}
    assert [row[1] for row in evaluation_rows([found])] == ["all", "cool", "heat"]
    assert len(evaluation_rows([made([True])])) == 1


def test_two_policies_are_compared_on_the_episodes_that_both_have_played() -> None:
    first, second = made([True, True, True, False]), made([True, False, False])
    found = compare(first, second)
    assert (found.first_only, found.second_only, found.difference.count) == (2, 0, 3)
    assert found.difference.value == pytest.approx(2 / 3)
    assert found == Comparison(difference=found.difference, first_only=2, second_only=0)
    with pytest.raises(ConfigError, match="expected evaluations of the same episodes"):
        compare(first, made([True], seed=1))


def test_pairs_show_a_difference_that_two_shares_cannot() -> None:
    """The same ten more successes, with 150 episodes in common or with none."""
    alike = [(True, True)] * 75 + [(True, False)] * 10 + [(False, False)] * 75
    apart = [(True, False)] * 85 + [(False, True)] * 75
    close, wide = paired_difference(alike), paired_difference(apart)
    assert close.value == wide.value == pytest.approx(10 / 160)
    assert close.low is not None
    assert close.low > 0
    assert wide.low is not None
    assert wide.low < 0
    assert mcnemar(10, 0) < 0.05 < mcnemar(85, 75)


def test_a_paired_difference_turns_round_with_its_pairs_and_stays_within_its_bounds() -> None:
    pairs = [(True, False)] * 5 + [(True, True)] * 3 + [(False, True)] * 2 + [(False, False)] * 7
    one, other = paired_difference(pairs), paired_difference([(two, one) for one, two in pairs])
    assert other.value == pytest.approx(-(one.value or 0))
    assert other.low == pytest.approx(-(one.high or 0))
    assert other.high == pytest.approx(-(one.low or 0))
    every = paired_difference([(True, False)] * 9)
    assert every.value == 1.0
    assert every.high == 1.0
    assert paired_difference([]).value is None


async def test_the_roles_of_an_environment_are_found_inside_its_wrapper() -> None:
    metered = StepCounter(FACTORY)
    [task] = await metered.tasks("train", 1)
    environment = metered.make(task)
    facts, expert = find_world_sheet(environment), find_expert(environment)
    assert facts is not None
    assert expert is not None
    await environment.start()
    assert await facts.world_sheet() == await _sheet(task)
    await environment.step(await expert.expert_action())
    assert (metered.steps, metered.episodes, metered.name) == (1, 1, "corridor")


async def _sheet(task: Task) -> object:
    corridor = FACTORY.make(task)
    await corridor.start()
    return await corridor.world_sheet()


def test_nothing_here_needs_a_model(tmp_path: Path) -> None:
    """Evaluating a policy of one's own works without torch."""
    import subprocess
    import sys

    script = "import sys; import dreamgym.evaluation.evaluate; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", script], check=True, cwd=tmp_path)
