"""`dreamgym play`: play an episode yourself, in a real environment or in an experience model."""

from __future__ import annotations

import asyncio
import io
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import typer

from dreamgym.cli import console
from dreamgym.cli.experience_models import (
    Buffer,
    Dream,
    Reward,
    dream_name,
    settings_of_run,
)
from dreamgym.cli.options import ENVIRONMENT, BaseUrl, ConfigFile, Overrides, resolve
from dreamgym.config import Config, nearest_name
from dreamgym.data.datasets import dataset_path
from dreamgym.envs.registry import environment_names, open_environment
from dreamgym.errors import ConfigError
from dreamgym.models.registry import names_language_model
from dreamgym.play import find_task, imagined_episode, play
from dreamgym.training.experience_loading import open_experience_model
from dreamgym.training.experience_run import ExperienceRun, known_environment


def play_command(
    env: Annotated[str | None, typer.Option(help=ENVIRONMENT)] = None,
    task: Annotated[
        str, typer.Option(metavar="N|ID", help="position of a task in the split, or its id")
    ] = "0",
    split: Annotated[
        str | None, typer.Option(help="split of the tasks; default: that of the run, else the first")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="seed of the order of the tasks")] = None,
    data: Annotated[Path | None, typer.Option(help="the environment's own data, e.g. official games")] = None,
    dream: Dream = None,
    base_url: BaseUrl = None,
    trajectories: Annotated[
        list[str] | None,
        typer.Option(help="with --dream: take task and hidden facts from these, not from the environment"),
    ] = None,
    reward: Reward = None,
    buffer: Buffer = None,
    config: ConfigFile = None,
    overrides: Overrides = None,
) -> None:
    """Play an episode yourself, in a real environment or an experience model. `:help` lists the commands.

    Examples:

    - dreamgym play --env alfworld
    - dreamgym play --env alfworld --split valid_unseen --task 3
    - dreamgym play --env textworld --set environment.options.family=treasure
    - dreamgym play --dream runs/experience
    - dreamgym play --dream runs/experience --trajectories builtin:alfworld --task 7
    - dreamgym play --dream endpoint:MODEL@http://localhost:8000 --env shop --trajectories shop
    - dreamgym play --dream openai:MODEL --base-url http://localhost:8000/v1 --env alfworld
    """
    dream = dream_name(dream, base_url)
    resolved = resolve(
        config, overrides, {"environment.name": env, "environment.options.data": data, "seed": seed}
    )
    try:
        if dream is not None:
            _play_dream(dream, settings_of_run(dream, resolved), split, task, trajectories, reward, buffer)
        elif trajectories or buffer is not None or reward is not None:
            raise ConfigError("--trajectories, --reward and --buffer belong to --dream")
        else:
            _play_real(resolved, split, task)
    except KeyboardInterrupt:  # `play` has said whether anything is lost
        raise typer.Exit(console.INTERRUPTED) from None


def _play_real(config: Config, split: str | None, wanted: str) -> None:
    factory = open_environment(config.environment.name, config.environment.options)
    with asyncio.Runner() as runner:
        try:
            task = runner.run(find_task(factory, split or factory.splits[0], wanted, seed=config.seed))
            episode = factory.make(task, seed=config.seed)
            play(episode, _lines(), runner=runner, show=_show, seed=config.seed)
        finally:
            runner.run(factory.aclose())


def _play_dream(
    dream: str,
    config: Config,
    split: str | None,
    wanted: str,
    trajectories: list[str] | None,
    reward: str | None,
    buffer: str | None,
) -> None:
    name = config.environment.name
    spec = known_environment(name)
    if not trajectories and not names_language_model(dream):
        run = ExperienceRun.read(Path(dream))
        if run.experience.facts == "replies":  # a black box: its facts are in its recordings
            trajectories = run.data_sources(Path(dream))
    sources = [dataset_path(path) for path in trajectories or ()]
    if spec is None and not sources:
        raise ConfigError(
            f"environment {name!r} is not installed here{nearest_name(name, environment_names())}; "
            "or name trajectories with its tasks (--trajectories)"
        )
    with (
        asyncio.Runner() as runner,
        open_experience_model(
            dream, config, run_async=runner.run, reward=reward, buffer=buffer, log=console.say
        ) as loaded,
    ):
        runner.run(loaded.models.check_reachable())
        episode = runner.run(
            imagined_episode(loaded, config, spec, split=split, wanted=wanted, sources=sources, show=_show)
        )
        model = loaded.model.name
        play(episode, _lines(), runner=runner, show=_show, seed=config.seed, experience_model=model)


def _lines() -> Iterator[str]:
    """Lines from standard input until it ends."""
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(errors="replace")
    if sys.stdin.isatty():
        with suppress(ImportError):
            import readline  # noqa: F401  — gives `input` a history and arrow keys
    while True:
        try:
            yield input("> ")
        except EOFError:
            _show("", "")  # the shell's prompt starts on a new line
            return


def _show(text: str, style: str) -> None:
    console.out.print(console.visible(text, style), soft_wrap=True)
