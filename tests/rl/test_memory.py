"""Tokens per pass from measured bytes per token and free memory, and what happens if it was too much."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from dreamgym.errors import ConfigError
from dreamgym.models.tiny import make_model, save
from dreamgym.rl import gradients, optimizers
from dreamgym.rl.memory import measure_pass
from dreamgym.rl.sft import SFT
from dreamgym.training.agent import Agent
from tests.rl.echo_environment import TOKENIZER
from tests.rl.test_sft_dpo import episodes


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save(make_model("nano", TOKENIZER, family="llama"), TOKENIZER, tmp_path / "base")
    return tmp_path / "base"


async def opened(folder: Path, micro_tokens: int | str, **settings: Any) -> tuple[Agent, SFT]:
    agent = Agent.load(f"hf:{folder}", **settings)
    data = await episodes(str)
    return agent, SFT(agent, data, steps=3, batch_size=4, learning_rate=1e-2, micro_tokens=micro_tokens)


def fitting(sft: SFT) -> int:
    return sft._optimizer.micro_tokens(sft.packed.all)


async def test_auto_takes_fewer_tokens_where_less_memory_is_free(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts = []
    for free in (1 << 24, 1 << 26):
        monkeypatch.setattr(optimizers, "free_memory", lambda device, free=free: free)
        _, sft = await opened(folder, "auto")
        counts.append(fitting(sft))
    assert 64 < counts[0] < counts[1] < 1 << 16
    _, fixed = await opened(folder, 100)
    assert fitting(fixed) == 100


async def test_bf16_and_gradient_checkpointing_make_room_for_more_tokens(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(optimizers, "free_memory", lambda device: 1 << 25)
    settings: list[dict[str, Any]] = [{}, {"precision": "bf16"}, {"gradient_checkpointing": True}]
    plain, half, checkpointed = [fitting((await opened(folder, "auto", **each))[1]) for each in settings]
    assert half >= plain
    assert checkpointed > plain


async def test_the_bytes_per_token_are_those_of_the_whole_pass(folder: Path) -> None:
    """Measured on 64 tokens, within 30% of a pass over everything."""
    _, sft = await opened(folder, 1 << 20)
    model, sequences = sft._optimizer.logprobs, sft.packed.all
    kept: dict[int, int] = {p.untyped_storage().data_ptr(): 0 for p in model.model.parameters()}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept.setdefault(tensor.untyped_storage().data_ptr(), tensor.untyped_storage().nbytes())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        model(sequences)
    width = max(len(each.tokens) for each in sequences)
    measured = sum(kept.values()) / (width * len(sequences))
    assert measure_pass(model, sequences).per_token == pytest.approx(measured, rel=0.3)


async def test_an_update_that_does_not_fit_is_repeated_with_half_as_many_tokens(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    agent, sft = await opened(folder, 8192)
    sft.step()
    expected = agent.weights()
    passes: list[int] = []
    accumulate = gradients.accumulate

    def crowded(parameters: Any, losses: Any, **settings: Any) -> dict[str, float]:
        passes.append(len(losses))
        if len(losses) == 1:
            accumulate(parameters, losses, **settings)  # what it has added must not count
            raise torch.cuda.OutOfMemoryError("CUDA out of memory")
        return accumulate(parameters, losses, **settings)

    monkeypatch.setattr(gradients, "accumulate", crowded)
    monkeypatch.setattr(optimizers, "runs_in_parallel", lambda parameters: False)
    monkeypatch.setattr(optimizers, "free_memory", lambda device: 1 << 40)
    agent, sft = await opened(folder, "auto")
    sft.step()
    assert passes[0] == 1
    assert passes[-1] > 1
    for name, weight in agent.weights().items():
        torch.testing.assert_close(weight, expected[name], rtol=1e-4, atol=1e-6)


async def test_a_number_that_was_set_is_kept_and_the_way_out_is_named(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def crowded(*_: Any, **__: Any) -> dict[str, float]:
        raise torch.cuda.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(gradients, "accumulate", crowded)
    for micro_tokens in (8192, "auto"):
        _, sft = await opened(folder, micro_tokens)
        with pytest.raises(ConfigError, match=r"agent\.gradient_checkpointing=true"):
            sft.step()
