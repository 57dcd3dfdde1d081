"""`dreamgym envs`: which real environments there are, what one is like, and whether it keeps its promises."""

from __future__ import annotations

import asyncio
from typing import Annotated, Any

import typer

from dreamgym.cli import console
from dreamgym.cli.options import Json
from dreamgym.config import load_config, settings, validate
from dreamgym.envs.registry import EnvironmentSpec, environment_names, find_environment, open_environment
from dreamgym.errors import MissingExtraError
from dreamgym.protocols import find_expert
from dreamgym.testing import Check, CheckReport, check_environment
from dreamgym.testing.env_checker import CHECKS

app = typer.Typer(no_args_is_help=True, help="Real environments: list them, look at one, check one.")

Name = Annotated[str, typer.Argument(metavar="NAME", help="An environment, see `dreamgym envs list`.")]
Options = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="An option of the environment, e.g. --set horizon=20"),
]


@app.command("list")
@console.command
def list_environments(as_json: Json = False) -> None:
    """List the environments that are known, ours and those of other packages.

    Examples:

      dreamgym envs list

      dreamgym envs list --json
    """
    found = [_entry(name) for name in environment_names()]
    rows = [(each["name"], each["summary"], each["extra"] or "–", each["installed"]) for each in found]
    table = console.table("environments", "name", "what it is", "extra", "installed", rows=rows)
    console.show(found, table, as_json=as_json)


@app.command("describe")
@console.command
def describe(name: Name, options: Options = None, as_json: Json = False) -> None:
    """Show an environment's splits, options and experts, and how one of its episodes begins.

    Examples:

      dreamgym envs describe textworld

      dreamgym envs describe textworld --set family=treasure

      dreamgym envs describe alfworld --json
    """
    spec = find_environment(name)
    chosen = _options(options)
    validate(spec.options, chosen, prefix="environment.options.")
    described: dict[str, Any] = {
        "name": spec.name,
        "summary": spec.summary,
        "extra": spec.extra,
        "splits": list(spec.splits),
        "options": [
            {"name": option, "type": kind, "default": default, "description": description}
            for option, kind, default, description in settings(spec.options)
        ],
    }
    try:
        described |= asyncio.run(_example(name, chosen))
    except MissingExtraError as missing:
        described["note"] = str(missing)
    console.show(described, _description(described), as_json=as_json)


@app.command("check")
@console.command
def check(
    name: Name,
    episodes: Annotated[int, typer.Option(help="Episodes played in search of leaks.", min=1)] = 200,
    concurrency: Annotated[int, typer.Option(help="Episodes played side by side.", min=1)] = 32,
    split: Annotated[str | None, typer.Option(help="Where tasks are taken from; default: the first.")] = None,
    options: Options = None,
    as_json: Json = False,
) -> None:
    """Play an environment and judge whether it keeps the promises of an environment. Exit code 1 if not.

    Examples:

      dreamgym envs check textworld

      dreamgym envs check alfworld --episodes 50 --concurrency 8

      dreamgym envs check textworld --set family=cooking --set ingredients=3 --json
    """
    report = _checked(name, _options(options), episodes=episodes, concurrency=concurrency, split=split)
    rows = [(each.status, each.name, each.detail, f"{each.seconds:.1f}") for each in report.checks]
    verdict = "keeps its promises" if report.passed else "breaks promises"
    table = console.table(f"{name} {verdict}", "", "promise", "seen", "seconds", rows=rows)
    console.show(report.to_dict(), table, as_json=as_json)
    if not report.passed:
        raise typer.Exit(1)


def _checked(name: str, options: dict[str, Any], **settings: Any) -> CheckReport:
    with console.progress() as bar:
        job = bar.add_task("checking", total=len(CHECKS), note="")

        def tell(check: Check) -> None:
            bar.update(job, advance=check.status != "running", note=f"{check.name} {check.detail}"[:100])

        return asyncio.run(check_environment(name, options=options, report=tell, **settings))


def _options(overrides: list[str] | None) -> dict[str, Any]:
    """The same reading of values as everywhere: TOML where it is TOML, else plain text."""
    return load_config(
        overrides=[f"environment.options.{each}" for each in overrides or ()]
    ).environment.options


def _entry(name: str) -> dict[str, Any]:
    try:
        spec = find_environment(name)
    except Exception as error:  # another package's environment may be broken; the list is not
        return {"name": name, "summary": f"cannot be loaded: {error}", "extra": None, "installed": "no"}
    return {
        "name": spec.name,
        "summary": spec.summary,
        "extra": spec.extra,
        "installed": "yes" if asyncio.run(_opens(spec)) else "no",
    }


async def _opens(spec: EnvironmentSpec) -> bool:
    try:
        factory = spec.open(validate(spec.options, {}))
    except MissingExtraError:
        return False
    await factory.aclose()
    return True


async def _example(name: str, options: dict[str, Any]) -> dict[str, Any]:
    """Experts and the start of the first task, as an agent would see it."""
    factory = open_environment(name, options)
    try:
        (task,) = await factory.tasks(factory.splits[0], 1)
        environment = factory.make(task)
        try:
            start = await environment.start()
        finally:
            await environment.aclose()
    finally:
        await factory.aclose()
    expert = find_expert(environment)
    return {
        "splits": list(factory.splits),
        "experts": list(expert.experts) if expert is not None else [],
        "example": {
            "task": task.id,
            "instruction": task.instruction,
            "state": start.text,
            "admissible_actions": start.admissible_actions and list(start.admissible_actions),
        },
    }


def _description(described: dict[str, Any]) -> list[Any]:
    example = described.get("example", {})
    about: list[tuple[str, object]] = [
        ("what it is", described["summary"]),
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
