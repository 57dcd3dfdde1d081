"""A word-level tokenizer built from a corpus, and small causal LMs with random weights that train on a CPU.

Frequent words are single tokens: copying a fact from the context means copying a few tokens, which a small
model can learn. Unknown words are encoded as bytes, so encoding and decoding any string returns the string.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors
from torch import nn
from transformers import (
    Lfm2Config,
    Lfm2ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

from dreamgym.config import nearest_name
from dreamgym.errors import ConfigError

PAD, END, BEGIN = "<pad>", "<eos>", "<bos>"
SPECIAL_TOKENS = (PAD, END, BEGIN)
_WORDS = r" ?\p{L}+| ?\p{N}{1,3}| ?[^\s\p{L}\p{N}]| {2,}|\s"
"""Words, numbers of up to three digits and punctuation, each with the space before it; other white space.
A run of spaces is one token: counting spaces is hard to learn."""

Family = Literal["lfm2", "llama"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Preset:
    """The dimensions of a small model."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    feed_forward: int
    context: int = 2048


PRESETS = {
    "nano": Preset(hidden=32, layers=3, heads=2, kv_heads=1, feed_forward=64, context=1024),
    "tiny": Preset(hidden=128, layers=4, heads=4, kv_heads=2, feed_forward=320),
    "small": Preset(hidden=256, layers=6, heads=8, kv_heads=2, feed_forward=640),
}
"""About 30 thousand, 0.7 and 4.2 million parameters, plus `hidden` per token of the vocabulary."""


def make_tokenizer(texts: Iterable[str], vocab_size: int = 4096) -> PreTrainedTokenizerFast:
    """Build a tokenizer whose vocabulary holds the most frequent words, with and without a leading space.

    Args:
        vocab_size: maximum number of tokens; 259 of them are bytes and special tokens.
    """
    size = vocab_size - len(SPECIAL_TOKENS) - 256
    if size < 0:
        raise ConfigError(
            f"expected a vocabulary of at least {len(SPECIAL_TOKENS) + 256} tokens, got {vocab_size}"
        )
    split = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_WORDS), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    counts: Counter[str] = Counter()
    for text in texts:
        counts.update(word for word, _ in split.pre_tokenize_str(text))
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = _most_frequent(counts, size)
    # With equal scores the split into the fewest tokens wins: a known word is one token.
    pieces = [(token, 0.0) for token in SPECIAL_TOKENS]
    pieces += [(byte, -1.5) for byte in alphabet]
    pieces += [(word, -1.0) for word in words]
    core = Tokenizer(models.Unigram(pieces, unk_id=0, byte_fallback=False))
    core.pre_tokenizer = split
    core.decoder = decoders.ByteLevel()
    begin = SPECIAL_TOKENS.index(BEGIN)
    core.post_processor = processors.TemplateProcessing(single=f"{BEGIN} $A", special_tokens=[(BEGIN, begin)])
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token=PAD,
        eos_token=END,
        bos_token=BEGIN,
        clean_up_tokenization_spaces=False,
    )


def number_tokens(tokenizer: Any) -> list[tuple[int, ...]]:
    """`word_tokens` of all numbers in the vocabulary, as in "drawer 12" and "click('12')"."""
    words = {piece.removeprefix("Ġ") for piece in tokenizer.get_vocab()}
    return word_tokens(tokenizer, {word for word in words if word.isdecimal()})


def word_tokens(tokenizer: Any, words: Collection[str]) -> list[tuple[int, ...]]:
    """Token ids of each word: with a leading space, and without where that is one token, too. Words that take
    more than one token with a leading space are left out."""
    vocabulary = tokenizer.get_vocab()
    known = (word for word in words if f"Ġ{word}" in vocabulary)
    forms = ([f"Ġ{word}", word] for word in known)
    return sorted(tuple(vocabulary[form] for form in each if form in vocabulary) for each in forms)


def _most_frequent(counts: Counter[str], size: int) -> list[str]:
    """Words of more than one byte, most frequent first, each with and without a leading space."""
    space = "Ġ"
    totals: Counter[str] = Counter()
    for word, count in counts.items():
        totals[word.removeprefix(space)] += count
    words: list[str] = []
    for word, _ in sorted(totals.items(), key=lambda item: (-item[1], item[0])):
        words += [form for form in (space + word, word) if len(form) > 1]
    return words[:size]


def make_model(preset: str, tokenizer: Any, *, family: Family = "lfm2", seed: int = 0) -> Any:
    """Create the family's transformers model with random weights, determined by the seed."""
    if preset not in PRESETS:
        raise ConfigError(f"unknown preset {preset!r}{nearest_name(preset, list(PRESETS))}")
    shape = PRESETS[preset]
    settings: dict[str, Any] = {
        "vocab_size": len(tokenizer),
        "hidden_size": shape.hidden,
        "intermediate_size": shape.feed_forward,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "max_position_embeddings": shape.context,
        "tie_word_embeddings": True,
        "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "initializer_range": shape.hidden**-0.5 / 2,
    }
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        if family == "llama":
            model: Any = LlamaForCausalLM(LlamaConfig(**settings))
        else:
            # A convolution mixes the preceding tokens into each token before each attention layer. Its width
            # of 5 distinguishes "mug 1," from "mug 2," when attention looks up the next item of a list.
            kinds = ["full_attention" if layer % 2 else "conv" for layer in range(shape.layers)]
            settings |= {"layer_types": kinds, "conv_L_cache": 5, "block_auto_adjust_ff_dim": False}
            model = Lfm2ForCausalLM(Lfm2Config(**settings))
        _scale_residual_projections(model, shape.layers)
    return model.eval()


def _scale_residual_projections(model: nn.Module, layers: int) -> None:
    """Scale down projections into the residual stream, so that its variance does not grow with depth."""
    for name, parameter in model.named_parameters():
        if name.endswith(("o_proj.weight", "out_proj.weight", "down_proj.weight", "w2.weight")):
            parameter.data.mul_((2 * layers) ** -0.5)


def save(model: Any, tokenizer: Any, folder: Path) -> None:
    """Write the Hugging Face format, which `LocalLanguageModel.load` and transformers read."""
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
