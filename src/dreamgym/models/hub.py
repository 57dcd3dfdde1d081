"""Finds local weights, and checks their name before transformers loads them."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import getproxies

from dreamgym.config import HF_PREFIX
from dreamgym.errors import ConfigError

_CONNECT_SECONDS = 3.0


def find_weights(name: str) -> str:
    """``hf:NAME_OR_PATH`` of the weights in a run directory, or of those that are named."""
    if name.startswith(HF_PREFIX) or name.endswith(".gguf"):
        check_weights(name.removeprefix(HF_PREFIX))
        return name
    for part in ("policy", "model", "."):  # of train, of experience train, or the weights themselves
        folder = Path(name) / part
        if (folder / "config.json").is_file() and (folder / "tokenizer.json").is_file():
            return f"{HF_PREFIX}{folder}"
    raise ConfigError(
        f"expected the directory of a finished run or hf:NAME_OR_PATH, found no weights in {name!r}"
    )


def check_weights(name: str) -> None:
    """Refuse a GGUF file, and a name that is neither a directory, nor cached, nor reachable."""
    path = Path(name)
    in_directory = path.is_dir() and not (path / "config.json").exists() and sorted(path.glob("*.gguf"))
    if path.suffix == ".gguf" or in_directory:
        raise ConfigError(
            f"{name!r} is a GGUF file, which this engine does not load; convert it to safetensors first "
            "(dreamgym models convert), or serve it with llama.cpp and use endpoint:MODEL@URL"
        )
    if path.is_dir():
        return
    if path.is_absolute() or name.startswith(".") or name.count("/") > 1:
        raise ConfigError(f"expected a directory with config.json and tokenizer.json, found no {name!r}")
    if not _is_cached(name) and not _hub_is_reachable():
        raise ConfigError(
            f"{name!r} is no directory and not in the Hugging Face cache, and {_hub()} cannot be reached; "
            "check the name, or download the model where there is a network (hf download NAME) and copy it"
        )


def _hub() -> str:
    return os.environ.get("HF_ENDPOINT", "https://huggingface.co")


def _is_cached(name: str) -> bool:
    from huggingface_hub import try_to_load_from_cache

    return isinstance(try_to_load_from_cache(name, "config.json"), str)


def _hub_is_reachable() -> bool:
    """Asks once, quickly: huggingface_hub alone retries for more than half a minute."""
    if os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "TRUE", "YES", "ON"):
        return False
    address = urlsplit(getproxies().get("https") or _hub())
    port = address.port or (443 if address.scheme == "https" else 80)
    try:
        with socket.create_connection((address.hostname or "", port), timeout=_CONNECT_SECONDS):
            return True
    except OSError:
        return False
