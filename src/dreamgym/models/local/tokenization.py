"""Between text and tokens: prompts, their continuations, sampled tokens, stop strings.

Sampled tokens are never re-tokenized. The history of a conversation keeps the tokens of its text; a prompt
that continues this text keeps them and adds only the tokens of the new text.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from tokenizers import Tokenizer

from dreamgym.errors import ConfigError

_LOST = "\ufffd"
_HISTORY_TOKENS = 1 << 24
_CACHED_TEXTS = 1 << 16


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

    @property
    def vocabulary_size(self) -> int:
        return len(self._tokenizer)

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
                size = self.vocabulary_size
                self._pieces = [self.decode([token], after=self._anchor) for token in range(size)]
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

        common = _common_start(text(len(turn.sampled)), rest)
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


def _common_start(left: str, right: str) -> int:
    """
    >>> _common_start("go north", "go home")
    3
    """
    differing = (place for place, (a, b) in enumerate(zip(left, right, strict=False)) if a != b)
    return next(differing, min(len(left), len(right)))
