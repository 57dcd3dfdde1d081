"""The offline dataset that ships with the package, so that a newcomer can train at once."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

from dreamgym.config import nearest_name
from dreamgym.errors import ConfigError

PREFIX = "builtin:"


def builtin_dataset(name: str = "alfworld") -> Path:
    """The file of a shipped dataset.

    >>> builtin_dataset("alfworld").name
    'alfworld.jsonl.xz'
    """
    folder = Path(str(files("dreamgym"))) / "datasets"
    path = folder / f"{name}.jsonl.xz"
    if not path.is_file():
        names = [file.name.removesuffix(".jsonl.xz") for file in folder.glob("*.jsonl.xz")]
        raise ConfigError(f"unknown dataset {PREFIX + name!r}{nearest_name(name, names)}")
    return path


def dataset_path(text: str) -> Path:
    """A path as given, or the shipped dataset that ``builtin:NAME`` names."""
    return builtin_dataset(text.removeprefix(PREFIX)) if text.startswith(PREFIX) else Path(text)
