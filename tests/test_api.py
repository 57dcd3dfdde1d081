"""The public functions on a small real environment: agents, rollouts, evaluation, and their errors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import dreamgym as dg
from dreamgym.envs.registry import find_environment
from dreamgym.errors import ConfigError, RolloutsFailingError
from dreamgym.testing import CorridorFactory
from dreamgym.types import Decision

CORRIDORS = CorridorFactory(length=3, horizon=4)


class Walker:
    name = "walker"

    async def act(self, task: Any, history: Any, state: Any) -> Decision:
        return Decision(action="go east")


async def recorded(folder: Path) -> list[dg.Trajectory]:
    await dg.collect(CORRIDORS, folder, episodes=4, policy="expert")
    return list(dg.read_trajectories(folder))


def test_a_model_from_scratch_without_data_is_refused_with_what_to_pass() -> None:
    with pytest.raises(ConfigError, match=r"pass data=dream\.trajectories to Agent\.load"):
        dg.Agent.load("nano")


def test_an_unknown_setting_of_an_agent_names_the_nearest_one() -> None:
    with pytest.raises(ConfigError, match=r"did you mean 'agent\.max_tokens'"):
        dg.Agent.load("nano", max_token=3)


async def test_an_agent_warm_starts_rolls_out_learns_and_is_evaluated(tmp_path: Path) -> None:
    trajectories = await recorded(tmp_path)
    async with dg.Agent.load("nano", data=trajectories, max_tokens=6) as agent:
        assert agent.warm_start(trajectories, steps=2, batch_size=2)["loss"] > 0
        started = agent.version
        tasks = dg.TaskPool(await CORRIDORS.tasks("train", 3))
        groups = await dg.rollout(agent, CORRIDORS, tasks.sample(2), group_size=2)
        again = await dg.rollout(agent, CORRIDORS, tasks.sample(2), group_size=2)
        ids = {each.id for found in (groups, again) for group in found for each in group.trajectories}
        assert len(ids) == 8, "every call has ids of its own"
        assert {each.provenance.source for group in groups for each in group.trajectories} == {"real"}
        assert {each.provenance.policy_version for g in groups for each in g.trajectories} == {started}
        dg.GRPO(agent).update(groups)
        tasks.record(groups)
        found = await dg.evaluate(agent, CORRIDORS, split="test", episodes=2)
        assert len(found.episodes) == 2


async def test_a_rollout_in_an_environment_leaves_the_registry_as_it_was() -> None:
    class Named(CorridorFactory):
        name = "textworld"

    before = find_environment("textworld")
    factory = Named(length=3, horizon=2)
    await dg.rollout(lambda *_: Walker(), factory, await factory.tasks("train", 1), group_size=2)
    assert find_environment("textworld") is before


async def test_rollouts_that_all_fail_are_an_error_that_says_why() -> None:
    class Broken:
        def start(self) -> str:
            raise RuntimeError("the plug is out")

        def step(self, action: str) -> tuple[str, float, bool]:
            return "", 0.0, True

    factory = dg.make(Broken)
    with pytest.raises(RolloutsFailingError, match="the plug is out"):
        await dg.rollout(lambda *_: Walker(), factory, await factory.tasks("train", 2), group_size=2)


async def test_settings_of_train_are_checked_by_name() -> None:
    with pytest.raises(ConfigError, match="did you mean 'steps'"):
        await dg.train(step=3)
    with pytest.raises(ConfigError, match="did you mean 'learner'"):
        await dg.train(learners={"learning_rate": 1e-3})


async def test_sim_to_real_names_what_it_needs() -> None:
    with pytest.raises(ConfigError, match="needs real_steps"):
        await dg.train(sim_to_real="runs/agent", out="runs/real")
