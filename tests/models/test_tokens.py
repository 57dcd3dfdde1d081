"""Sampled tokens of a conversation are never re-tokenized when text is appended."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from dreamgym.models.local.tokens import TextCodec, TokenHistory
from tests.models import small_models

PROMPT = "You see a fridge 1.\n>"


@pytest.fixture
def codec() -> TextCodec:
    return TextCodec(small_models.tokenizer())


def as_bytes(text: str) -> list[int]:
    """One token per byte: a model may sample this, the tokenizer never produces it."""
    return [int(token) for letter in text for token in small_models.tokenizer()(letter).input_ids[1:]]


def recorded(codec: TextCodec, sampled: list[int]) -> tuple[TokenHistory, list[int]]:
    histories = TokenHistory(codec)
    prompt = histories.tokens_of(PROMPT, "c")
    histories.record("c", PROMPT, prompt, sampled)
    return histories, prompt


def test_sampled_tokens_are_kept_when_the_prompt_continues_them(codec: TextCodec) -> None:
    sampled = as_bytes("look")
    assert len(sampled) == 4
    histories, prompt = recorded(codec, sampled)
    after = histories.tokens_of(PROMPT + "look\nYou see", "c")
    assert after == prompt + sampled + codec.more("\nYou see")
    assert histories.tokens_of(PROMPT + "look\nYou see", "another") == codec.start(PROMPT + "look\nYou see")


def test_a_stop_string_that_was_sampled_is_kept_only_if_the_prompt_has_it(codec: TextCodec) -> None:
    sampled = [*as_bytes("look"), *as_bytes("\n")]
    histories, prompt = recorded(codec, sampled)
    assert histories.tokens_of(PROMPT + "look\n>", "c") == prompt + sampled + codec.more(">")
    assert histories.tokens_of(PROMPT + "look!", "c") == prompt + as_bytes("look") + codec.more("!")


def test_an_end_token_is_not_part_of_the_next_prompt(codec: TextCodec) -> None:
    histories, prompt = recorded(codec, [*as_bytes("look"), 1])
    assert histories.tokens_of(PROMPT + "look\n>", "c") == prompt + as_bytes("look") + codec.more("\n>")


def test_the_same_prompt_again_has_the_same_tokens(codec: TextCodec) -> None:
    histories, prompt = recorded(codec, as_bytes("look"))
    assert histories.tokens_of(PROMPT, "c") == prompt


def test_a_prompt_that_does_not_continue_the_last_one_is_tokenized_anew(codec: TextCodec) -> None:
    histories, _ = recorded(codec, as_bytes("look"))
    assert histories.tokens_of("You see nothing.", "c") == codec.start("You see nothing.")


@given(
    sampled=st.lists(st.integers(0, 300), max_size=12),
    cut=st.integers(0, 12),
    more=st.text(max_size=12),
)
def test_a_continued_prompt_decodes_to_its_text(sampled: list[int], cut: int, more: str) -> None:
    codec = TextCodec(small_models.tokenizer())
    histories, prompt = recorded(codec, sampled)
    following = PROMPT + codec.decode(sampled)[:cut] + more
    tokens = histories.tokens_of(following, "c")
    assert tokens[: len(prompt)] == prompt
    # Invalid UTF-8 decodes to the replacement character on both sides.
    assert codec.decode(tokens) == following


def like_sentencepiece() -> Any:
    """A tokenizer that prepends a space when encoding and removes it when decoding."""
    pieces = ["<unk>", "▁", *"abcdefghijklmnopqrstuvwxyz.\n", "▁a", "▁go", "▁north", "▁see"]
    core = Tokenizer(
        models.Unigram([(piece, -float(len(pieces) - n)) for n, piece in enumerate(pieces)], unk_id=0)
    )
    core.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    core.decoder = decoders.Metaspace(prepend_scheme="always")
    return PreTrainedTokenizerFast(tokenizer_object=core, unk_token="<unk>", eos_token="<unk>")


def test_no_space_is_inserted_where_a_conversation_continues() -> None:
    codec = TextCodec(like_sentencepiece())
    histories = TokenHistory(codec)
    prompt = histories.tokens_of("see a", "c")
    sampled = codec.more(" go north")
    assert codec.decode(sampled, after=prompt[-1]) == " go north"
    histories.record("c", "see a", prompt, sampled)
    after = histories.tokens_of("see a go north.\nsee", "c")
    assert after[: len(prompt) + len(sampled)] == prompt + sampled
    assert codec.decode(after) == "see a go north.\nsee"


def test_special_tokens_in_a_prompt_are_text_by_default() -> None:
    text = "go<eos> north"
    default = TextCodec(small_models.tokenizer())
    parsing = TextCodec(small_models.tokenizer(), parse_special_tokens=True)
    assert 1 not in default.start(text)
    assert default.decode(default.start(text)) == text
    assert 1 in parsing.start(text)
