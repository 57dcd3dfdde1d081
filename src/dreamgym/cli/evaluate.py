"""`dreamgym evaluate`: the success rate of a policy in the real environment, alone or against another one."""

from __future__ import annotations

import asyncio
from typing import Annotated

import typer

from dreamgym.cli import console
from dreamgym.cli.experience_models import need_models
from dreamgym.cli.options import ConfigFile, Json, Overrides, resolve
from dreamgym.models.registry import names_language_model
from dreamgym.printable import short_names


def evaluate_command(
    run: Annotated[
        str,
        typer.Argument(
            metavar="RUN[@STEP]|MODEL",
            help="A training run (@0: its policy after the warm start), or a language model as the agent "
            "(endpoint:NAME, endpoint:MODEL@URL, hf:NAME_OR_PATH).",
        ),
    ],
    env: Annotated[str | None, typer.Option(help="Real environment; by default the run's own.")] = None,
    split: Annotated[
        str | None, typer.Option(help="Split of the tasks; by default the environment's evaluation split.")
    ] = None,
    episodes: Annotated[int, typer.Option(help="Number of episodes.", min=1)] = 200,
    against: Annotated[
        str | None, typer.Option(metavar="RUN[@STEP]|MODEL", help="Another policy, on the same episodes.")
    ] = None,
    temperature: Annotated[
        float | None, typer.Option(help="Of the replies; by default agent.evaluation_temperature.", min=0)
    ] = None,
    concurrency: Annotated[int, typer.Option(help="Concurrent episodes.", min=1)] = 64,
    workers: Annotated[
        int, typer.Option(help="Processes, or Ray actors, that play the episodes; 0: this process.", min=0)
    ] = 0,
    seed: Annotated[int, typer.Option(help="Chooses the tasks and their randomness.")] = 0,
    config: ConfigFile = None,
    overrides: Overrides = None,
    as_json: Json = False,
) -> None:
    """Play real episodes with a policy and print its success with 95% Wilson intervals, by task family.

    With --against both policies play the same tasks with the same seeds, and the difference is paired.
    Results and trajectories go into RUN/evaluations, and an interrupted evaluation resumes. For a language
    model the agent.* settings apply, and the result goes into ./evaluations.

    Examples:

    - dreamgym evaluate runs/agent --against runs/agent@0
    - dreamgym evaluate runs/agent --env alfworld --split valid_seen --episodes 50 --json
    - dreamgym evaluate runs/ppo --against runs/grpo --seed 1
    - dreamgym evaluate endpoint:MODEL@http://localhost:8000 --set agent.show_actions=now --episodes 20
    """
    names = [run] if against is None else [run, against]
    if not all(map(names_language_model, names)):
        need_models()
    from dreamgym.evaluation.evaluate import evaluation_rows
    from dreamgym.evaluation.runs import environment_of, evaluate_runs

    resolved = environment_of(run, resolve(config, overrides, {"environment.name": env}))
    with console.progress() as bar:
        job = bar.add_task("real episodes", total=episodes * len(names))

        def on_episode(policy: str) -> None:
            bar.advance(job, note=policy)

        found = asyncio.run(
            evaluate_runs(
                resolved,
                names,
                split=split,
                episodes=episodes,
                seed=seed,
                concurrency=concurrency,
                workers=workers,
                temperature=temperature,
                on_episode=on_episode,
            )
        )
    first = found.evaluations[0]
    labels = short_names([each.policy for each in found.evaluations])
    tables = [
        console.table(
            f"real success on {first.environment}/{first.split}",
            *("policy", "family", "episodes", "success [95%]", "steps per episode"),
            rows=evaluation_rows(found.evaluations, labels),
        )
    ]
    if found.comparison is not None:
        paired = found.comparison
        difference = paired.difference.percent(signed=True)
        tables.append(
            console.table(
                f"{labels[0]} against {labels[1]}, paired",
                *("difference [95%]", "only the first", "only the second", "p (McNemar)"),
                rows=[(difference, paired.first_only, paired.second_only, f"{paired.p_value:.4f}")],
            )
        )
    console.show(found.to_dict(), tables, as_json=as_json)
    for note in found.notes:
        console.say(note)
