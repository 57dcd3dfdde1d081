"""Loads models to train, from scratch or pretrained, and chooses learning rates, device and precision."""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Collection, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from dreamgym.config import HF_PREFIX, AgentConfig, ExperienceConfig, nearest_name
from dreamgym.errors import ConfigError, MissingExtraError
from dreamgym.experience.dataset import Example
from dreamgym.models.hub import check_weights

if TYPE_CHECKING:
    from dreamgym.rl.optimizers import Updating

Precision: TypeAlias = Literal["fp32", "bf16"]
Names: TypeAlias = tuple[tuple[int, ...], ...]
"""A group of names without a meaning; each is the tokens of its forms, with and without a leading space."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    """A model with its tokenizer and the settings that suit it; learners take it as it is."""

    model: Any
    tokenizer: Any
    sft_rates: dict[str, float | None]
    """`learning_rate` and `muon_lr`."""
    precision: Precision
    exchangeable: tuple[Names, ...] = ()
    """Of these, the tokens are exchanged in fine-tuning; see `SFT`."""
    temperature: float = 1.0
    updating: Updating = nullcontext

    @property
    def end(self) -> int:
        """The token that closes a reply."""
        return int(self.tokenizer.eos_token_id)

    @property
    def context(self) -> int | None:
        """The most tokens that the model reads, if it has a limit."""
        return getattr(self.model.config, "max_position_embeddings", None)

    def merged(self) -> Any:
        """The model without adapters, in the standard format; it cannot be trained further."""
        if hasattr(self.model, "merge_and_unload"):
            return self.model.merge_and_unload()
        return self.model


def load_model(
    settings: ExperienceConfig, corpus: Sequence[Example], seed: int, *, names: Sequence[Collection[str]] = ()
) -> LoadedModel:
    """The model that an experience model is fine-tuned from; see `EnvironmentSpec.exchangeable` for
    `names`."""
    quiet_transformers()
    if settings.model.startswith(HF_PREFIX):
        return load_pretrained(settings, settings.model, seed, section="experience")
    from dreamgym.models import tiny

    check_adapter(settings, section="experience")
    texts = (example.prompt + example.reply for example in corpus)
    tokenizer = tiny.make_tokenizer(texts, vocab_size=settings.vocabulary)
    model = tiny.make_model(settings.model, tokenizer, family=settings.family, seed=seed)
    return LoadedModel(
        model=model.to(find_device(settings.device, section="experience")),
        tokenizer=tokenizer,
        sft_rates=sft_rates(settings),
        precision="bf16" if settings.precision == "bf16" else "fp32",
        exchangeable=exchangeable_tokens(settings, tokenizer, names),
    )


def exchangeable_tokens(
    settings: ExperienceConfig, tokenizer: Any, names: Sequence[Collection[str]]
) -> tuple[Names, ...]:
    """Groups of names that are exchanged in the examples of a model from scratch; none if pretrained."""
    from dreamgym.models import tiny

    if settings.model.startswith(HF_PREFIX):
        return ()
    groups = [tiny.number_tokens(tokenizer)] if settings.exchange_numbers else []
    groups += [tiny.word_tokens(tokenizer, words) for words in names]
    return tuple(map(tuple, groups))


def load_pretrained(
    settings: AgentConfig | ExperienceConfig,
    source: str,
    seed: int,
    *,
    section: str,
    from_scratch: bool = False,
) -> LoadedModel:
    """A model in the Hugging Face format (`source` is ``hf:NAME_OR_PATH``), with a LoRA adapter if the
    settings ask for one."""
    quiet_transformers()
    device = find_device(settings.device, section=section)
    precision = choose_precision(settings.precision, device, from_scratch=from_scratch)
    model, tokenizer = _read(source, lora=settings.adapter == "lora", precision=precision)
    if settings.adapter == "lora":
        model = with_lora(model, settings, source, seed, section)
    return LoadedModel(
        model=model.to(device), tokenizer=tokenizer, sft_rates=sft_rates(settings), precision=precision
    )


def sft_rates(settings: AgentConfig | ExperienceConfig) -> dict[str, float | None]:
    """Learning rates for supervised fine-tuning: large ones from scratch, small ones for pretrained weights.

    >>> sft_rates(AgentConfig()), sft_rates(AgentConfig(model="hf:base"))["learning_rate"]
    ({'learning_rate': 0.003, 'muon_lr': 0.02}, 2e-05)
    """
    chosen = settings.learning_rate if isinstance(settings, ExperienceConfig) else None
    if not settings.model.startswith(HF_PREFIX):
        rate = chosen or 3e-3
        return {"learning_rate": rate, "muon_lr": 0.02 * rate / 3e-3}
    usual = 2e-4 if settings.adapter == "lora" else 2e-5
    return {"learning_rate": chosen or usual, "muon_lr": None}


def check_adapter(settings: AgentConfig | ExperienceConfig, *, section: str) -> None:
    if settings.adapter != "none":
        raise ConfigError(
            f"{section}.adapter={settings.adapter!r} adapts pretrained weights, which "
            f"{section}.model={settings.model!r} has none of; choose hf:NAME_OR_PATH, or adapter none"
        )


def check_model(settings: AgentConfig | ExperienceConfig, *, section: str) -> None:
    """Check the name of a model, its adapter and its device before anything starts."""
    find_device(settings.device, section=section)
    name = settings.model
    if name.startswith(HF_PREFIX):
        check_weights(name.removeprefix(HF_PREFIX))
        if settings.adapter == "lora" and importlib.util.find_spec("peft") is None:
            raise MissingExtraError(f"{section}.adapter='lora'", "lora")
        return
    from dreamgym.models import tiny

    if name not in tiny.PRESETS:
        raise ConfigError(
            f"unknown {section}.model={name!r}{nearest_name(name, list(tiny.PRESETS))}; "
            "pretrained weights are named hf:NAME_OR_PATH"
        )
    check_adapter(settings, section=section)


def find_device(device: str, *, section: str) -> str:
    import torch

    available = {"cuda": torch.cuda.is_available(), "mps": bool(torch.backends.mps.is_available())}
    if not available.get(device, True):
        raise ConfigError(
            f"{section}.device={device!r} needs a GPU that torch can use, found none; choose auto or cpu"
        )
    if device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    return device


def choose_precision(precision: str, device: str, *, from_scratch: bool) -> Precision:
    """``auto`` is bf16 for pretrained weights on a GPU that has it, else fp32: the same seed gives the same
    numbers on processors with and without bf16."""
    import torch

    if precision == "auto":
        gpu = device == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
        return "bf16" if gpu and not from_scratch else "fp32"
    return "bf16" if precision == "bf16" else "fp32"


def quiet_transformers() -> None:
    """Turns off warnings about missing GPU kernels, and progress bars."""
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()


def _read(source: str, *, lora: bool, precision: Precision) -> tuple[Any, Any]:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    name = source.removeprefix(HF_PREFIX)
    check_weights(name)
    # Trained weights stay in fp32, or small updates would be lost in rounding; frozen ones may be bf16.
    dtype = torch.bfloat16 if lora and precision == "bf16" else torch.float32
    try:
        tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=False)
        model: Any = AutoModelForCausalLM.from_pretrained(name, dtype=dtype, trust_remote_code=False)
    except Exception as error:  # files of others fail in many ways
        raise ConfigError(
            f"cannot read a language model from {source!r}: {error}; "
            "expected hf: and a folder in the Hugging Face format, or a name that transformers can find"
        ) from error
    rows = model.get_input_embeddings().weight.shape[0]
    if tokenizer.eos_token_id is None or tokenizer.eos_token_id >= rows:
        raise ConfigError(
            f"{source!r}: expected a tokenizer with an end token (eos_token) among the model's "
            f"{rows}, got {tokenizer.eos_token_id!r}; without one no reply would end: set eos_token in its "
            "tokenizer_config.json, or choose another model"
        )
    return model, tokenizer


def with_lora(
    model: Any, settings: AgentConfig | ExperienceConfig, source: str, seed: int, section: str
) -> Any:
    """The model with a LoRA adapter, which PEFT puts into its layers; all other weights are frozen."""
    try:
        from peft import LoraConfig, get_peft_model
    except ImportError:
        raise MissingExtraError(f"{section}.adapter='lora'", "lora") from None
    import torch

    config = LoraConfig(
        r=settings.lora_rank,
        lora_alpha=2 * settings.lora_rank,
        target_modules="all-linear",
        task_type="CAUSAL_LM",
    )
    try:
        with torch.random.fork_rng(), warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="fan_in_fan_out")  # PEFT corrects it by itself
            torch.manual_seed(seed)
            return get_peft_model(model, config)
    except ValueError as error:
        raise ConfigError(
            f"{source!r} has no layers that LoRA can adapt: {error}; "
            f"set {section}.adapter to none to train all weights"
        ) from None
