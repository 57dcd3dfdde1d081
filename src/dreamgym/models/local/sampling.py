"""Samples the next token of every row: greedy, temperature, top-p, by a seed, or among given choices.

Tokens are drawn by inverting the cumulative distribution at one uniform number per row. The number is a hash
of the request's seed and the token's position, so it is independent of the rest of the batch, of the order of
arrival and of generator state.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

_SMALLEST_TEMPERATURE = 1e-6
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Sampling parameters of the rows of one batch; rebuilt only when the batch changes."""

    seeds: npt.NDArray[np.uint64]
    temperature: Tensor
    """`(n, 1)`; rows at temperature 0 hold 1 here and are marked in `greedy`."""
    top_p: Tensor
    """`(n, 1)`"""
    greedy: Tensor
    """`(n,)`"""
    all_greedy: bool
    any_top_p: bool

    @classmethod
    def of(
        cls, seeds: list[int], temperatures: list[float], top_ps: list[float], device: torch.device
    ) -> SamplingParams:
        # Below this, logits divided by the temperature overflow: the likeliest token has all probability.
        greedy = [temperature < _SMALLEST_TEMPERATURE for temperature in temperatures]
        return cls(
            seeds=np.array([seed & 0xFFFFFFFFFFFFFFFF for seed in seeds], dtype=np.uint64),
            temperature=torch.tensor(
                [1.0 if low else t for t, low in zip(temperatures, greedy, strict=True)], device=device
            )[:, None],
            top_p=torch.tensor(top_ps, device=device)[:, None],
            greedy=torch.tensor(greedy, device=device),
            all_greedy=all(greedy),
            any_top_p=any(top_p < 1 for top_p in top_ps),
        )


def uniforms(seeds: npt.NDArray[np.uint64], positions: npt.NDArray[np.uint64]) -> npt.NDArray[np.float64]:
    """One number in [0, 1) per (seed, position), always the same.

    >>> zeros = np.zeros(3, dtype=np.uint64)
    >>> uniforms(zeros, np.arange(3, dtype=np.uint64)).round(3).tolist()
    [0.282, 0.652, 0.701]
    """
    mixed = _scramble(_scramble(seeds + _GOLDEN) + positions * _GOLDEN)
    # 32 bits: times a total in double precision, the product stays below the total.
    return (mixed >> np.uint64(32)).astype(np.float64) * 2.0**-32


def _scramble(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """The finaliser of SplitMix64; wraps context on purpose."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def sample_tokens(logits: Tensor, params: SamplingParams, positions: npt.NDArray[np.uint64]) -> Tensor:
    """The sampled token of each row, `(n,)`, from logits `(n, vocabulary)`; forbidden tokens are -inf."""
    if params.all_greedy:
        return _argmax(logits)
    probabilities = (logits / params.temperature).softmax(-1)
    if params.any_top_p:
        probabilities = _within_top_p(probabilities, params.top_p)
    # Single precision loses the tail of a large vocabulary. The search is to the right of equal values, so a
    # token of probability 0 is never found.
    cumulative = probabilities.cumsum(-1, dtype=torch.float64)
    numbers = torch.from_numpy(uniforms(params.seeds, positions)).to(logits.device)[:, None]
    drawn = torch.searchsorted(cumulative, numbers * cumulative[:, -1:], right=True)[:, 0]
    drawn = drawn.clamp_(max=logits.shape[-1] - 1)  # only where a row is not finite
    return torch.where(params.greedy, _argmax(logits), drawn) if bool(params.greedy.any()) else drawn


def _argmax(logits: Tensor) -> Tensor:
    # numpy's argmax is ten times as fast as torch's on a CPU.
    return torch.from_numpy(logits.numpy().argmax(-1)) if logits.is_cpu else logits.argmax(-1)


def _within_top_p(probabilities: Tensor, top_p: Tensor) -> Tensor:
    """Zero for tokens outside the smallest set with `top_p` of the probability; equal ones stay together.

    The order of the vocabulary is kept, so that rows with top_p 1 are drawn as without this filter.
    """
    ordered = probabilities.sort(-1, descending=True).values
    before = ordered.cumsum(-1) - ordered
    least = ordered.masked_fill(before >= top_p, torch.inf).amin(-1, keepdim=True)
    return torch.where((probabilities >= least) | (top_p >= 1), probabilities, 0.0)


@dataclass(slots=True)
class TrieNode:
    """A node of the trie of tokenized choices."""

    children: dict[int, TrieNode] = field(default_factory=dict)
    choice: str | None = None
    """The choice that is complete here."""

    def allowed(self, terminator: int) -> list[int]:
        """Tokens that may come next; the terminator only where a choice is a prefix of another."""
        return [*self.children, terminator] if self.choice is not None else list(self.children)

    def after(self, token: int) -> TrieNode:
        """The next node; the terminator ends at the choice that is complete here."""
        return self.children.get(token) or TrieNode(choice=self.choice)

    @property
    def is_leaf(self) -> bool:
        return not self.children

    @property
    def needs_terminator(self) -> bool:
        """Whether a choice is a prefix of another (or empty), here or below."""
        below = self.children.values()
        return (self.choice is not None and bool(below)) or any(child.needs_terminator for child in below)


def build_trie(choices: Sequence[tuple[str, Sequence[int]]]) -> TrieNode:
    """The trie of choices, each with its tokens.

    >>> root = build_trie([("go", [5]), ("go on", [5, 6]), ("stop", [7])])
    >>> root.allowed(0), root.after(5).allowed(0), root.after(5).after(0).choice, root.after(7).is_leaf
    ([5, 7], [6, 0], 'go', True)
    """
    root = TrieNode()
    for choice, tokens in choices:
        node = root
        for token in tokens:
            node = node.children.setdefault(token, TrieNode())
        node.choice = choice
    return root
