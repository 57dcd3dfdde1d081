"""Assembles and runs a training run: agent, warm start, environment, loop, summary. It resumes what its
directory holds."""

from __future__ import annotations

import functools
import json
import shutil
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dreamgym.config import Config, TrainConfig
from dreamgym.data.datasets import dataset_path
from dreamgym.data.trajectories import TrajectoryWriter, read_trajectories
from dreamgym.distributed.player import GroupPlayer, LocalPlayer
from dreamgym.distributed.setup import open_training_player
from dreamgym.distributed.worker import TrainSetup
from dreamgym.envs.registry import EnvironmentSpec, environment_horizon, open_environment
from dreamgym.envs.synthetic import EpisodeStart, StartFor
from dreamgym.errors import ConfigError, DreamExploitedError
from dreamgym.evaluation.evaluate import Evaluation, evaluate, validation_split
from dreamgym.files import atomic_directory, write_text
from dreamgym.models.registry import LanguageModels
from dreamgym.models.usage import stage
from dreamgym.protocols import EnvironmentFactory, ExperienceModel, TaskSource
from dreamgym.rollouts import CircuitBreaker, Origin
from dreamgym.training.agent import Agent, make_agent, make_learner, same_policy
from dreamgym.training.audit_setup import open_audits
from dreamgym.training.audits import Audits
from dreamgym.training.curriculum_setup import curriculum_of, generates
from dreamgym.training.dpo import train_dpo
from dreamgym.training.dream_setup import EpisodeSource, open_episode_source
from dreamgym.training.gate import PracticeGate
from dreamgym.training.loop import Loop, group_settings
from dreamgym.training.metrics import MetricsLog, Row, read_metrics
from dreamgym.training.monitors import Monitors
from dreamgym.training.prediction_log import PREDICTIONS
from dreamgym.training.progress import OnProgress, Progress
from dreamgym.training.resets import with_resets
from dreamgym.training.run_dir import (
    BASE,
    EXPORT,
    METRICS,
    SELECTED,
    SUMMARY,
    TRAJECTORIES,
    WARM_START,
    RunDir,
    parse_policy_name,
    read_config,
    with_absolute_paths,
)
from dreamgym.training.run_recorder import RunRecorder, Stateful
from dreamgym.training.served import ServedPlayer, open_served_agent
from dreamgym.training.settings_check import check, resolve_settings
from dreamgym.training.uniform_tasks import UniformTasks
from dreamgym.training.warm_start import reaches, recorded_successes, seconds_of, warm_start
from dreamgym.types import Task, Trajectory

if TYPE_CHECKING:
    from dreamgym.rl.policy_gradient import PolicyGradient

MakeTaskSource = Callable[[Sequence[Task]], TaskSource]
"""Makes the task source from the seed tasks."""
_RECENT = 3
"""Training steps whose mean success is in the summary."""


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
    setup: TrainSetup | None = None
    """Of the workers, if there are any."""
    gate: PracticeGate | None = None
    """None for a real environment."""
    exploited: DreamExploitedError | None = None
    """Why the run was stopped."""

    @property
    def refusals(self) -> tuple[str, ...]:
        return self.spec.refusals if self.spec is not None else ()

    def new_start(self, task: Task, seed: int) -> EpisodeStart | None:
        """Of a task that no trajectory holds."""
        return None if self.start_for is None else self.start_for(task, seed)

    def report(self, stage: str, done: int, total: int, row: Row | None = None) -> None:
        self.on_progress(Progress(stage=stage, done=done, total=total, row=row or {}))


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
            if config.train.workers:
                run.setup = TrainSetup.of(config, run_dir.path, spec, real, experience_model)
            agent = _initial_agent(run)
            stack.push_async_callback(agent.aclose)
            if config.learner.algorithm == "dpo":
                recorder, ended = await _train_dpo(run, stack, agent)
            else:
                recorder, ended = await _train_rl(run, stack, agent, make_tasks)
            summary = _finish(run, agent, recorder, ended)
            if run.exploited is not None:
                raise run.exploited
            return summary


async def _train_rl(
    run: _Run, stack: AsyncExitStack, agent: Agent, make_tasks: MakeTaskSource | None
) -> tuple[RunRecorder, str]:
    config, chosen, run_dir = run.config, run.config.train, run.run_dir
    if run.real is None and (chosen.mode == "real" or chosen.evaluate_every or chosen.audit_every):
        run.real = open_environment(config.environment.name, config.environment.options)
        stack.push_async_callback(run.real.aclose)
    source = await open_episode_source(
        *(stack, config, run_dir.path, run.offline),
        real=run.real,
        experience_model=run.experience_model,
        models=run.models,
        start_for=run.new_start,
        on_row=lambda done, total: run.report("replay buffer", done, total),
    )
    for name in chosen.policy_servers:
        run.models.endpoint(name)
    await run.models.check_reachable()  # an error before the warm start, not after it
    await _gated_start(run, source, agent)
    learner = _learner(run, agent)
    tasks = await _task_source(run, stack, source, make_tasks)
    tasks = with_resets(tasks, config, source.factory, run.offline, run.spec)
    monitors = Monitors(chosen, max_tokens=config.agent.max_tokens)
    parts: dict[str, Stateful] = {"learner": learner, "tasks": tasks, "monitors": monitors}
    audits = None
    if chosen.audit_every and run.real is not None:
        parts["audits"] = audits = open_audits(config, run.real, source, run_dir, run.offline)
        stack.callback(audits.close)
    recorder = _recorder(run, stack, agent, parts, source=source)
    await recorder.resume()
    if audits is not None:
        recorder.spent["real_steps"] = audits.real_steps
    if (state := run_dir.load(WARM_START)) is not None:
        recorder.spent["warm_start_seconds"] = seconds_of(state)
    if recorder.best < 0:  # a run that goes on after it was stopped is not what was selected then
        (run_dir.path / SELECTED).unlink(missing_ok=True)
    loop = Loop(
        tasks=tasks,
        player=await _player(run, stack, source, agent, recorder, audits),
        learner=learner,
        monitors=monitors,
        recorder=recorder,
        groups=group_settings(config),
        origin=functools.partial(_origin, chosen, learner),
        evaluate=_validation(run, agent, run.real) if chosen.evaluate_every and run.real else None,
        seed=config.seed,
        audits=audits,
        horizon=environment_horizon(run.spec, config.environment.options) or chosen.horizon,
        refusals=run.refusals,
        on_step=functools.partial(_on_step, run, recorder),
    )
    loop.on_step({}, [])
    try:
        with stage("train"):
            ended = await loop.run()
    except DreamExploitedError as error:
        ended = _stop_exploited(run, recorder, error)
    await recorder.update_buffer()
    return recorder, ended


def _learner(run: _Run, agent: Agent) -> PolicyGradient:
    recorded: list[Trajectory] = []
    if run.config.learner.recorded_successes:
        think = run.spec.think if run.spec is not None else None
        recorded = recorded_successes(agent, run.offline, run.config, think)
    return make_learner(run.config, agent, run.refusals, recorded)


async def _player(
    run: _Run,
    stack: AsyncExitStack,
    source: EpisodeSource,
    agent: Agent,
    recorder: RunRecorder,
    audits: Audits | None,
) -> GroupPlayer:
    """Rollouts in this process, or on workers."""

    def warn(message: str) -> None:
        _on_step(run, recorder, {}, [message])

    config, path = run.config, run.run_dir.path
    served = open_served_agent(config, path, agent) if config.train.policy_servers else None
    if served is not None:
        stack.push_async_callback(served.aclose)
    breaker = CircuitBreaker(group_settings(config), warn)
    player: GroupPlayer = LocalPlayer(source.factory, (served or agent).policy_factory(path.name), breaker)
    if run.setup is not None:
        usage, start_for = run.models.usage, run.new_start
        player = await open_training_player(
            *(stack, run.setup, source, audits, breaker), usage=usage, start_for=start_for, on_event=warn
        )
    if served is not None:
        player = ServedPlayer(
            player, agent, served, path, tolerance=config.train.sampling_tolerance, warn=warn
        )
        stack.push_async_callback(player.aclose)
    return player


def _origin(chosen: TrainConfig, learner: PolicyGradient) -> Origin:
    dreaming = chosen.mode == "dream"
    return Origin(
        source="synthetic" if dreaming else "real",
        experience_model=chosen.experience if dreaming else None,
        policy_version=learner.updates,
    )


def _stop_exploited(run: _Run, recorder: RunRecorder, error: DreamExploitedError) -> str:
    """Select the last policy before the dream was exploited, unless validation has selected one."""
    step = max(saved for saved in run.run_dir.saved_policies() if saved <= error.since)
    if recorder.best < 0:
        run.run_dir.select_policy(step, {"exploited_since": error.since})
    step = run.run_dir.selected_policy()
    ended = f"{error}; {run.run_dir.path} stands for its policy of step {step}"
    run.exploited = DreamExploitedError(
        f"{ended}; train.monitors=warn continues nevertheless", since=error.since
    )
    return ended


async def _gated_start(run: _Run, source: EpisodeSource, agent: Agent) -> None:
    """The warm start, with the gate before and after it."""
    if source.experience_model is None:
        return await _warm_start(run, agent)

    def warn(message: str) -> None:
        run.on_progress(Progress(stage="gate", done=0, total=2, row={}, warnings=(message,)))

    run.gate = gate = PracticeGate(
        run.config, run.run_dir.path, run.offline, source.experience_model, warn=warn
    )
    run.report("gate", 0, 2)
    await gate.check_dream()
    run.report("gate", 1, 2)
    await _warm_start(run, agent, source)
    await gate.check_policy(source.factory, agent.policy_factory("gate"), source.tasks)
    run.report("gate", 2, 2)
    return None


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


async def _warm_start(run: _Run, agent: Agent, source: EpisodeSource | None = None) -> None:
    """SFT on recorded successes; skipped if the run has finished it before."""
    run_dir, chosen = run.run_dir, run.config.train
    if 0 in run_dir.saved_policies():
        agent.restore(run_dir.policy_weights(0))
        return
    if chosen.init_from is None and chosen.warm_start_steps:
        share = chosen.warm_start_success
        await warm_start(
            *(agent, run.offline, run.config, run_dir),
            lambda step, row: run.report("warm start", step, chosen.warm_start_steps, row),
            refusals=run.refusals,
            think=run.spec.think if run.spec is not None else None,
            enough=None
            if share is None or source is None
            else reaches(
                *(share, agent, source.factory, source.tasks, run.config.seed),
                temperature=agent.config.evaluation_temperature if chosen.warm_start_evaluated else None,
            ),
        )
    run_dir.save_policy(0, agent.weights())


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


def _on_step(run: _Run, recorder: RunRecorder, row: Row, warnings: Sequence[str]) -> None:
    chosen = run.config.train
    done, total = recorder.done, chosen.steps
    if chosen.real_steps is not None and chosen.mode == "real":
        total = chosen.real_steps
        done = min(total, int(recorder.spent.get("real_steps", 0)))
    run.on_progress(
        Progress(
            stage="train",
            done=done,
            total=total,
            row=row,
            warnings=tuple(warnings),
            endpoints=run.models.usage.summary() if run.models.usage.rows else "",
        )
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
        "real_steps": int(recorder.spent.get("real_steps", 0)),
        "policy": selected,
        "policies": run_dir.saved_policies(),
        "spent": {name: round(amount, 2) for name, amount in recorder.spent.items()},
    }
    if run.exploited is not None:
        summary["stopped"] = {"reason": "exploited", "since": run.exploited.since}
    if run.gate is not None:
        summary["gate"] = run.gate.summary()
    if recent:
        summary["success"] = round(sum(recent) / len(recent), 4)
    if run.models.usage.rows:
        summary["endpoints"] = run.models.usage.to_dict()
    write_text(run_dir.path / SUMMARY, json.dumps(summary, indent=2) + "\n")
    return summary
