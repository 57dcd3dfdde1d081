"""Evaluates policies by name: training runs (``RUN``, ``RUN@STEP``) and language models as agents."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dreamgym.config import Config
from dreamgym.distributed.player import GroupPlayer, LocalPlayer
from dreamgym.distributed.real import EvaluationSetup, RealSetup
from dreamgym.distributed.setup import LOGS, check_budget, divided, open_player, pool_settings
from dreamgym.envs.references import short_name
from dreamgym.envs.registry import open_environment
from dreamgym.envs.wrappers import StepCounter
from dreamgym.evaluation.evaluate import Comparison, Evaluation, compare, evaluate, evaluation_split
from dreamgym.evaluation.policies import open_policy
from dreamgym.evaluation.sim_real_gap import dream_success, gap_warning
from dreamgym.files import write_text
from dreamgym.models.registry import names_language_model
from dreamgym.models.usage import Usage
from dreamgym.protocols import EnvironmentFactory
from dreamgym.rollouts import CircuitBreaker, GroupSettings
from dreamgym.training.run_dir import METRICS, RunDir, parse_policy_name, read_config

DIRECTORY = "evaluations"
OnEpisode = Callable[[str], None]
"""Receives the policy's name after each episode."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunEvaluation:
    """One or two policies on the same real episodes."""

    evaluations: tuple[Evaluation, ...]
    comparison: Comparison | None
    notes: tuple[str, ...]
    """Warnings, and what the result applies to."""

    def to_dict(self) -> dict[str, Any]:
        first, *others = (each.to_dict() for each in self.evaluations)
        first["notes"] = list(self.notes)
        if self.comparison is not None:
            first["comparison"] = {"against": others[0]["policy"], **self.comparison.to_dict()}
            first["other"] = others[0]
        return first


async def evaluate_runs(
    config: Config,
    names: Sequence[str],
    *,
    split: str | None = None,
    episodes: int = 200,
    seed: int = 0,
    concurrency: int = 64,
    temperature: float | None = None,
    on_episode: OnEpisode = lambda policy: None,
    factory: EnvironmentFactory | None = None,
    workers: int = 0,
) -> RunEvaluation:
    """Play the same real episodes with each policy; results and trajectories go into the run directory.
    `factory` is the environment if it is open already; it stays open. Episodes are played on `workers`
    workers (``cluster.*`` says where), or in this process."""
    found: list[Evaluation] = []
    notes = [note for name in names if not names_language_model(name) and (note := _unfinished(name))]
    own = factory is None
    factory = factory or open_environment(config.environment.name, config.environment.options)
    try:
        chosen = split or evaluation_split(factory.splits)
        for name in names:
            policy = _full_name(name)
            player = _open_player(
                *(config, factory, policy, temperature, notes),
                workers=workers,
                episodes=episodes,
                concurrency=concurrency,
            )
            async with player as opened:
                found.append(
                    await evaluate(
                        factory,
                        player=opened,
                        split=chosen,
                        episodes=episodes,
                        seed=seed,
                        concurrency=concurrency,
                        policy=policy,
                        on_episode=lambda policy=policy: on_episode(policy),  # type: ignore[misc]
                        keep=_trajectories(policy, config, chosen, seed, temperature),
                    )
                )
    finally:
        if own:
            await factory.aclose()
    notes += [warning for each in found if (warning := _gap(each)) is not None]
    result = RunEvaluation(
        evaluations=tuple(found),
        comparison=compare(found[0], found[1]) if len(found) > 1 else None,
        notes=tuple(notes),
    )
    _save(result)
    return result


def environment_of(run: str, given: Config) -> Config:
    """The settings with the environment and options of the evaluated run, unless they state others."""
    if names_language_model(run):
        return given
    trained = read_config(parse_policy_name(run)[0]).environment
    if "name" in given.environment.model_fields_set and given.environment.name != trained.name:
        return given
    options = {**trained.options, **given.environment.options}
    return given.model_copy(update={"environment": trained.model_copy(update={"options": options})})


def _full_name(name: str) -> str:
    """``RUN@STEP`` of a run's selected policy; other names as they are."""
    if names_language_model(name):
        return name
    run, step = parse_policy_name(name)
    return f"{run}@{RunDir(run).selected_policy() if step is None else step}"


@asynccontextmanager
async def _open_player(
    config: Config,
    factory: EnvironmentFactory,
    policy: str,
    temperature: float | None,
    notes: list[str],
    *,
    workers: int,
    episodes: int,
    concurrency: int,
) -> AsyncIterator[GroupPlayer]:
    """Plays episodes with this policy here or on workers; usage of endpoints becomes a note."""
    breaker = CircuitBreaker(GroupSettings(size=1, concurrency=concurrency))
    if not workers:
        async with open_policy(policy, config, temperature, notes) as (make_policy, _):
            yield LocalPlayer(StepCounter(factory), make_policy, breaker)
        return
    check_budget(config, "--workers 0")
    usage, folder = Usage(), Path(DIRECTORY)
    if not names_language_model(policy):
        folder = parse_policy_name(policy)[0]
    setup = EvaluationSetup(
        real=RealSetup.of(divided(config, workers), factory), policy=policy, temperature=temperature
    )
    async with AsyncExitStack() as stack:
        yield await open_player(
            *(stack, config, setup),
            pool_settings(config, workers, jobs=episodes, episodes=1, concurrency=concurrency),
            breaker,
            workers=workers,
            logs=folder / LOGS,
            on_event=notes.append,
            usage=usage,
            stage="evaluation",
        )
    if usage.rows:
        notes.append(f"endpoints: {usage.summary()}")


def _trajectories(
    policy: str, config: Config, split: str, seed: int, temperature: float | None
) -> Path | None:
    """The directory of a run's episodes under exactly these conditions; None for a language model."""
    if names_language_model(policy):
        return None
    run, step = parse_policy_name(policy)
    conditions = [step, config.environment.model_dump(mode="json"), split, seed, temperature]
    digest = hashlib.sha256(json.dumps(conditions, sort_keys=True).encode()).hexdigest()[:8]
    return run / DIRECTORY / f"{short_name(config.environment.name)}-{split}-{seed}-step-{step}-{digest}"


def _unfinished(name: str) -> str | None:
    """A note on a run that has no summary yet."""
    run, step = parse_policy_name(name)
    if RunDir(run).finished:
        return None
    selected = RunDir(run).selected_policy() if step is None else step
    return f"{run} has not finished training: this is its policy of step {selected}"


def _gap(found: Evaluation) -> str | None:
    """The warning for a policy that was trained in a dream and succeeds far less in reality."""
    run, step = parse_policy_name(found.policy)
    real = found.success.value
    if names_language_model(found.policy) or not step or real is None:
        return None
    dream = dream_success(run / METRICS).get("last")
    warning = None if dream is None else gap_warning(dream - real)
    return None if warning is None else f"warning: {run}: {warning}"


def _save(result: RunEvaluation) -> None:
    first = result.evaluations[0]
    run, step = parse_policy_name(first.policy)
    named = names_language_model(first.policy)
    policy = _file_name(first.policy) if named else f"step-{step}"
    name = f"{short_name(first.environment)}-{first.split}-{first.seed}-{policy}"
    if result.comparison is not None:
        name += f"-against-{_file_name(result.evaluations[1].policy)}"
    folder = Path(DIRECTORY) if named else run / DIRECTORY
    write_text(folder / f"{name}.json", json.dumps(result.to_dict(), indent=2) + "\n")


def _file_name(text: str) -> str:
    return re.sub(r"[^\w.-]+", "-", text)
