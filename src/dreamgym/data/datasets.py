"""Trajectories and experience models that ship with the package, so that a newcomer can train at once."""

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


def builtin_experience(name: str) -> Path:
    """The run directory of a shipped experience model.

    >>> builtin_experience("textworld").name
    'textworld'
    """
    folder = Path(str(files("dreamgym"))) / "datasets" / "experience"
    if not (folder / name / "run.json").is_file():
        names = [file.parent.name for file in folder.glob("*/run.json")]
        raise ConfigError(f"unknown experience model {PREFIX + name!r}{nearest_name(name, names)}")
    return folder / name


def dataset_path(text: str) -> Path:
    """A path as given, or the shipped dataset that ``builtin:NAME`` names."""
    return builtin_dataset(text.removeprefix(PREFIX)) if text.startswith(PREFIX) else Path(text)
