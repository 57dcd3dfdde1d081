"""Tests of the corpus tokenizer and the small models: round trips, vocabulary, sizes, files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoTokenizer

from dreamgym.errors import ConfigError
from dreamgym.models.tiny import PRESETS, Family, make_model, make_tokenizer, save
from tests.models import small_models


def tokens(text: str) -> list[int]:
    return list(small_models.tokenizer()(text, add_special_tokens=False).input_ids)


@given(text=st.text())
def test_decoding_the_encoding_of_any_string_returns_the_string(text: str) -> None:
    tokenizer = small_models.tokenizer()
    encoded = tokenizer(text, add_special_tokens=False, split_special_tokens=True).input_ids
    assert tokenizer.decode(encoded) == text


def test_words_of_the_corpus_are_single_tokens_with_and_without_a_space() -> None:
    for word in ("fridge", "drawer", "take", "12", "inventory"):
        assert len(tokens(word)) == len(tokens(" " + word)) == 1


def test_a_rare_word_is_not_split_into_frequent_ones() -> None:
    tokenizer = make_tokenizer(["in side " * 1000 + "inside"])
    assert len(tokenizer("inside", add_special_tokens=False).input_ids) == 1
    assert len(tokenizer("sidein", add_special_tokens=False).input_ids) == 2


def test_numbers_and_punctuation_are_separate_tokens() -> None:
    assert len(tokens("shelf 12, drawer 2.")) == 6
    assert len(tokens("shelf12")) == 2
    assert len(tokens("\n\n")) == 2


def test_a_vocabulary_holds_the_most_frequent_words_up_to_its_limit() -> None:
    small = make_tokenizer(["look " * 9 + "at at at the fridge"], vocab_size=263)
    assert len(small) == 263
    assert len(small("look look at at", add_special_tokens=False).input_ids) == 4
    assert len(small("fridge", add_special_tokens=False).input_ids) == 6
    with pytest.raises(ConfigError, match="259"):
        make_tokenizer(["look"], vocab_size=100)


def test_the_vocabulary_of_an_empty_corpus_is_bytes() -> None:
    empty = make_tokenizer([])
    assert len(empty) == 259
    assert empty.decode(empty("any text", add_special_tokens=False).input_ids) == "any text"


@pytest.mark.parametrize("family", ["lfm2", "llama"])
def test_presets_have_the_documented_number_of_parameters(family: Family) -> None:
    for preset, (least, most) in {"nano": (2e4, 1e5), "tiny": (6e5, 9e5), "small": (3.5e6, 5e6)}.items():
        model = make_model(preset, small_models.tokenizer(), family=family)
        assert least < model.num_parameters() < most
        assert 1024 <= model.config.max_position_embeddings <= 2048
        head, embedding = model.get_output_embeddings().weight, model.get_input_embeddings().weight
        assert head.data_ptr() == embedding.data_ptr()


def test_the_loss_of_an_untrained_model_is_that_of_a_uniform_distribution() -> None:
    for preset in PRESETS:
        model = make_model(preset, small_models.tokenizer())
        inputs = torch.randint(3, 300, (1, 60), generator=torch.Generator().manual_seed(0))
        with torch.no_grad():
            loss = float(model(inputs, labels=inputs).loss)
        uniform = float(torch.tensor(float(len(small_models.tokenizer()))).log())
        assert abs(loss - uniform) < 1.0


def test_the_seed_determines_the_weights_and_the_global_generator_is_untouched() -> None:
    def weights(seed: int) -> Any:
        return make_model("nano", small_models.tokenizer(), seed=seed).get_input_embeddings().weight

    torch.manual_seed(1)
    expected = torch.rand(1)
    torch.manual_seed(1)
    assert torch.equal(weights(3), weights(3))
    assert torch.equal(torch.rand(1), expected)
    assert not torch.equal(weights(3), weights(4))


def test_an_unknown_preset_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(ConfigError, match="tiny"):
        make_model("tinny", small_models.tokenizer())


@pytest.mark.parametrize("family", ["lfm2", "llama"])
def test_transformers_loads_a_saved_model(family: Family, tmp_path: Path) -> None:
    model = small_models.model(family)
    save(model, small_models.tokenizer(), tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    text = "You see a fridge 1.\nünseen <eos>"
    assert tokenizer(text).input_ids == small_models.tokenizer()(text).input_ids
    inputs = torch.tensor([tokenizer(text).input_ids])
    with torch.no_grad():
        assert torch.equal(loaded(inputs).logits, model(inputs).logits)
    assert (tmp_path / "tokenizer.json").is_file()
    assert (tmp_path / "model.safetensors").is_file()
