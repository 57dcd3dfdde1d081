"""Tokens that were sampled stay what they were, whatever text is put after them."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from dreamgym.models.local.tokenization import TextCodec, TokenHistory
from tests.models import small_models

PROMPT = "You see a fridge 1.\n>"


@pytest.fixture
def codec() -> TextCodec:
    return TextCodec(small_models.tokenizer())


def spelt(text: str) -> list[int]:
    """In bytes, as a model may sample it and no tokenizer would."""
    return [int(token) for letter in text for token in small_models.tokenizer()(letter).input_ids[1:]]


def recorded(codec: TextCodec, sampled: list[int]) -> tuple[TokenHistory, list[int]]:
    histories = TokenHistory(codec)
    prompt = histories.tokens_of(PROMPT, "c")
    histories.record("c", PROMPT, prompt, sampled)
    return histories, prompt


def test_sampled_tokens_are_kept_when_the_prompt_goes_on(codec: TextCodec) -> None:
    sampled = spelt("look")
    assert len(sampled) == 4
    histories, prompt = recorded(codec, sampled)
    after = histories.tokens_of(PROMPT + "look\nYou see", "c")
    assert after == prompt + sampled + codec.more("\nYou see")
    assert histories.tokens_of(PROMPT + "look\nYou see", "another") == codec.start(PROMPT + "look\nYou see")


def test_a_stop_string_that_was_sampled_is_kept_only_if_the_prompt_has_it(codec: TextCodec) -> None:
    sampled = [*spelt("look"), *spelt("\n")]
    histories, prompt = recorded(codec, sampled)
    assert histories.tokens_of(PROMPT + "look\n>", "c") == prompt + sampled + codec.more(">")
    assert histories.tokens_of(PROMPT + "look!", "c") == prompt + spelt("look") + codec.more("!")


def test_a_closing_token_is_not_part_of_what_comes_next(codec: TextCodec) -> None:
    histories, prompt = recorded(codec, [*spelt("look"), 1])
    assert histories.tokens_of(PROMPT + "look\n>", "c") == prompt + spelt("look") + codec.more("\n>")


def test_the_same_prompt_again_has_the_same_tokens(codec: TextCodec) -> None:
    histories, prompt = recorded(codec, spelt("look"))
    assert histories.tokens_of(PROMPT, "c") == prompt


def test_a_prompt_that_does_not_go_on_is_read_afresh(codec: TextCodec) -> None:
    histories, _ = recorded(codec, spelt("look"))
    assert histories.tokens_of("You see nothing.", "c") == codec.start("You see nothing.")


@given(
    sampled=st.lists(st.integers(0, 300), max_size=12),
    cut=st.integers(0, 12),
    more=st.text(max_size=12),
)
def test_a_prompt_that_goes_on_always_says_what_it_says(sampled: list[int], cut: int, more: str) -> None:
    codec = TextCodec(small_models.tokenizer())
    histories, prompt = recorded(codec, sampled)
    following = PROMPT + codec.decode(sampled)[:cut] + more
    tokens = histories.tokens_of(following, "c")
    assert tokens[: len(prompt)] == prompt
    # Bytes that are no character read as the replacement character, in the sampled text as in ours.
    assert codec.decode(tokens) == following


def like_sentencepiece() -> Any:
    """A tokenizer that puts a space before whatever it is given and takes it away when it decodes."""
    pieces = ["<unk>", "▁", *"abcdefghijklmnopqrstuvwxyz.\n", "▁a", "▁go", "▁north", "▁see"]
    core = Tokenizer(
        models.Unigram([(piece, -float(len(pieces) - n)) for n, piece in enumerate(pieces)], unk_id=0)
    )
    core.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    core.decoder = decoders.Metaspace(prepend_scheme="always")
    return PreTrainedTokenizerFast(tokenizer_object=core, unk_token="<unk>", eos_token="<unk>")  # type: ignore[no-untyped-call]


def test_no_space_sneaks_in_where_a_conversation_goes_on() -> None:
    codec = TextCodec(like_sentencepiece())
    histories = TokenHistory(codec)
    prompt = histories.tokens_of("see a", "c")
    sampled = codec.more(" go north")
    assert codec.decode(sampled, after=prompt[-1]) == " go north"
    histories.record("c", "see a", prompt, sampled)
    after = histories.tokens_of("see a go north.\nsee", "c")
    assert after[: len(prompt) + len(sampled)] == prompt + sampled
    assert codec.decode(after) == "see a go north.\nsee"


def test_special_tokens_in_a_prompt_are_text_unless_wanted() -> None:
    text = "go<eos> north"
    careful = TextCodec(small_models.tokenizer())
    trusting = TextCodec(small_models.tokenizer(), parse_special_tokens=True)
    assert 1 not in careful.start(text)
    assert careful.decode(careful.start(text)) == text
    assert 1 in trusting.start(text)
