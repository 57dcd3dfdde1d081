"""What is taught: a model from scratch with a tokenizer of its corpus, or pretrained weights, all or by LoRA.

Decides by the model and the hardware what the settings leave open: optimiser, learning rate, device and
precision. A finished student is a plain model: adapters are merged into the weights they adapt.
"""

from __future__ import annotations

import warnings
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from dreamgym.config import ExperienceConfig
from dreamgym.errors import ConfigError, MissingExtraError
from dreamgym.experience.dataset import Example

PREFIX = "hf:"
_FROM_SCRATCH, _PRETRAINED, _LORA = 3e-3, 2e-5, 2e-4
"""Learning rates of AdamW, unless the settings name one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    """A model with what belongs to teaching it."""

    model: Any
    tokenizer: Any
    optimiser: Literal["muon", "adamw"]
    learning_rate: float
    precision: Literal["fp32", "bf16"]
    context: int | None
    """The most tokens that the model reads, where it says so."""
    exchangeable: tuple[tuple[int, ...], ...] = ()
    """Tokens of numbers and words that only name things; see `Finetuning`."""

    @property
    def end(self) -> int:
        """The token that closes a reply."""
        return int(self.tokenizer.eos_token_id)

    def finished(self) -> Any:
        """The taught model without any adapter, as transformers reads it; teaching cannot go on from it."""
        if hasattr(self.model, "merge_and_unload"):
            return self.model.merge_and_unload()
        return self.model


def load_model(
    settings: ExperienceConfig,
    corpus: Sequence[Example],
    seed: int,
    *,
    names: Sequence[Collection[str]] = (),
) -> LoadedModel:
    """
    Args:
        names: groups of words that stand for one another, see `EnvironmentSpec.exchangeable`.

    Raises:
        ConfigError: there is no such model or device, or the model cannot be taught replies.
        MissingExtraError: LoRA is asked for and PEFT is not installed.
    """
    quiet_transformers()
    device = _device(settings)
    precision = _precision(settings, device)
    if settings.model.startswith(PREFIX):
        model, tokenizer = _pretrained(settings, precision, device)
        if settings.adapter == "lora":
            model = _with_lora(model, settings, seed)
        rate = _LORA if settings.adapter == "lora" else _PRETRAINED
        groups: list[list[int]] = []
    elif settings.adapter == "none":
        from dreamgym.models import tiny

        texts = (example.prompt + example.reply for example in corpus)
        tokenizer = tiny.make_tokenizer(texts, vocab_size=settings.vocabulary)
        model = tiny.make_model(settings.model, tokenizer, family=settings.family, seed=seed).to(device)
        rate = _FROM_SCRATCH
        groups = [tiny.number_tokens(tokenizer)] if settings.exchange_numbers else []
        if settings.exchange_names:
            groups += [tiny.word_tokens(tokenizer, words) for words in names]
    else:
        raise ConfigError(
            f"experience.adapter={settings.adapter!r} adapts pretrained weights, which "
            f"experience.model={settings.model!r} has none of; choose hf:NAME_OR_PATH, or adapter none"
        )
    return LoadedModel(
        model=model,
        tokenizer=tokenizer,
        optimiser="adamw" if settings.model.startswith(PREFIX) else "muon",
        learning_rate=settings.learning_rate or rate,
        precision=precision,
        context=getattr(model.config, "max_position_embeddings", None),
        exchangeable=tuple(map(tuple, groups)),
    )


def _pretrained(settings: ExperienceConfig, precision: str, device: str) -> tuple[Any, Any]:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    name = settings.model.removeprefix(PREFIX)
    # Weights that learn stay whole, or small steps would be lost in rounding; frozen ones may be halves.
    halves = precision == "bf16" and settings.adapter == "lora"
    try:
        tokenizer = AutoTokenizer.from_pretrained(name)
        model: Any = AutoModelForCausalLM.from_pretrained(
            name, dtype=torch.bfloat16 if halves else torch.float32
        )
    except Exception as error:  # files of others fail in many ways
        raise ConfigError(
            f"cannot read a language model from {settings.model!r}: {error}; "
            "expected hf: and a folder in the Hugging Face format, or a name that transformers can find"
        ) from error
    rows = model.get_input_embeddings().weight.shape[0]
    if tokenizer.eos_token_id is None or tokenizer.eos_token_id >= rows:
        raise ConfigError(
            f"{settings.model!r}: expected a tokenizer with an end token (eos_token) among the model's "
            f"{rows}, got {tokenizer.eos_token_id!r}; without one no reply would end: set eos_token in its "
            "tokenizer_config.json, or choose another model"
        )
    return model.to(device), tokenizer


def _with_lora(model: Any, settings: ExperienceConfig, seed: int) -> Any:
    try:
        from peft import LoraConfig, get_peft_model
    except ImportError:
        raise MissingExtraError("experience.adapter='lora'", "lora") from None
    import torch

    chosen = LoraConfig(
        r=settings.lora_rank,
        lora_alpha=settings.lora_alpha,
        target_modules="all-linear",
        task_type="CAUSAL_LM",
    )
    try:
        with torch.random.fork_rng(), warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="fan_in_fan_out")  # PEFT sets it right by itself
            torch.manual_seed(seed)
            return get_peft_model(model, chosen)
    except ValueError as error:
        raise ConfigError(
            f"{settings.model!r} has no layers that LoRA can adapt: {error}; "
            "set experience.adapter to none to teach all weights"
        ) from None


def _device(settings: ExperienceConfig) -> str:
    import torch

    if settings.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError(
            "experience.device='cuda' needs a GPU that torch can use, found none; choose auto or cpu"
        )
    if settings.device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    return settings.device


def _precision(settings: ExperienceConfig, device: str) -> Literal["fp32", "bf16"]:
    import torch

    if settings.precision != "auto":
        return settings.precision
    if device == "cuda":
        return "bf16" if torch.cuda.is_bf16_supported(including_emulation=False) else "fp32"
    # A CPU without instructions for it emulates bf16, many times slower than single precision.
    asked = (getattr(torch.cpu, f"_is_{name}_supported", None) for name in ("amx_tile", "avx512_bf16"))
    return "bf16" if any(ask is not None and ask() for ask in asked) else "fp32"


def quiet_transformers() -> None:
    """transformers talks about kernels that a CPU does not have, and draws bars of its own."""
    from transformers.utils import logging

    logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
