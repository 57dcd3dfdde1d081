"""Assembles and runs a training run: agent, warm start, environment, loop, summary. It resumes what its
directory holds."""

from __future__ import annotations

import json
import shutil
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any

from dreamgym.config import Config
from dreamgym.data.datasets import dataset_path
from dreamgym.data.trajectories import TrajectoryWriter, read_trajectories
from dreamgym.envs.registry import EnvironmentSpec, environment_horizon, open_environment
from dreamgym.envs.synthetic import StartFor
from dreamgym.errors import ConfigError
from dreamgym.evaluation.evaluate import Evaluation, evaluate, validation_split
from dreamgym.files import atomic_directory, write_text
from dreamgym.models.registry import LanguageModels, check_language_model, names_language_model
from dreamgym.models.usage import stage
from dreamgym.protocols import EnvironmentFactory, ExperienceModel, TaskSource
from dreamgym.rollouts import CircuitBreaker, GroupSettings, Origin
from dreamgym.training.agent import BASE, Agent, make_agent, make_learner, same_policy
from dreamgym.training.curriculum_setup import curriculum_of, generates
from dreamgym.training.dpo import train_dpo
from dreamgym.training.dream_setup import EpisodeSource, open_episode_source
from dreamgym.training.experience_loading import check_prompted_model, choose_grader
from dreamgym.training.experience_run import inherit_settings, known_environment
from dreamgym.training.loop import Loop
from dreamgym.training.metrics import MetricsLog, Row, read_metrics
from dreamgym.training.monitors import Monitors
from dreamgym.training.prediction_log import PREDICTIONS
from dreamgym.training.run_dir import (
    EXPORT,
    METRICS,
    SUMMARY,
    TRAJECTORIES,
    WARM_START,
    RunDir,
    parse_policy_name,
    read_config,
    with_absolute_paths,
)
from dreamgym.training.run_recorder import RunRecorder, Stateful
from dreamgym.training.uniform_tasks import UniformTasks
from dreamgym.training.warm_start import seconds_of, warm_start
from dreamgym.types import Task, Trajectory

MakeTaskSource = Callable[[Sequence[Task]], TaskSource]
"""Makes the task source from the seed tasks."""
_RECENT = 3
"""Training steps whose mean success is in the summary."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """The progress of a run, for a progress bar or a log."""

    stage: str
    """``replay buffer``, ``warm start``, ``dpo`` or ``train``."""
    done: int
    total: int
    """In steps; with a budget of real steps, in those."""
    row: Row
    warnings: tuple[str, ...] = ()
    endpoints: str = ""
    """Usage of endpoints so far, in one line; empty where none was used."""


OnProgress = Callable[[Progress], None]


@dataclass(slots=True, kw_only=True)
class _Run:
    """What every part of one call of `train` needs."""

    config: Config
    spec: EnvironmentSpec | None
    run_dir: RunDir
    offline: Sequence[Trajectory]
    models: LanguageModels
    real: EnvironmentFactory | None
    experience_model: ExperienceModel | None
    start_for: StartFor | None
    """The starts of tasks that no trajectory holds; a curriculum sets it."""
    on_progress: OnProgress

    @property
    def refusals(self) -> tuple[str, ...]:
        return self.spec.refusals if self.spec is not None else ()

    def report(self, stage: str, done: int, total: int, row: Row | None = None) -> None:
        self.on_progress(Progress(stage=stage, done=done, total=total, row=row or {}))


def resolve_settings(config: Config) -> Config:
    """The settings with environment, options, data and horizon of the experience run, if they name one."""
    name = config.train.experience
    return config if name is None or config.train.mode != "dream" else inherit_settings(config, name)


def check(config: Config, *, has_experience_model: bool = False) -> EnvironmentSpec | None:
    """Check the settings before anything starts; returns the environment's spec, if it is registered."""
    chosen, name = config.train, config.environment.name
    if not config.agent.temperature:
        raise ConfigError("agent.temperature=0 leaves nothing to explore: training needs a value above 0")
    spec = known_environment(name)
    if config.learner.algorithm == "dpo" and chosen.evaluate_every:
        raise ConfigError(
            "train.evaluate_every selects among the policies of RL steps, learner.algorithm=dpo has none: "
            "set it to 0 and evaluate the run afterwards"
        )
    if chosen.mode == "dream" and config.learner.algorithm != "dpo":
        _check_dream(config, spec, has_experience_model)
    generates(config, spec)
    for source in chosen.data:
        dataset_path(source)
    return spec


def _check_dream(config: Config, spec: EnvironmentSpec | None, has_experience_model: bool) -> None:
    chosen, agent = config.train, config.agent
    if chosen.experience is None and not has_experience_model:
        raise ConfigError(
            "expected train.experience: the run of an experience model (dreamgym experience train) or a "
            "language model (endpoint:NAME, hf:NAME_OR_PATH); or set train.mode=real"
        )
    grader = choose_grader(chosen.reward, spec)
    if chosen.experience is not None and names_language_model(chosen.experience):
        check_prompted_model(chosen.experience, config, grader)
    if names_language_model(grader):
        check_language_model(grader, config)
    if agent.enforce_actions or agent.show_actions != "never":
        raise ConfigError(
            "agent.show_actions and agent.enforce_actions need lists of admissible actions, which the dream "
            "does not have: turn them off, or set train.mode=real"
        )
    if chosen.tasks_from == "environment":
        raise ConfigError("train.tasks_from=environment needs train.mode=real: a dream needs world sheets")
    if chosen.real_steps is not None:
        raise ConfigError("train.real_steps needs train.mode=real: the dream takes no real steps")


async def train(
    config: Config,
    *,
    real: EnvironmentFactory | None = None,
    experience_model: ExperienceModel | None = None,
    make_tasks: MakeTaskSource | None = None,
    start_for: StartFor | None = None,
    on_progress: OnProgress | None = None,
) -> dict[str, Any]:
    """Run or resume `config`; returns the content of `summary.json`. Objects replace what the settings
    name; `start_for` gives the starts of tasks that the source of `make_tasks` generates."""
    config = with_absolute_paths(resolve_settings(config))
    spec = check(config, has_experience_model=experience_model is not None)
    offline = [found for source in config.train.data for found in read_trajectories(dataset_path(source))]
    with RunDir.open(config) as run_dir:
        async with AsyncExitStack() as stack:
            models = await stack.enter_async_context(LanguageModels(config, folder=run_dir.path))
            run = _Run(
                config=config,
                spec=spec,
                run_dir=run_dir,
                offline=offline,
                models=models,
                real=real,
                experience_model=experience_model,
                start_for=start_for,
                on_progress=on_progress or (lambda progress: None),
            )
            agent = _initial_agent(run)
            stack.push_async_callback(agent.aclose)
            if config.learner.algorithm == "dpo":
                recorder, ended = await _train_dpo(run, stack, agent)
            else:
                recorder, ended = await _train_rl(run, stack, agent, make_tasks)
            return _finish(run, agent, recorder, ended)


async def _train_rl(
    run: _Run, stack: AsyncExitStack, agent: Agent, make_tasks: MakeTaskSource | None
) -> tuple[RunRecorder, str]:
    config, chosen, run_dir = run.config, run.config.train, run.run_dir
    if run.real is None and (chosen.mode == "real" or chosen.evaluate_every):
        run.real = open_environment(config.environment.name, config.environment.options)
        stack.push_async_callback(run.real.aclose)
    source = await open_episode_source(
        *(stack, config, run_dir.path, run.offline),
        real=run.real,
        experience_model=run.experience_model,
        models=run.models,
        start_for=lambda task, seed: None if run.start_for is None else run.start_for(task, seed),
        on_row=lambda done, total: run.report("replay buffer", done, total),
    )
    await run.models.check_reachable()  # an error before the warm start, not after it
    await _warm_start(run, agent)
    learner = make_learner(config, agent, run.refusals)
    tasks = await _task_source(run, stack, source, make_tasks)
    monitors = Monitors(chosen, max_tokens=config.agent.max_tokens)
    recorder = _recorder(
        run, stack, agent, {"learner": learner, "tasks": tasks, "monitors": monitors}, source=source
    )
    await recorder.resume()
    if (state := run_dir.load(WARM_START)) is not None:
        recorder.spent["warm_start_seconds"] = seconds_of(state)
    dreaming = chosen.mode == "dream"
    groups = _group_settings(config)

    def on_step(row: Row, warnings: Sequence[str]) -> None:
        run.on_progress(_step_progress(run, recorder, row, warnings))

    loop = Loop(
        tasks=tasks,
        factory=source.factory,
        make_policy=agent.policy_factory(run_dir.path.name),
        learner=learner,
        monitors=monitors,
        recorder=recorder,
        groups=groups,
        breaker=CircuitBreaker(groups, lambda why: on_step({}, [why])),
        origin=lambda: Origin(
            source="synthetic" if dreaming else "real",
            experience_model=chosen.experience if dreaming else None,
            policy_version=learner.updates,
        ),
        evaluate=_validation(run, agent, run.real) if chosen.evaluate_every and run.real else None,
        seed=config.seed,
        horizon=environment_horizon(run.spec, config.environment.options) or chosen.horizon,
        refusals=run.refusals,
        on_step=on_step,
    )
    on_step({}, [])
    with stage("train"):
        ended = await loop.run()
    await recorder.update_buffer()
    return recorder, ended


async def _train_dpo(run: _Run, stack: AsyncExitStack, agent: Agent) -> tuple[RunRecorder, str]:
    """DPO on pairs of offline trajectories, without an environment."""
    await _warm_start(run, agent)
    recorder = _recorder(run, stack, agent, {})
    total = run.config.train.steps
    recorder.done = await train_dpo(
        *(agent, run.offline, run.config, run.run_dir, recorder.log),
        lambda step, row: run.report("dpo", step, total, row),
    )
    return recorder, f"{recorder.done} updates on recorded pairs are done"


def _recorder(
    run: _Run,
    stack: AsyncExitStack,
    agent: Agent,
    parts: dict[str, Stateful],
    source: EpisodeSource | None = None,
) -> RunRecorder:
    path, chosen = run.run_dir.path, run.config.train
    dreaming = source is not None and source.experience_model is not None
    return RunRecorder(
        config=chosen,
        run_dir=run.run_dir,
        log=stack.enter_context(MetricsLog(path / METRICS)),
        trajectories=stack.enter_context(TrajectoryWriter(path / TRAJECTORIES)),
        parts=parts,
        weights=agent.weights,
        buffer=source.buffer if source is not None and chosen.update_replay_buffer else None,
        predictions=stack.enter_context(MetricsLog(path / PREDICTIONS)) if dreaming else None,
    )


async def _task_source(
    run: _Run, stack: AsyncExitStack, source: EpisodeSource, make_tasks: MakeTaskSource | None
) -> TaskSource:
    """The caller's; else a curriculum, if the settings ask for one; else uniform sampling."""
    if make_tasks is not None:
        return make_tasks(source.tasks)
    config, spec, model = run.config, run.spec, source.experience_model
    if spec is not None and model is not None and generates(config, spec):
        planned = await curriculum_of(
            config, spec, run.run_dir.path, run.offline, source.tasks, model, run.models
        )
        if planned is not None:
            curriculum, run.start_for = planned
            stack.callback(curriculum.pool.close)
            return curriculum
    return UniformTasks(source.tasks, seed=config.seed)


def _initial_agent(run: _Run) -> Agent:
    """The agent before its first update, or with the weights of the run in `train.init_from`."""
    config, path = run.config, run.run_dir.path
    if config.train.init_from is None:
        return make_agent(config, run.offline, path)
    source, step = parse_policy_name(config.train.init_from)
    if not same_policy(read_config(source).agent, config.agent):
        raise ConfigError(
            f"train.init_from={config.train.init_from!r}: its policy has other agent settings than these; "
            f"copy them from {source / 'config.json'}"
        )
    if (source / BASE).exists() and not (path / BASE).exists():
        with atomic_directory(path / BASE) as fresh:
            shutil.copytree(source / BASE, fresh, dirs_exist_ok=True)
    agent = make_agent(config, run.offline, path)
    theirs = RunDir(source)
    agent.restore(theirs.policy_weights(theirs.selected_policy() if step is None else step))
    return agent


async def _warm_start(run: _Run, agent: Agent) -> None:
    """SFT on recorded successes; skipped if the run has finished it before."""
    run_dir, chosen = run.run_dir, run.config.train
    if 0 in run_dir.saved_policies():
        agent.restore(run_dir.policy_weights(0))
        return
    if chosen.init_from is None and chosen.warm_start_steps:
        await warm_start(
            *(agent, run.offline, run.config, run_dir),
            lambda step, row: run.report("warm start", step, chosen.warm_start_steps, row),
            refusals=run.refusals,
            think=run.spec.think if run.spec is not None else None,
        )
    run_dir.save_policy(0, agent.weights())


def _group_settings(config: Config) -> GroupSettings:
    chosen = config.train
    return GroupSettings(
        size=chosen.group_size,
        concurrency=chosen.concurrency,
        retries=chosen.retries,
        pause=chosen.failure_pause_seconds,
    )


def _validation(run: _Run, agent: Agent, real: EnvironmentFactory) -> Callable[[], Awaitable[Evaluation]]:
    config, name = run.config, run.run_dir.path.name
    make_policy = agent.policy_factory(name, temperature=config.agent.evaluation_temperature)

    async def validate() -> Evaluation:
        return await evaluate(
            real,
            make_policy,
            split=validation_split(real.splits),
            episodes=config.train.evaluate_episodes,
            seed=config.seed,
            policy=name,
        )

    return validate


def _step_progress(run: _Run, recorder: RunRecorder, row: Row, warnings: Sequence[str]) -> Progress:
    chosen = run.config.train
    done, total = recorder.done, chosen.steps
    if chosen.real_steps is not None:
        total = chosen.real_steps
        done = min(total, int(recorder.spent.get("real_steps", 0)))
    return Progress(
        stage="train",
        done=done,
        total=total,
        row=row,
        warnings=tuple(warnings),
        endpoints=run.models.usage.summary() if run.models.usage.rows else "",
    )


def _finish(run: _Run, agent: Agent, recorder: RunRecorder, ended: str) -> dict[str, Any]:
    run_dir = run.run_dir
    run_dir.save_policy(recorder.done, agent.weights())
    selected = run_dir.selected_policy()
    agent.restore(run_dir.policy_weights(selected))
    agent.save(run_dir.path / EXPORT)
    recent = [row["success"] for row in read_metrics(run_dir.path / METRICS, "train")[-_RECENT:]]
    summary = {
        "out": str(run_dir.path),
        "ended": ended,
        "steps": recorder.done,
        "policy": selected,
        "policies": run_dir.saved_policies(),
        "spent": {name: round(amount, 2) for name, amount in recorder.spent.items()},
    }
    if recent:
        summary["success"] = round(sum(recent) / len(recent), 4)
    if run.models.usage.rows:
        summary["endpoints"] = run.models.usage.to_dict()
    write_text(run_dir.path / SUMMARY, json.dumps(summary, indent=2) + "\n")
    return summary
