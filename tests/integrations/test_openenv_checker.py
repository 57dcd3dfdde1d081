"""The checker of OpenEnv servers finds what is wrong with one."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from typing import Any

import pytest
from typer.testing import CliRunner

from dreamgym.cli import app
from dreamgym.integrations import openenv_server
from dreamgym.integrations.serving import Observation, ServedEnvironment, Session
from dreamgym.testing import CorridorFactory
from dreamgym.testing.env_checker import Check
from dreamgym.testing.openenv_checker import CHECKS, check_openenv
from tests.integrations.served_corridor import served_in_a_thread, serving

FACTORY = CorridorFactory(length=4, horizon=8)


async def checked(actions: Sequence[str] = ()) -> dict[str, Check]:
    async with serving(ServedEnvironment("corridor", open_real=lambda: FACTORY)) as (_, url):
        report = await check_openenv(url, actions=actions, sessions=8, episodes=60)
        assert [each.name for each in report.checks] == list(CHECKS)
        return {each.name.partition(":")[2].strip(): each for each in report.checks}


async def test_our_own_server_passes_and_a_simple_learner_learns_on_it() -> None:
    found = await checked()
    assert {each.status for each in found.values()} == {"pass"}
    assert "tabular learner" in found["returns differ, and a simple learner raises them"].detail


async def test_a_reward_for_what_the_client_claims_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    step = Session.step

    async def believing(self: Session, text: str) -> Observation:
        found = await step(self, text)
        return found.model_copy(update={"reward": 1.0}) if "reward" in text else found

    monkeypatch.setattr(Session, "step", believing)
    found = await checked()
    assert "a made-up outcome" in found["hostile actions earn nothing"].detail
    assert [each.status for each in found.values()].count("fail") == 1


async def test_dice_and_hidden_fields_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    number = itertools.count()
    wire = openenv_server._wire

    def leaky(observation: Observation) -> dict[str, Any]:
        found = wire(observation)
        found["observation"]["text"] += f" ({next(number)})"
        found["observation"]["metadata"] = {"answer": 42}
        return found

    monkeypatch.setattr(openenv_server, "_wire", leaky)
    found = await checked(["open door"])
    assert "'answer'" in found["observations and tasks show nothing hidden"].detail
    assert found["the same task, seed and actions give the same episode"].status == "fail"


def test_the_command_reports_on_a_server_and_explains_what_is_missing() -> None:
    with served_in_a_thread(FACTORY) as url:
        words = ["envs", "check", "--url", url, "--episodes", "40", "--concurrency", "4", "--json"]
        done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["passed"] is True
    nothing = CliRunner().invoke(app, ["envs", "check"])
    assert (nothing.exit_code, "--url" in nothing.output) == (2, True)
    nobody = CliRunner().invoke(app, ["envs", "check", "--url", "http://127.0.0.1:9"])
    assert (nobody.exit_code, "127.0.0.1:9" in nobody.output) == (7, True)
