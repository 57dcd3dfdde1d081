"""`dreamgym envs`: list, describe and check real environments."""

from __future__ import annotations

import asyncio
from typing import Annotated, Any

import typer

from dreamgym.cli import console
from dreamgym.cli.options import Json
from dreamgym.config import load_config
from dreamgym.envs import description
from dreamgym.testing import Check, CheckReport, check_environment
from dreamgym.testing.env_checker import CHECKS

app = console.group(help="Real environments: list, describe, check.")

Name = Annotated[
    str, typer.Argument(metavar="NAME", help="A name of `dreamgym envs list`, or FILE.py:CLASS.")
]
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
    name: Name,
    episodes: Annotated[int, typer.Option(help="Episodes of the check for leaks.", min=1)] = 200,
    concurrency: Annotated[int, typer.Option(help="Episodes at once.", min=1)] = 32,
    split: Annotated[str | None, typer.Option(help="Split of the tasks; default: the first.")] = None,
    options: Options = None,
    as_json: Json = False,
) -> None:
    """Check an environment against the contract of `Environment`. Exit code 1 if a check fails.

    Examples:

    - dreamgym envs check textworld
    - dreamgym envs check alfworld --episodes 50 --concurrency 8
    - dreamgym envs check textworld --set family=cooking --set ingredients=3 --json
    """
    report = _checked(name, _options(options), episodes=episodes, concurrency=concurrency, split=split)
    rows = [(each.status, each.name, each.detail, f"{each.seconds:.1f}") for each in report.checks]
    verdict = "passes all checks" if report.passed else "fails"
    table = console.table(f"{name} {verdict}", "", "check", "observed", "seconds", rows=rows)
    console.show(report.to_dict(), table, as_json=as_json)
    if not report.passed:
        raise typer.Exit(1)


def _checked(name: str, options: dict[str, Any], **settings: Any) -> CheckReport:
    with console.progress() as bar:
        job = bar.add_task("checking", total=len(CHECKS), note="")

        def show(check: Check) -> None:
            bar.update(job, advance=check.status != "running", note=f"{check.name} {check.detail}"[:100])

        return asyncio.run(check_environment(name, options=options, report=show, **settings))


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
        console.table("options (--set KEY=VALUE)", "name", "type", "default", "meaning", rows=options),
    ]
