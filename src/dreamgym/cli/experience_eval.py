"""`dreamgym experience eval`: the fidelity of an experience model, fine-tuned or prompted."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markdown import Markdown
from rich.progress import TaskID

from dreamgym.cli import console
from dreamgym.cli.collect import run_collect
from dreamgym.cli.experience_models import Buffer, Reward, Without, parts, settings_of_run
from dreamgym.cli.options import ConfigFile, Json, Overrides, resolve
from dreamgym.config import CollectConfig, Config, nearest_name
from dreamgym.data.datasets import dataset_path
from dreamgym.envs.description import has_expert
from dreamgym.envs.registry import environment_names, find_environment, is_known
from dreamgym.errors import ConfigError
from dreamgym.evaluation.evaluate import evaluation_split
from dreamgym.evaluation.experience import evaluate_experience
from dreamgym.models.registry import check_language_model, names_language_model
from dreamgym.training.experience_run import known_environment


def evaluate(
    run: Annotated[
        str,
        typer.Argument(
            metavar="RUN|MODEL",
            help="The run directory of a fine-tuned experience model, or a language model that is prompted "
            "(endpoint:NAME, endpoint:MODEL@URL, hf:NAME_OR_PATH).",
        ),
    ],
    *,
    data: Annotated[
        list[str] | None,
        typer.Option(help="Real trajectories of tasks outside of fine-tuning; by default recorded now."),
    ] = None,
    only_held_out: Annotated[
        bool,
        typer.Option(
            "--held-out",
            help="Of --data, only the held-out tasks (experience.validation): held out from fine-tuning, or "
            "from a language model's demonstrations, which then come from the other tasks.",
        ),
    ] = False,
    episodes: Annotated[int, typer.Option(help="Number of episodes.", min=1)] = 60,
    split: Annotated[
        str | None,
        typer.Option(help="Split to record, without --data; by default the environment's evaluation split."),
    ] = None,
    reward: Reward = None,
    judge: Annotated[
        str | None,
        typer.Option(
            metavar="MODEL", help="A language model that scores every synthetic transition by four rubrics."
        ),
    ] = None,
    env: Annotated[str | None, typer.Option(help="Environment; by default the run's own.")] = None,
    annotations: Annotated[
        Path | None,
        typer.Option(help="Directory of the annotations of its annotator; by default RUN/annotations."),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(help="Directory of results; by default RUN, or fidelity/MODEL for a language model."),
    ] = None,
    seed: Annotated[
        int | None, typer.Option(help="Chooses the episodes, and the action that each near miss leaves out.")
    ] = None,
    buffer: Buffer = None,
    without: Without = None,
    config: ConfigFile = None,
    overrides: Overrides = None,
    as_json: Json = False,
) -> None:
    """Measure fidelity: single predictions, closed loop, and successes in the dream replayed in reality.

    Writes fidelity.json, fidelity.md and drift.svg into the directory of the results;
    docs/guides/fidelity.md explains each number. The worst kinds of action and of state are named, each with
    an example and what to do (`worst` in the JSON). With --without PART prompts leave that part out, and file
    names say so: fidelity-no-history.json. The experience.* settings are those of the run; the prompted.*
    settings are those of a language model. Without an installed environment dream → real is skipped.

    Examples:

    - dreamgym experience eval runs/experience --episodes 200
    - dreamgym experience eval runs/experience --data trajectories --reward model --json
    - dreamgym experience eval runs/experience --without sheet
    - dreamgym experience eval runs/shop --data shop --held-out
    - dreamgym experience eval endpoint:MODEL@http://localhost:8000 --env shop --data shop --held-out
    """
    resolved = settings_of_run(run, resolve(config, overrides, {"environment.name": env, "seed": seed}))
    if judge is not None:
        check_language_model(judge, resolved)
    if not data and (known_environment(resolved.environment.name) is None or only_held_out):
        raise ConfigError(_no_data(resolved.environment.name))
    slug = Path("fidelity") / re.sub(r"[^\w.-]+", "-", run)
    folder = out or (slug if names_language_model(run) else Path(run))
    result = run_fidelity(
        *(run, resolved),
        [dataset_path(path) for path in data or ()] or [_record(folder, resolved, episodes, split)],
        folder=folder,
        episodes=episodes,
        only_held_out=only_held_out,
        annotations=annotations,
        reward=reward,
        judge=judge,
        buffer=buffer,
        without=parts(without),
    )
    if as_json:
        console.show(result, [], as_json=True)
    else:
        console.out.print(Markdown((folder / result["files"]["table"]).read_text(encoding="utf-8")))


def run_fidelity(name: str, config: Config, data: Sequence[Path], **options: Any) -> dict[str, Any]:
    """`evaluate_experience` with a progress bar for each stage."""
    with console.progress() as bar:
        jobs: dict[str, TaskID] = {}

        def on_stage(stage: str, done: int, total: int) -> None:
            if stage not in jobs:
                jobs[stage] = bar.add_task(stage, total=total)
            bar.update(jobs[stage], completed=done)

        return evaluate_experience(name, config, data, on_stage=on_stage, log=console.say, **options)


def _record(run: Path, config: Config, episodes: int, split: str | None) -> Path:
    """Record real episodes into the run directory, unless they are there."""
    if split is None:
        split = evaluation_split(find_environment(config.environment.name).splits or ("train",))
    out = run / "real" / f"{split}-{config.seed}"
    expert = asyncio.run(has_expert(config.environment.name, config.environment.options))
    wanted = CollectConfig(episodes=episodes, split=split, out=out, policy="mix" if expert else "explore")
    run_collect(config.model_copy(update={"collect": wanted}))
    return out


def _no_data(name: str) -> str:
    if is_known(name):
        return "--held-out selects from given trajectories: add --data"
    missing = f"environment {name!r} is not installed{nearest_name(name, environment_names())}"
    return f"{missing}; or give real trajectories of it (--data)"
