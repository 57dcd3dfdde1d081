"""Training with a dream that asks an endpoint: storms change nothing, and a spent budget only pauses it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from dreamgym.config import Config
from dreamgym.models.registry import LanguageModels
from dreamgym.protocols import LanguageModel
from dreamgym.training.metrics import Row, read_metrics
from dreamgym.training.trainer import train
from dreamgym.types import CompletionRequest, Prediction, State, Task, Transition, WorldSheet
from tests.chaos import ChaosPlan, ChaosProxy
from tests.models.scripted_endpoint import Served, served
from tests.training.training_run import FACTORY, CorridorDream, record, run, settings

WORDS = ("train.mode=dream", "train.steps=3", "train.monitors=off", "train.gate=off")


class AskingDream(CorridorDream):
    """Knows the rules, but asks a language model before each answer, as a prompted one would."""

    def __init__(self, model: LanguageModel) -> None:
        self._model = model

    async def predict(
        self, task: Task, sheet: WorldSheet, history: Sequence[Transition], state: State, action: str
    ) -> Prediction:
        asked = f"{task.id} {len(history)} {state.text} {action}"[:200]
        await self._model.complete(CompletionRequest(prompt=asked, max_tokens=2, stop=("\n",)))
        return await super().predict(task, sheet, history, state, action)


def reported(value: Any) -> Any:
    """A row of metrics without times and what was spent: what it says about learning."""
    if not isinstance(value, dict):
        return value
    return {k: reported(v) for k, v in value.items() if "seconds" not in k and k not in ("spent", "time")}


async def practise(folder: Path, server: Served, *words: str, url: str | None = None) -> dict[str, Any]:
    named = server.settings(url=url or server.url, max_attempts=20, timeout_seconds=20).model_dump(
        mode="json"
    )
    started = f'train.init_from="{folder.parent / "warm" / "run"}"'
    config = settings(folder, *WORDS, started, *words)
    config = Config.model_validate(config.model_dump() | {"endpoints": {"near": named}})
    async with LanguageModels(config, folder=folder) as models:
        dream = AskingDream(models.open("endpoint:near", role="experience"))
        summary = await train(config, real=FACTORY, experience_model=dream)
        return {**summary, "paid": models.usage.total, "rows": models.usage.rows}


def learnt(folder: Path) -> list[Row]:
    rows = read_metrics(folder / "run" / "metrics.jsonl")
    return [reported(row) for row in rows if row["kind"] == "train"]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("paid")
    asyncio.run(record(home / "offline"))
    asyncio.run(run(settings(home / "warm", "train.mode=dream", "train.steps=0")))
    return home


@pytest.mark.slow
async def test_a_run_through_a_storm_or_a_spent_budget_learns_what_it_would_have_learnt(home: Path) -> None:
    storm = ChaosPlan(
        seed=5, limited=0.06, failing=0.06, dropped=0.06, truncated=0.06, not_json=0.03, empty=0.03,
        silent=0.02, retry_after=0.01,
    )  # fmt: skip
    async with served() as server, ChaosProxy(server.url, storm) as proxy:
        fair = await practise(home / "fair", server)
        assert any(row["learner"]["updates"] for row in learnt(home / "fair"))
        assert fair["ended"] == "3 steps are done"
        assert {stage for stage, _, _ in fair["rows"]} == {"train"}
        stormy = await practise(home / "stormy", server, url=proxy.url)
        assert sum(proxy.faults.values()) > 10
        assert stormy["paid"].retries > 10
        assert stormy["paid"].requests == fair["paid"].requests  # nothing is asked or counted twice
        assert learnt(home / "stormy") == learnt(home / "fair")

        enough = fair["paid"].requests
        poor = await practise(home / "poor", server, f"budget.requests={enough // 2}")
        assert poor["ended"].startswith(f"budget.requests={enough // 2}: ")
        assert poor["steps"] < 3
        assert poor["paid"].sent <= enough // 2
        richer = await practise(home / "poor", server, f"budget.requests={enough}")
        assert richer["ended"] == "3 steps are done"  # what the broken step had asked is in the cache
        assert richer["paid"].sent == enough
        assert learnt(home / "poor") == learnt(home / "fair")
