"""`dreamgym evaluate`: how often a policy succeeds in the real environment, alone or against another one."""

from __future__ import annotations

import asyncio
import hashlib
import json
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dreamgym.cli import console
from dreamgym.cli.experience_models import need_models
from dreamgym.cli.options import ConfigFile, Json, Overrides, resolve
from dreamgym.config import Config
from dreamgym.envs.registry import open_environment
from dreamgym.models.registry import LanguageModels, names_language_model
from dreamgym.models.usage import stage
from dreamgym.prompted_policy import prompted_policy_factory
from dreamgym.rollout_groups import PolicyFactory

if TYPE_CHECKING:
    from dreamgym.evaluation.evaluate import Evaluation, EvaluationSettings

FOLDER = "evaluations"


@console.command
def evaluate_command(
    run: Annotated[
        str,
        typer.Argument(
            metavar="RUN[@STEP]|MODEL",
            help="A training run (@0 is its policy before practice), or a language model as the agent "
            "(endpoint:NAME, endpoint:MODEL@URL, hf:NAME_OR_PATH).",
        ),
    ],
    env: Annotated[str | None, typer.Option(help="Real environment; by default the run's own.")] = None,
    split: Annotated[
        str, typer.Option(help="Which tasks, see `dreamgym envs describe NAME`.")
    ] = "valid_unseen",
    episodes: Annotated[int, typer.Option(help="How many are played.", min=1)] = 200,
    against: Annotated[
        str | None, typer.Option(metavar="RUN[@STEP]|MODEL", help="Another policy, on the same episodes.")
    ] = None,
    temperature: Annotated[
        float | None, typer.Option(help="Of the replies; by default agent.evaluation_temperature.", min=0)
    ] = None,
    concurrency: Annotated[int, typer.Option(help="Episodes in flight.", min=1)] = 64,
    seed: Annotated[int, typer.Option(help="Chooses the tasks and their dice.")] = 0,
    config: ConfigFile = None,
    overrides: Overrides = None,
    as_json: Json = False,
) -> None:
    """Play real episodes with a policy and tell its success with 95% Wilson intervals, by family of task.

    With --against both policies play the same tasks with the same seeds, and the difference is paired.
    Leaves its result and its trajectories in the folder `evaluations` of the run, and goes on where it was
    stopped; or its result here for a language model, which is asked as the agent.* settings say.

    Examples:

      dreamgym evaluate runs/agent --env alfworld --split valid_unseen --episodes 200

      dreamgym evaluate runs/agent --against runs/agent@0 --json

      dreamgym evaluate runs/ppo --against runs/grpo --split valid_seen --seed 1

      dreamgym evaluate endpoint:MODEL@http://localhost:8000 --set agent.show_actions=now --episodes 20
    """
    if not names_language_model(run) or (against is not None and not names_language_model(against)):
        need_models()
    from dreamgym.evaluation.evaluate import EvaluationSettings, compare, evaluation_rows
    from dreamgym.training.run_dir import named_policy, read_config

    if names_language_model(run):
        folder, begun = Path(), Config()
    else:
        folder, _ = named_policy(run)
        begun = read_config(folder)
    given = resolve(config, overrides, {"environment.name": env or begun.environment.name})
    options = given.environment.options
    if given.environment.name == begun.environment.name:
        options = {**begun.environment.options, **options}
    environment = given.environment.model_copy(update={"options": options})
    resolved = given.model_copy(update={"environment": environment})
    settings = EvaluationSettings(split=split, episodes=episodes, seed=seed, concurrency=concurrency)
    names = [run] if against is None else [run, against]
    found = asyncio.run(_evaluate(resolved, names, settings, temperature))
    result = found[0].to_dict()
    tables = [
        console.table(
            f"real success on {found[0].environment}/{split}",
            *("policy", "family", "episodes", "success [95%]", "steps per episode"),
            rows=evaluation_rows(found),
        )
    ]
    if len(found) > 1:
        comparison = compare(found[0], found[1])
        result["comparison"] = {"against": found[1].policy, **comparison.to_dict()}
        result["other"] = found[1].to_dict()
        tables.append(
            console.table(
                f"{found[0].policy} against {found[1].policy}, paired",
                *("difference [95%]", "only the first", "only the second", "p (McNemar)"),
                rows=[
                    (
                        comparison.difference,
                        comparison.first_only,
                        comparison.second_only,
                        f"{comparison.p_value:.4f}",
                    )
                ],
            )
        )
    _keep(folder, result)
    console.show(result, tables, as_json=as_json)


async def _evaluate(
    config: Config, names: list[str], settings: EvaluationSettings, temperature: float | None
) -> list[Evaluation]:
    from dreamgym.evaluation.evaluate import evaluate

    found: list[Evaluation] = []
    factory = open_environment(config.environment.name, config.environment.options)
    try:
        with console.progress() as bar:
            job = bar.add_task("playing", total=settings.episodes * len(names), note="")
            for name in names:
                async with _members(name, config, temperature) as (members, called):
                    bar.update(job, note=called)
                    found.append(
                        await evaluate(
                            factory,
                            members,
                            settings,
                            policy=called,
                            on_episode=lambda: bar.advance(job),
                            keep=_trajectories(called, config, settings, temperature),
                        )
                    )
    finally:
        await factory.aclose()
    return found


def _trajectories(
    policy: str, config: Config, settings: EvaluationSettings, temperature: float | None
) -> Path | None:
    """Where a run's episodes under exactly these conditions are kept; nowhere for a language model."""
    from dreamgym.training.run_dir import named_policy

    if names_language_model(policy):
        return None
    asked = [policy, config.environment.model_dump(mode="json"), settings.split, settings.seed, temperature]
    digest = hashlib.sha256(json.dumps(asked, sort_keys=True).encode()).hexdigest()[:8]
    step = policy.rpartition("@")[2]
    name = f"{config.environment.name}-{settings.split}-{settings.seed}-step-{step}-{digest}"
    return named_policy(policy)[0] / FOLDER / name


@asynccontextmanager
async def _members(
    name: str, config: Config, temperature: float | None
) -> AsyncIterator[tuple[PolicyFactory, str]]:
    """Who plays: a run's policy, or a language model that is asked to."""
    if not names_language_model(name):
        from dreamgym.training.agent import opened_agent

        async with opened_agent(name, device=config.agent.device) as agent:
            heat = agent.config.evaluation_temperature if temperature is None else temperature
            yield agent.policy_factory(temperature=heat), agent.name
        return
    heat = config.agent.evaluation_temperature if temperature is None else temperature
    async with LanguageModels(config) as models:
        with stage("evaluation"):
            model = models.open(name, role="agent")
            await models.check_reachable()
            agent_config = config.agent.at_temperature(heat)
            yield prompted_policy_factory(model, agent_config, name=name), name
        if models.usage.rows:
            console.err.print(f"endpoints: {models.usage.summary()}", markup=False, soft_wrap=True)


def _keep(run: Path, result: dict[str, Any]) -> None:
    from dreamgym.files import write_text

    policy = str(result["policy"])
    who = _plain(policy) if names_language_model(policy) else f"step-{policy.rpartition('@')[2]}"
    name = f"{result['environment']}-{result['split']}-{result['seed']}-{who}"
    if "comparison" in result:
        name += "-against-" + _plain(str(result["comparison"]["against"]))
    write_text(run / FOLDER / f"{name}.json", json.dumps(result, indent=2) + "\n")


def _plain(name: str) -> str:
    """
    >>> _plain("endpoint:m@http://localhost:80"), _plain("runs/agent@3")
    ('endpoint_m@http_localhost_80', 'runs_agent@3')
    """
    return re.sub(r"[/:]+", "_", name)
