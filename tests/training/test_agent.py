"""Agents of pretrained weights: precision, gradient checkpointing, and learning rates by kind of model."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from dreamgym.errors import ConfigError
from dreamgym.models.local.language_model import LocalLanguageModel
from dreamgym.models.tiny import make_model, save
from dreamgym.rl.grpo import GRPO
from dreamgym.rl.sft import SFT
from dreamgym.training.agent import Agent
from tests.rl.echo_environment import TOKENIZER
from tests.rl.test_sft_dpo import episodes


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save(make_model("nano", TOKENIZER, family="llama"), TOKENIZER, tmp_path / "base")
    return tmp_path / "base"


async def trained(folder: Path, **settings: Any) -> tuple[dict[str, torch.Tensor], list[float], int]:
    """Weights and losses of three updates, and how often the first layer ran."""
    async with Agent.load(f"hf:{folder}", **settings) as agent:
        calls: list[int] = []
        base = agent.model.get_base_model() if settings.get("lora") else agent.model
        base.model.layers[0].self_attn.register_forward_pre_hook(lambda *_: calls.append(1))
        sft = SFT(agent, await episodes(str), steps=3, batch_size=4, learning_rate=1e-2)
        losses = [sft.step()["loss"] for _ in range(3)]
        assert not any(module.training for module in agent.model.modules()), "still served in eval mode"
        return agent.weights(), losses, len(calls)


async def test_gradient_checkpointing_recomputes_layers_and_changes_no_weight(folder: Path) -> None:
    plain, losses, calls = await trained(folder)
    checkpointed, same_losses, more_calls = await trained(folder, gradient_checkpointing=True)
    assert more_calls - 3 >= 2 * (calls - 3)
    assert losses == pytest.approx(same_losses, rel=1e-6)
    for name, weight in plain.items():
        torch.testing.assert_close(checkpointed[name], weight)


@pytest.mark.parametrize("lora", [None, 4])
async def test_bf16_is_used_in_load_and_in_updates_while_trained_weights_stay_fp32(
    folder: Path, lora: int | None
) -> None:
    weights, losses, _ = await trained(folder, precision="bf16", lora=lora)
    exact = (await trained(folder, lora=lora))[1]
    assert {weight.dtype for weight in weights.values()} == {torch.float32}
    assert losses != exact
    assert losses == pytest.approx(exact, rel=0.05)
    async with Agent.load(f"hf:{folder}", precision="bf16", lora=lora) as agent:
        frozen = {p.dtype for p in agent.model.parameters() if not p.requires_grad}
        assert frozen == ({torch.bfloat16} if lora else set())


async def test_sft_rates_follow_the_kind_of_model(folder: Path) -> None:
    data = await episodes(str)
    async with Agent.load("nano", data=data) as scratch, Agent.load(f"hf:{folder}") as pretrained:
        rates = [SFT(agent, data, steps=1).config for agent in (scratch, pretrained)]
        assert [(config.learning_rate, config.muon_lr) for config in rates] == [(3e-3, 0.02), (2e-5, None)]
        assert SFT(scratch, data, learning_rate=1e-3).config.muon_lr == 0.02


async def test_an_agent_that_samples_greedily_cannot_be_trained(folder: Path) -> None:
    async with Agent.load(f"hf:{folder}", temperature=0.0) as agent:
        with pytest.raises(ConfigError, match="temperature above 0"):
            GRPO(agent)


@pytest.mark.parametrize("load", [Agent.load, LocalLanguageModel.load], ids=["trained", "served"])
def test_code_in_a_model_folder_is_never_run_even_if_somebody_would_say_yes(
    folder: Path, load: Callable[[str], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    ran = folder / "ran"
    (folder / "code.py").write_text(f"open({str(ran)!r}, 'w').close()", encoding="utf-8")
    names = {"AutoConfig": "code.Config", "AutoModelForCausalLM": "code.Model"}
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    changed = config | {"model_type": "strange", "auto_map": names}
    (folder / "config.json").write_text(json.dumps(changed), encoding="utf-8")
    answers = iter("yyyy")
    monkeypatch.setattr("builtins.input", lambda question="": next(answers))
    with pytest.raises(ConfigError, match="cannot read a language model"):
        load(f"hf:{folder}")
    assert not ran.exists()
    assert len(list(answers)) == 4, "nobody was asked"
