"""Small models with large random weights, so that token probabilities differ clearly."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch

from dreamgym.models.tiny import Family, make_model, make_tokenizer

# On a busy machine a second thread slows every small matrix product down.
torch.set_num_threads(1)

CORPUS = [
    "You are in the middle of a room. You see a fridge 1, a drawer 1, a drawer 2, and a shelf 12.\n",
    "go to fridge 1\nopen fridge 1\ntake apple 1 from fridge 1\nput apple 1 in drawer 2\nlook\ninventory\n",
    "You open the fridge 1. In it, you see a apple 1, and a cup 3. Nothing happens.\n",
]


@cache
def tokenizer() -> Any:
    return make_tokenizer(CORPUS)


def model(family: Family = "lfm2", *, seed: int = 0) -> Any:
    return spread(make_model("nano", tokenizer(), family=family, seed=seed), seed=seed)


def spread(made: Any, *, seed: int = 0, scale: float = 0.3) -> Any:
    """Draw weights large enough that the context changes the next token."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in made.parameters():
            if parameter.ndim == 1:
                parameter.copy_(1 + 0.2 * torch.randn(parameter.shape, generator=generator))
            else:
                parameter.copy_(scale * torch.randn(parameter.shape, generator=generator))
    return made.eval()


@torch.no_grad()
def own_logprobs(made: Any, prompt: Sequence[int], sampled: Sequence[int]) -> list[float]:
    """Log-probs of the sampled tokens from one forward pass of the transformers model."""
    logits = made(input_ids=torch.tensor([[*prompt, *sampled]]), use_cache=False).logits[0].float()
    logprobs = logits.log_softmax(-1)[len(prompt) - 1 : -1]
    return [float(row[token]) for row, token in zip(logprobs, sampled, strict=True)]


@torch.no_grad()
def generated(made: Any, prompt: Sequence[int], count: int) -> list[int]:
    """Greedy output of transformers' `generate` with a fixed length."""
    made.generation_config.eos_token_id = None
    inputs = torch.tensor([list(prompt)])
    output = made.generate(
        input_ids=inputs,
        attention_mask=torch.ones_like(inputs),
        max_new_tokens=count,
        do_sample=False,
        pad_token_id=0,
    )
    return [int(token) for token in output[0, len(prompt) :]]
