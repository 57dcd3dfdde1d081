"""Options that several commands share to name an experience model, and how a command opens it."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from typing import Annotated, get_args

import typer

from dreamgym.config import Config, Part, nearest_name
from dreamgym.errors import ConfigError, MissingExtraError
from dreamgym.models.registry import names_language_model, with_base_url
from dreamgym.training.experience_run import inherit_settings

Reward = Annotated[
    str | None,
    typer.Option(
        help="The grader: sheet (the goal is checked on the facts), model (the experience model's verdict), "
        "or a language model as judge (endpoint:NAME, endpoint:MODEL@URL, hf:NAME_OR_PATH)."
    ),
]
Dream = Annotated[
    str | None,
    typer.Option(
        metavar="RUN|MODEL",
        help="play in an experience model instead: the run directory of a fine-tuned one, or a language "
        "model that is prompted (endpoint:NAME, endpoint:MODEL@URL, openai:MODEL, hf:NAME_OR_PATH)",
    ),
]
Buffer = Annotated[
    str | None, typer.Option(help="Replay buffer to take demonstrations from; by default the run's own.")
]
PARTS: tuple[Part, ...] = get_args(Part)
Without = Annotated[
    list[str] | None,
    typer.Option(metavar="PART", help=f"Leave out one of {', '.join(PARTS)}, for ablations; repeatable."),
]


def parts(given: Sequence[str] | None) -> list[Part]:
    """The parts of `--without`, in one order.

    >>> parts(["sheet", "history"])
    ['history', 'sheet']
    """
    for name in given or ():
        if name not in PARTS:
            raise ConfigError(f"unknown --without {name!r}{nearest_name(name, PARTS)}")
    return [part for part in PARTS if part in (given or ())]


def dream_name(dream: str | None, base_url: str | None) -> str | None:
    """The name that ``--dream`` and ``--base-url`` give; None for the real environment.

    >>> dream_name("openai:m", "http://localhost:8000")
    'endpoint:m@http://localhost:8000'

    Raises:
        ConfigError: there is a URL and no model.
    """
    if dream is None:
        if base_url is not None:
            raise ConfigError("--base-url belongs to --dream openai:MODEL")
        return None
    return with_base_url(dream, base_url)


def need_models() -> None:
    for name in ("torch", "transformers"):
        if importlib.util.find_spec(name) is None:
            raise MissingExtraError("a local model", "models")


def settings_of_run(name: str, config: Config) -> Config:
    """The settings of a command with those that travel with the experience model; checks what it needs."""
    if not names_language_model(name):
        need_models()
    return inherit_settings(config, name)
