"""Thousands of requests of a training run through a storm in which the server also dies and comes back."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dreamgym.config import Config, EndpointConfig
from dreamgym.data.trajectories import read_trajectories
from dreamgym.models.registry import LanguageModels
from dreamgym.models.usage import UsageRow
from dreamgym.protocols import LanguageModel
from dreamgym.training.trainer import train
from dreamgym.types import CompletionRequest, Prediction, State, Task, Transition, WorldSheet
from tests.chaos import ChaosPlan, ChaosProxy
from tests.scripted_server import ScriptedServer
from tests.training.test_paid_training import learnt
from tests.training.training_run import FACTORY, CorridorDream, record, run, settings

ENOUGH = 700
STORM = ChaosPlan(
    seed=8, limited=0.03, failing=0.03, dropped=0.03, slow=0.02, drip=0.02, truncated=0.03, cut_json=0.02,
    empty=0.02, not_json=0.02, wrong_shape=0.02, silent=0.02, delay=0.02, retry_after=0.01,
)  # fmt: skip
WORDS = (
    "train.steps=3",
    "train.tasks_per_step=8",
    "train.group_size=8",
    "train.monitors=off",
    "train.gate=off",
    "train.save_groups=8",
)


class ServedTextDream(CorridorDream):
    """Knows the rules, but shows the policy what the server says; no question is asked twice."""

    def __init__(self, model: LanguageModel) -> None:
        self._model = model
        self._seeds = itertools.count()

    async def predict(
        self, task: Task, sheet: WorldSheet, history: Sequence[Transition], state: State, action: str
    ) -> Prediction:
        found = await super().predict(task, sheet, history, state, action)
        request = CompletionRequest(
            prompt=found.outcome.next_state.text, max_tokens=40, temperature=1.0, seed=next(self._seeds)
        )
        said = await self._model.complete(request)
        return replace(found, outcome=replace(found.outcome, next_state=State(text=said.text)))


async def practise(folder: Path, url: str) -> UsageRow:
    near = EndpointConfig(
        url=url, model="scripted", max_attempts=20, timeout_seconds=20, backoff_seconds=0.02, concurrency=128
    )
    started = f'train.init_from="{folder.parent / "warm" / "run"}"'
    config = settings(folder, "train.mode=dream", *WORDS, started)
    config = Config.model_validate(
        config.model_dump() | {"endpoints": {"near": near.model_dump(mode="json")}}
    )
    async with LanguageModels(config, folder=folder) as models:
        dream: Any = ServedTextDream(models.open("endpoint:near", role="experience"))
        summary = await train(config, real=FACTORY, experience_model=dream)
        assert summary["ended"] == "3 steps are done"
        return models.usage.total


@pytest.mark.slow
async def test_a_storm_of_failing_requests_changes_nothing_that_is_learnt_from(tmp_path: Path) -> None:
    await record(tmp_path / "offline")
    await run(settings(tmp_path / "warm", "train.mode=dream", "train.steps=0"))
    with ScriptedServer(lambda request: f"{request.prompt} It is quiet.") as server:
        fair = await practise(tmp_path / "fair", server.url)
        async with ChaosProxy(server.url, STORM) as proxy, asyncio.timeout(300):

            async def die_twice() -> None:
                for reached in (ENOUGH // 5, ENOUGH // 2):
                    while proxy.forwarded < reached:  # noqa: ASYNC110
                        await asyncio.sleep(0.01)
                    await proxy.stop()
                    await asyncio.sleep(0.5)
                    await proxy.start()

            killer = asyncio.create_task(die_twice())
            stormy = await practise(tmp_path / "stormy", proxy.url)
            await killer
    assert fair.requests > ENOUGH
    assert set(proxy.faults) == set(STORM.shares)
    assert stormy.retries > 0.1 * ENOUGH
    # Three malformed replies in a row to one request are a typed failure; its episode is played again.
    assert stormy.failures < 0.008 * ENOUGH
    assert stormy.requests >= fair.requests
    assert learnt(tmp_path / "stormy") == learnt(tmp_path / "fair")
    for each in read_trajectories(tmp_path / "stormy" / "run" / "trajectories"):
        assert all(turn.outcome.next_state.text.endswith("It is quiet.") for turn in each.transitions)
