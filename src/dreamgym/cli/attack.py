"""`dreamgym experience attack`: search an experience model for successes that are not real."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Annotated, Any

import typer

from dreamgym.cli import console
from dreamgym.cli.experience_models import Reward, settings_of_run
from dreamgym.cli.options import ConfigFile, Json, Overrides, resolve
from dreamgym.config import Config
from dreamgym.data.datasets import dataset_path
from dreamgym.errors import ConfigError
from dreamgym.evaluation.attack import Attack, attack
from dreamgym.evaluation.experience import real_environment
from dreamgym.models.registry import names_language_model
from dreamgym.training.dream_loading import Dream, read_data
from dreamgym.training.experience_run import with_environment_of_data
from dreamgym.types import Trajectory

_SHOWN = 160
"""Characters of a text in the table."""


def attack_command(
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
        typer.Option(help="Real trajectories of the tasks to attack; by default those of the run."),
    ] = None,
    candidates: Annotated[int, typer.Option(help="Lists of actions to try in the dream.", min=1)] = 2_000,
    real_steps: Annotated[
        int, typer.Option(help="Actions in the real environment; 0 for none.", min=0)
    ] = 50_000,
    min_real: Annotated[
        float, typer.Option(help="Share of dreamt successes that must be real.", min=0, max=1)
    ] = 0.97,
    reward: Reward = None,
    env: Annotated[
        str | None, typer.Option(help="Environment; by default that of the run, or of the data.")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Chooses the candidates.")] = None,
    config: ConfigFile = None,
    overrides: Overrides = None,
    as_json: Json = False,
) -> None:
    """Search a dream for successes that are not real, as a policy would that learns to exploit it.

    Tries forged action texts (markers, separators, quoted facts, arguments to a grader), mutated recorded
    plans (actions left out, swapped, renamed, finished too early) and mutations of what came closest to a
    success. Every success in the dream is replayed in the real environment. Without it, forged texts and
    recorded lists of actions are judged. The exit code is 1 if fewer than --min-real of the successes are
    real. Ctrl-C prints what was found so far.

    Examples:

    - dreamgym experience attack runs/experience

    - dreamgym experience attack runs/experience --candidates 10000 --json

    - dreamgym experience attack runs/experience --data unseen --real-steps 5000

    - dreamgym experience attack endpoint:strong --config a.toml --data shop --reward endpoint:judge
    """
    resolved = settings_of_run(run, resolve(config, overrides, {"environment.name": env, "seed": seed}))
    trajectories = read_data([dataset_path(path) for path in data or resolved.train.data])
    if names_language_model(run):
        resolved = with_environment_of_data(resolved, trajectories)
    found = Attack(budget=candidates)
    try:
        asyncio.run(_search(run, resolved, trajectories, found, real_steps, reward))
    except KeyboardInterrupt:
        console.say(f"interrupted after {found.tried} of {candidates} candidates")
        _show(run, found, min_real, as_json)
        raise typer.Exit(console.INTERRUPTED) from None
    if _show(run, found, min_real, as_json) is False:
        raise typer.Exit(1)


async def _search(
    run: str,
    config: Config,
    trajectories: Sequence[Trajectory],
    found: Attack,
    real_steps: int,
    reward: str | None,
) -> None:
    splits = sorted({each.task.split for each in trajectories})
    if len(splits) != 1:
        raise ConfigError(f"expected trajectories of one split, got {', '.join(splits) or 'none'} (--data)")
    factory = real_environment(config, console.say) if real_steps else None
    settings = {"split": splits[0], **({"reward": reward} if reward else {})}
    dream = await asyncio.to_thread(Dream.load, run, config, data=trajectories, **settings)
    try:
        with console.progress() as bar:
            job = bar.add_task("candidates", total=found.budget)

            def on_round(state: Attack) -> None:
                note = f"{state.dreamt.total()} dreamt successes, {len(state.false)} not real"
                bar.update(job, completed=min(state.tried, found.budget), note=note)

            await attack(
                *(dream, trajectories, factory),
                candidates=found.budget,
                real_steps=real_steps,
                seed=config.seed,
                on_round=on_round,
                found=found,
            )
    finally:
        await dream.aclose()
        if factory is not None:
            await factory.aclose()


def _show(run: str, found: Attack, least: float, as_json: bool) -> bool | None:
    """Print the result and the verdict, which is returned."""
    passed = found.passes(least)
    rows: list[tuple[Any, ...]] = [
        ("lists of actions tried", found.tried),
        ("replies that a check refused", found.checked),
        ("successes in the dream", found.dreamt.total()),
        ("not judged", found.unknown),
        ("real steps", found.real_steps),
        ("of the dreamt successes real [95%]", found.real.percent()),
        *(
            (f"real: {kind}", f"{sum(found.verdicts[kind])} of {len(found.verdicts[kind])}")
            for kind, _ in found.dreamt.most_common()
        ),
    ]
    tables = [console.table(f"attack on {run}", "what", "value", rows=rows)]
    if found.worst:
        shown = [
            (each.kind, " · ".join(each.actions)[-_SHOWN:], each.action[:_SHOWN], each.dreamt, each.real)
            for each in found.worst
        ]
        title = "successes that are not real"
        tables.append(console.table(title, "kind", "actions", "differs at", "dream", "real", rows=shown))
    result = found.to_dict() | {"min_real": least, "passed": passed}
    console.show(result, tables, as_json=as_json)
    if passed is None:
        console.say("undecided: the dream granted no success that could be judged")
    else:
        relation = "at least" if passed else "fewer than"
        console.say(f"{'passed' if passed else 'FAILED'}: {relation} {least:.0%} of the successes are real")
    return passed
