"""Options that several commands share, and how flags, file and overrides become one configuration."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from dreamgym.config import Config, load_config
from dreamgym.data.datasets import dataset_path
from dreamgym.errors import ConfigError

ENVIRONMENT = "name (`dreamgym envs list`), FILE.py:CLASS, mcp:COMMAND, mcp:URL or openenv:URL"
"""What names an environment."""
ConfigFile = Annotated[Path | None, typer.Option("--config", help="TOML file; flags win over it")]
Overrides = Annotated[
    list[str] | None, typer.Option("--set", metavar="A.B=C", help="any setting, e.g. --set replay.k=8")
]
BaseUrl = Annotated[
    str | None,
    typer.Option(metavar="URL", help="address of openai:MODEL; by default $OPENAI_BASE_URL, or OpenAI's own"),
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="print the resolved configuration and stop")]


def _source(text: str) -> Path:
    try:
        return dataset_path(text)
    except ConfigError as error:
        raise typer.BadParameter(str(error)) from None


Source = Annotated[
    Path,
    typer.Argument(
        parser=_source,
        metavar="PATH",
        help="A directory of trajectories, a file of them, or builtin:alfworld, which is shipped.",
    ),
]
Json = Annotated[bool, typer.Option("--json", help="print one JSON document instead of a table")]


def resolve(path: Path | None, overrides: list[str] | None, flags: Mapping[str, Any]) -> Config:
    """File < `--set` < flag; a flag that was not given is None."""
    return load_config(path, [*(overrides or []), *flag_overrides(flags)])


def flag_overrides(flags: Mapping[str, Any]) -> list[str]:
    return [f"{name}={_toml(value)}" for name, value in flags.items() if value is not None]


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int | float):
        return str(value)
    escaped = str(value).replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'
