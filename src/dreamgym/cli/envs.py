"""`dreamgym envs`: list, describe and check real environments."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Annotated, Any

import typer

from dreamgym.cli import console
from dreamgym.cli.options import ENVIRONMENT, Json
from dreamgym.config import load_config, validate
from dreamgym.envs import description
from dreamgym.envs.openenv import OpenEnvOptions
from dreamgym.errors import ConfigError
from dreamgym.testing import Check, CheckReport, check_environment
from dreamgym.testing.env_checker import CHECKS, OnCheck

app = console.group(help="Real environments: list, describe, check.")

Name = Annotated[str, typer.Argument(metavar="NAME", help=ENVIRONMENT)]
Options = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="An option of the environment, e.g. --set horizon=20"),
]


@console.command(app, "list")
def list_environments(as_json: Json = False) -> None:
    """List the environments, built-in ones and plug-ins.

    Examples:

    - dreamgym envs list
    - dreamgym envs list --json
    """
    found = asyncio.run(description.list_environments())
    rows = [(each["name"], each["summary"], each["extra"] or "–", each["installed"]) for each in found]
    table = console.table("environments", "name", "summary", "extra", "installed", rows=rows)
    console.show(found, table, as_json=as_json)


@console.command(app, "describe")
def describe(name: Name, options: Options = None, as_json: Json = False) -> None:
    """Show splits, options and experts of an environment, and the start of one episode.

    Examples:

    - dreamgym envs describe textworld
    - dreamgym envs describe textworld --set family=treasure
    - dreamgym envs describe alfworld --json
    """
    described = asyncio.run(description.describe_environment(name, _options(options)))
    console.show(described, _description(described), as_json=as_json)


@console.command(app, "check")
def check(
    name: Annotated[str | None, typer.Argument(metavar="[NAME]", help=ENVIRONMENT)] = None,
    url: Annotated[
        str | None, typer.Option(help="The address of an OpenEnv server to check instead, ours or not.")
    ] = None,
    actions: Annotated[
        list[str] | None,
        typer.Option("--action", help="With --url: an action to choose from, if the server lists none."),
    ] = None,
    episodes: Annotated[
        int, typer.Option(help="Episodes of the check for leaks, or of learning.", min=1)
    ] = 200,
    concurrency: Annotated[int, typer.Option(help="Episodes at once.", min=1)] = 32,
    split: Annotated[str | None, typer.Option(help="Split of the tasks; default: the first.")] = None,
    options: Options = None,
    as_json: Json = False,
) -> None:
    """Check an environment against the contract of `Environment`. Exit code 1 if a check fails.

    With `--url`, any OpenEnv server: does it scale, is it learnable, deterministic, self-describing, secure,
    and can its reward be forged? A query after the address is sent with each reset.

    Examples:

    - dreamgym envs check textworld
    - dreamgym envs check alfworld --episodes 50 --concurrency 8
    - dreamgym envs check textworld --set family=cooking --set ingredients=3 --json
    - dreamgym envs check --url "http://127.0.0.1:8000?mode=real" --set token_env=SERVE_TOKEN
    """
    if (name is None) == (url is None):
        raise ConfigError("expected the NAME of an environment, or --url with the address of a server")
    if url is not None:
        report = _checked_url(url, _options(options), actions or (), split, concurrency, episodes)
    else:
        report = _checked(name or "", _options(options), episodes, concurrency=concurrency, split=split)
    rows = [(each.status, each.name, each.detail, f"{each.seconds:.1f}") for each in report.checks]
    verdict = "passes all checks" if report.passed else "fails"
    table = console.table(f"{name or url} {verdict}", "", "check", "observed", "seconds", rows=rows)
    console.show(report.to_dict(), table, as_json=as_json)
    if not report.passed:
        raise typer.Exit(1)


def _checked(name: str, options: dict[str, Any], episodes: int, **settings: Any) -> CheckReport:
    with _progress(len(CHECKS)) as show:
        return asyncio.run(
            check_environment(name, options=options, episodes=episodes, report=show, **settings)
        )


def _checked_url(
    url: str, options: dict[str, Any], actions: Sequence[str], split: str | None, sessions: int, episodes: int
) -> CheckReport:
    from dreamgym.testing.openenv_checker import CHECKS as ANSWERS
    from dreamgym.testing.openenv_checker import check_openenv

    given = validate(OpenEnvOptions, options, prefix="environment.options.")
    with _progress(len(ANSWERS)) as show:
        return asyncio.run(
            check_openenv(
                url,
                actions=actions,
                split=split,
                sessions=sessions,
                episodes=episodes,
                options=given,
                report=show,
            )
        )


@contextmanager
def _progress(total: int) -> Iterator[OnCheck]:
    with console.progress() as bar:
        job = bar.add_task("checking", total=total, note="")

        def show(check: Check) -> None:
            bar.update(job, advance=check.status != "running", note=f"{check.name} {check.detail}"[:100])

        yield show


def _options(overrides: list[str] | None) -> dict[str, Any]:
    """Values are read as in every other --set: TOML if they parse, else text."""
    return load_config(
        overrides=[f"environment.options.{each}" for each in overrides or ()]
    ).environment.options


def _description(described: dict[str, Any]) -> list[Any]:
    example = described.get("example", {})
    about: list[tuple[str, object]] = [
        ("summary", described["summary"]),
        ("splits", ", ".join(described["splits"])),
        ("experts", ", ".join(described.get("experts", ())) or "–"),
        *([("task", example["instruction"]), ("first state", example["state"])] if example else ()),
        *(
            [("actions", ", ".join(example["admissible_actions"]))]
            if example.get("admissible_actions")
            else ()
        ),
        *([("note", described["note"])] if "note" in described else ()),
    ]
    options = [
        (each["name"], each["type"], each["default"], each["description"]) for each in described["options"]
    ]
    return [
        console.table(described["name"], "", "", rows=about),
        console.table(
            "options (--set environment.options.NAME=VALUE, here --set NAME=VALUE)",
            *("name", "type", "default", "meaning"),
            rows=options,
        ),
    ]
