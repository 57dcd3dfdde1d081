"""Where a warm start ends that is measured in the dream."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from dreamgym.config import Config, TrainConfig, validate
from dreamgym.models.tiny import make_model, save
from dreamgym.training.agent import Agent
from dreamgym.training.run_dir import METRICS, RunDir
from dreamgym.training.warm_start import warm_start
from tests.rl.echo_environment import TOKENIZER
from tests.rl.test_sft_dpo import episodes


@pytest.mark.parametrize(
    ("cooldown", "reached", "updates", "start"),
    [(0.0, 0.4, 35, 35), (0.0, 0.9, 35, 30), (0.4, 0.4, 49, None)],
)
async def test_practice_starts_from_the_nearer_measured_policy_or_after_a_cooldown(
    tmp_path: Path, cooldown: float, reached: float, updates: int, start: int | None
) -> None:
    save(make_model("nano", TOKENIZER, family="llama"), TOKENIZER, tmp_path / "base")
    settings = {"warm_start_steps": 60, "warm_start_batch_size": 2, "warm_start_lr": 1e-3}
    settings |= {"warm_start_check_every": 5, "warm_start_success": 0.35, "warm_start_cooldown": cooldown}
    measured: dict[int, torch.Tensor] = {}
    async with Agent.load(f"hf:{tmp_path / 'base'}") as agent:

        async def enough(update: int) -> tuple[float, bool]:
            measured[update] = next(iter(agent.weights().values()))
            return (0.2, False) if update < 35 else (reached, True)

        config = Config(train=validate(TrainConfig, settings))
        await warm_start(agent, await episodes(str), config, RunDir(tmp_path), _ignore, enough=enough)
        final = next(iter(agent.weights().values()))
    assert list(measured) == [30, 35]
    assert [step for step, weight in measured.items() if torch.equal(weight, final)] == (
        [start] if start else []
    )
    rows = [json.loads(row) for row in (tmp_path / METRICS).read_text(encoding="utf-8").splitlines()]
    assert max(row["step"] for row in rows) == updates


def _ignore(*_: object) -> None:
    """No progress is shown."""
