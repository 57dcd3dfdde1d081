"""Gradients on two processes: those of one process, whatever happens to the other one."""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from dreamgym.config import LearnerConfig
from dreamgym.errors import GradientsFailedError
from dreamgym.experience.dataset import Example
from dreamgym.models.local.tokens import TextCodec
from dreamgym.rl import data_parallel
from dreamgym.rl.data_parallel import GradientProcesses
from dreamgym.rl.dpo import DPO, preference_pairs
from dreamgym.rl.gradients import GradientModel
from dreamgym.rl.grpo import GRPO
from dreamgym.rl.optimizers import TrainableModel
from dreamgym.rl.ppo import PPO
from dreamgym.rl.sft import SFT
from dreamgym.training.fine_tuning import FineTuning
from dreamgym.training.model_setup import LoadedModel
from dreamgym.types import RolloutGroup
from tests.invariants.test_learners import WANDERING, Gradients, recorded
from tests.processes import with_word
from tests.rl.echo_environment import TOKENIZER, WORDS, after, nano_model
from tests.rl.test_sft_dpo import episodes, next_word

Step = Callable[[], dict[str, Any]]
KEPT: list[Step] = []
"""Learners that keep their processes, so that they are started once for all tests."""


def processes() -> list[psutil.Process]:
    """Of this test that compute gradients."""
    return with_word(psutil.Process().children(), data_parallel.__name__)


async def step_of(name: str, agent: TrainableModel, count: int) -> Step:
    """An update by this learner."""
    if name == "fine-tuning":
        return fine_tuning(agent, count)
    config = LearnerConfig(processes=count, max_grad_norm=1e9, kl_coef=0.1, entropy_coef=0.01)
    if name in ("sft", "dpo"):
        shown, mistakes = await episodes(str), await episodes(next_word)
        if name == "sft":
            return SFT(agent, shown, config, batch_size=4).step
        return DPO(agent, preference_pairs([*shown, *mistakes]), config, batch_size=4).step
    groups = await recorded(WANDERING)
    learner = GRPO(agent, config) if name == "grpo" else PPO(agent, config, next_prompt=after(WANDERING))
    return lambda: learner.update(groups)


def fine_tuning(agent: TrainableModel, count: int) -> Step:
    """An update of an experience model."""
    loaded = LoadedModel(
        model=agent.model,
        tokenizer=TOKENIZER,
        sft_rates={"learning_rate": 1e-3, "muon_lr": 0.02},
        precision="fp32",
        updating=agent.updating,
    )
    examples = [
        Example(prompt=f"state: {word} action: ", reply=next_word(word), trajectory_id=word, position=0)
        for word in WORDS
    ]
    run = FineTuning(
        *(loaded, TextCodec(TOKENIZER), examples, []), folder=Path(), steps=9, batch_size=4, processes=count
    )

    def step() -> dict[str, Any]:
        run._step()
        return {"loss": run.progress.loss}

    return step


async def test_two_processes_have_the_gradients_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    shared, add = list[int](), GradientProcesses.add

    def counted(self: GradientProcesses, parts: Any, loss_of: Any) -> dict[str, float]:
        shared.append(len(parts))
        return add(self, parts, loss_of)

    monkeypatch.setattr(GradientProcesses, "add", counted)
    for name in ("sft", "grpo", "ppo", "dpo", "fine-tuning"):
        watches, metrics = [], []
        for count in (1, 2):
            model = nano_model()
            watches.append(Gradients(model))
            step = await step_of(name, TrainableModel(model, watches[-1].updating), count)
            metrics.append({key: value for key, value in step().items() if key != "seconds"})
            KEPT.append(step)
        [alone], [together] = (watch.seen for watch in watches)
        assert alone.keys() == together.keys()
        largest = max(float(gradient.abs().max()) for gradient in alone.values())
        assert largest > 1e-3
        for parameter, gradient in alone.items():
            torch.testing.assert_close(together[parameter], gradient, atol=1e-6 * largest, rtol=1e-6)
        assert metrics[1] == pytest.approx(metrics[0], rel=1e-5, abs=1e-6)
        assert shared.pop() > 1, "both processes had a part"


def learner(count: int) -> GRPO:
    return GRPO(TrainableModel(nano_model()), processes=count, learning_rate=1e-3)


async def test_a_killed_process_and_another_number_of_processes_change_nothing() -> None:
    """And a learner that is gone leaves no process behind."""
    groups: list[RolloutGroup] = await recorded(WANDERING)
    alone, together = learner(1), learner(2)
    for _ in range(2):
        alone.update(groups)
    together.update(groups)
    [process] = processes()
    os.kill(process.pid, signal.SIGKILL)
    together.update(groups)
    again = learner(1)
    again.load_state_dict(together.state_dict())
    for each in (alone, together, again):
        assert each.update(groups)["updates"] == 1
    expected = alone.state_dict()["model"]
    for each in (together, again):
        for name, weight in each.state_dict()["model"].items():
            torch.testing.assert_close(weight, expected[name], atol=1e-5, rtol=1e-5)
    KEPT.clear()
    del together, each
    gc.collect()
    assert processes() == []


def test_processes_that_always_die_end_the_run_with_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.executable", "/bin/false")
    model = GradientModel(nano_model())
    with pytest.raises(GradientsFailedError, match="lost 3 times"):
        GradientProcesses(model, 3).add([], print)  # type: ignore[arg-type]
