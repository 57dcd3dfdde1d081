"""The files around the package: what CI, hooks, container and citation say is true."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path
from typing import Any

import typer.main
import yaml

import dreamgym
from dreamgym.cli import app
from tests.conftest import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def read(name: str) -> Any:
    return yaml.safe_load((ROOT / name).read_text(encoding="utf-8"))


def test_the_workflow_runs_the_command_of_contributors_on_every_supported_python() -> None:
    jobs = read(".github/workflows/test.yml")["jobs"]
    versions = jobs["test"]["strategy"]["matrix"]["python"]
    assert PROJECT["requires-python"] == f">={versions[0]}"
    assert versions == ["3.11", "3.12", "3.13"]
    commands = [step.get("run", "") for job in jobs.values() for step in job["steps"]]
    targets = re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.M)
    assert "make test PYTHON=python" in commands
    assert {"test", "docs"} <= set(targets)


def test_the_container_serves_with_options_that_exist_and_copies_what_exists() -> None:
    text = (ROOT / "Dockerfile").read_text(encoding="utf-8")
    program, *words = json.loads(text.partition("ENTRYPOINT ")[2].splitlines()[0])
    assert program == "dreamgym"
    command: Any = typer.main.get_command(app)
    serve = command.commands[words.pop(0)]
    with serve.make_context("serve", [*words, "textworld"]) as context:
        assert context.params["host"] == "0.0.0.0"
        assert context.params["token_env"] == "DREAMGYM_TOKEN"
    allowed = {
        line.strip("!") for line in (ROOT / ".dockerignore").read_text().splitlines() if line[0] == "!"
    }
    copied = re.findall(r"^COPY (?!--from)(.+) \S+$", text, re.M)
    for name in " ".join(copied).split():
        assert (ROOT / name).exists()
        assert name in allowed
    extras = re.search(r"ARG EXTRAS=(\S+)", text)
    assert extras is not None
    assert set(extras[1].split(",")) <= set(PROJECT["optional-dependencies"])


def test_the_hooks_run_the_tools_of_the_tests() -> None:
    hooks = [hook for repo in read(".pre-commit-config.yaml")["repos"] for hook in repo["hooks"]]
    tools = {Path(hook["entry"].split()[0]).name for hook in hooks}
    assert tools == {"ruff", "mypy"}


def test_every_issue_template_asks_for_something() -> None:
    for file in (ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"):
        template = read(file.relative_to(ROOT).as_posix())
        if file.name != "config.yml":
            assert template["name"]
            assert any(part.get("validations", {}).get("required") for part in template["body"])


def test_the_version_is_the_same_everywhere() -> None:
    assert read("CITATION.cff")["version"] == PROJECT["version"] == dreamgym.__version__
    assert f"version = {{{PROJECT['version']}}}" in (ROOT / "README.md").read_text(encoding="utf-8")
    for name in ("CHANGELOG.md", "docs/release-notes.md"):
        assert PROJECT["version"] in (ROOT / name).read_text(encoding="utf-8")
