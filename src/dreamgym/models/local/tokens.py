"""Tokens: those of a prompt, the sampled ones, and their text.

Sampled tokens are never re-tokenized. The history of a conversation keeps the tokens of its text; a prompt
that continues this text keeps them and adds only the tokens of the new text.

The next token of a row is drawn by inverting the cumulative distribution at one uniform number. The number is
a hash of the request's seed and the token's position, so it is independent of the rest of the batch, of the
order of arrival and of generator state.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from tokenizers import Tokenizer
from torch import Tensor

from dreamgym.errors import ConfigError
from dreamgym.types import CompletionRequest

_LOST = "\ufffd"
_HISTORY_TOKENS = 1 << 24
_CACHED_TEXTS = 1 << 16
_SMALLEST_TEMPERATURE = 1e-6
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


class TextCodec:
    """A Hugging Face tokenizer with the operations that a growing conversation needs.

    The name of a special token inside a prompt (``<eos>`` in a web page) is tokenized as plain text, unless
    `parse_special_tokens` is set, which chat templates need.
    """

    def __init__(self, tokenizer: Any, *, parse_special_tokens: bool = False) -> None:
        self._tokenizer = tokenizer
        self._backend: Tokenizer | None = None
        if getattr(tokenizer, "is_fast", False):
            # A copy, since padding, truncation and the treatment of special tokens are settings of the
            # object.
            self._backend = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
            self._backend.no_padding()
            self._backend.no_truncation()
            self._backend.encode_special_tokens = not parse_special_tokens
        self._parse_special_tokens = parse_special_tokens
        self._short_texts: dict[str, list[int]] = {}
        self._pieces: list[str] | None = None
        self._watched: dict[tuple[str, ...], frozenset[int]] = {}
        plain = self._encode("a")
        self._anchor = plain[-1]
        # SentencePiece tokenizers put a space before every text.
        self._adds_space = str(tokenizer.convert_ids_to_tokens(plain[0])).startswith("▁")
        self._lead = self._find_lead(plain)

    def _find_lead(self, plain: list[int]) -> list[int]:
        """Tokens that the tokenizer puts before every text, e.g. a BOS token."""
        whole = [int(token) for token in self._tokenizer("a").input_ids]
        for start in range(len(whole)):
            if whole[start : start + len(plain)] == plain:
                return whole[:start]
        return []

    def start(self, text: str) -> list[int]:
        """Tokens of a text that begins a conversation: ``tokenizer(text)`` without an EOS token."""
        tokens = self._lead + self._encode(text)
        if tokens:
            return tokens
        for token in (self._tokenizer.bos_token_id, self._tokenizer.eos_token_id):
            if token is not None:
                return [int(token)]
        raise ConfigError(
            "expected a prompt with text: this tokenizer has no token that could begin an empty one"
        )

    def more(self, text: str) -> list[int]:
        """Tokens of a text that follows other tokens."""
        if not self._adds_space or not text:
            return self._encode(text)
        for anchor in ("a", ".", "\n"):  # the anchor must not merge with the text
            before = self._encode(anchor)
            whole = self._encode(anchor + text)
            if whole[: len(before)] == before and self.decode(whole[len(before) :], after=before[-1]) == text:
                return whole[len(before) :]
        return self._encode(text)

    def choice(self, text: str) -> list[int]:
        """As `more`, cached: the same few actions recur."""
        tokens = self._short_texts.get(text)
        if tokens is None:
            if len(self._short_texts) >= _CACHED_TEXTS:
                self._short_texts.clear()
            tokens = self._short_texts[text] = self.more(text)
        return tokens

    def decode(self, tokens: Sequence[int], *, after: int | None = None) -> str:
        """The text of tokens that follow the token `after`; special tokens have none."""
        if self._adds_space and after is not None:
            before = self._decode([after])
            whole = self._decode([after, *tokens])
            if whole.startswith(before):
                return whole[len(before) :]
        return self._decode(tokens)

    def watched(self, stops: tuple[str, ...]) -> frozenset[int]:
        """Tokens that might complete one of these strings: the only ones after which to search for it."""
        if stops not in self._watched:
            if self._pieces is None:
                every = range(len(self._tokenizer))
                self._pieces = [self.decode([token], after=self._anchor) for token in every]
            ends = {stop[-1] for stop in stops}
            self._watched[stops] = frozenset(
                token
                for token, piece in enumerate(self._pieces)
                # Part of a character decodes to nothing or to the replacement character.
                if not piece or _LOST in piece or not ends.isdisjoint(piece)
            )
        return self._watched[stops]

    def _encode(self, text: str) -> list[int]:
        try:
            text.encode()
        except UnicodeEncodeError:  # lone surrogates, e.g. from surrogateescape, cannot be encoded
            text = text.encode(errors="replace").decode()
        if self._backend is not None:
            return list(self._backend.encode(text, add_special_tokens=False).ids)
        split = not self._parse_special_tokens
        return list(self._tokenizer.encode(text, add_special_tokens=False, split_special_tokens=split))

    def _decode(self, tokens: Sequence[int]) -> str:
        if self._backend is not None:
            return str(self._backend.decode(list(tokens), skip_special_tokens=True))
        return str(
            self._tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Turn:
    prompt: str
    prompt_tokens: list[int]
    sampled: list[int]


class TokenHistory:
    """The last turn of each conversation as text and tokens; the least recently used are evicted."""

    def __init__(self, codec: TextCodec) -> None:
        self._codec = codec
        self._turns: OrderedDict[str, _Turn] = OrderedDict()
        self._tokens = 0

    def tokens_of(self, prompt: str, conversation: str | None) -> list[int]:
        """Tokens of a prompt: those of the last turn as far as the prompt continues it, then new ones."""
        turn = self._turns.get(conversation) if conversation is not None else None
        if turn is None or not prompt.startswith(turn.prompt):
            return self._codec.start(prompt)
        rest = prompt[len(turn.prompt) :]
        kept = self._kept(turn, rest)
        text = self._codec.decode(kept, after=turn.prompt_tokens[-1])
        return turn.prompt_tokens + kept + self._codec.more(rest[len(text) :])

    def _kept(self, turn: _Turn, rest: str) -> list[int]:
        """The longest run of sampled tokens whose text begins `rest`, without EOS tokens."""

        def text(count: int) -> str:
            return self._codec.decode(turn.sampled[:count], after=turn.prompt_tokens[-1])

        common = common_prefix(text(len(turn.sampled)), rest)
        count = bisect_right(range(len(turn.sampled) + 1), common, key=lambda count: len(text(count))) - 1
        # A partial character may have misled the search; an EOS token adds no text.
        while count and (not rest.startswith(text(count)) or text(count) == text(count - 1)):
            count -= 1
        return turn.sampled[:count]

    def record(self, conversation: str, prompt: str, prompt_tokens: list[int], sampled: list[int]) -> None:
        self.forget(conversation)
        self._turns[conversation] = _Turn(prompt=prompt, prompt_tokens=prompt_tokens, sampled=sampled)
        self._tokens += len(prompt_tokens) + len(sampled)
        while self._tokens > _HISTORY_TOKENS and len(self._turns) > 1:
            self.forget(next(iter(self._turns)))

    def forget(self, conversation: str) -> None:
        turn = self._turns.pop(conversation, None)
        if turn is not None:
            self._tokens -= len(turn.prompt_tokens) + len(turn.sampled)


def common_prefix(left: Sequence[object], right: Sequence[object]) -> int:
    """Length of the common prefix of two token sequences or texts.

    >>> common_prefix([1, 2, 3], [1, 2, 4, 5]), common_prefix("go", "go home")
    (2, 2)
    """
    shorter = min(len(left), len(right))
    if left[:shorter] == right[:shorter]:
        return shorter
    return next(n for n in range(shorter) if left[n] != right[n])


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
    def of(cls, requests: Sequence[CompletionRequest], device: torch.device) -> SamplingParams:
        # Below this, logits divided by the temperature overflow: the likeliest token has all probability.
        greedy = [request.temperature < _SMALLEST_TEMPERATURE for request in requests]
        divisors = [1.0 if low else each.temperature for low, each in zip(greedy, requests, strict=True)]
        top_ps = [request.top_p for request in requests]
        return cls(
            seeds=np.array([request.seed & 0xFFFFFFFFFFFFFFFF for request in requests], dtype=np.uint64),
            temperature=torch.tensor(divisors, device=device)[:, None],
            top_p=torch.tensor(top_ps, device=device)[:, None],
            greedy=torch.tensor(greedy, device=device),
            all_greedy=all(greedy),
            any_top_p=min(top_ps) < 1,
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
    """The finaliser of SplitMix64; wraps around on purpose."""
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
    wide = probabilities.cpu() if logits.device.type == "mps" else probabilities  # MPS has no float64
    cumulative = wide.cumsum(-1, dtype=torch.float64)
    numbers = torch.from_numpy(uniforms(params.seeds, positions)).to(cumulative.device)[:, None]
    drawn = torch.searchsorted(cumulative, numbers * cumulative[:, -1:], right=True)[:, 0].to(logits.device)
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
