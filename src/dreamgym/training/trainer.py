"""Puts a run together and carries it through: policy, warm start, world, loop, and what is left at the end.

`train` goes on with whatever its folder holds. Three things may be given instead of opened by name: the real
environment, the experience model and the source of tasks.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

from dreamgym.config import HF_PREFIX, Config
from dreamgym.data.datasets import dataset_path
from dreamgym.data.trajectories import TrajectoryWriter, read_trajectories
from dreamgym.envs.registry import EnvironmentSpec, environment_names, find_environment, open_environment
from dreamgym.envs.synthetic import StartFor
from dreamgym.errors import ConfigError
from dreamgym.evaluation.evaluate import Evaluation, EvaluationSettings, evaluate
from dreamgym.files import atomic_directory, write_text
from dreamgym.models.registry import LanguageModels, check_language_model, names_language_model
from dreamgym.models.usage import Usage, stage
from dreamgym.protocols import EnvironmentFactory, ExperienceModel, TaskSource
from dreamgym.rollout_groups import Breaker, GroupSettings
from dreamgym.rollouts import Limits, Origin
from dreamgym.training.agent import BASE, Agent, make_agent, make_learner, same_policy
from dreamgym.training.curriculum_setup import curriculum_of, generates
from dreamgym.training.dpo import train_dpo
from dreamgym.training.dream_setup import EpisodeSource, Overrides, open_episode_source
from dreamgym.training.experience_loading import check_prompted_model, choose_grader
from dreamgym.training.experience_run import inherit_settings
from dreamgym.training.loop import Loop
from dreamgym.training.metrics import MetricsLog, Row
from dreamgym.training.monitors import Monitors, MonitorSettings
from dreamgym.training.prediction_log import PREDICTIONS
from dreamgym.training.run_dir import (
    EXPORT,
    METRICS,
    SUMMARY,
    TRAJECTORIES,
    WARM_START,
    RunDir,
    named_policy,
    read_config,
)
from dreamgym.training.run_recorder import RunRecorder
from dreamgym.training.uniform_tasks import UniformTasks
from dreamgym.training.warm_start import seconds_of, warm_start
from dreamgym.types import Task, Trajectory

MakeTaskSource = Callable[[Sequence[Task]], TaskSource]
"""Makes the source from the seed tasks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """What whoever watches a run is told."""

    stage: str
    """``preparing``, ``warm start``, ``preference`` or ``practice``."""
    done: int
    total: int
    """In steps; of practice with a budget of real steps, in those."""
    row: Row
    warnings: tuple[str, ...] = ()
    endpoints: str = ""
    """What was asked of endpoints so far, in a line; empty where nothing was."""


OnProgress = Callable[[Told], None]


def check(config: Config, *, dreaming: bool = False) -> EnvironmentSpec | None:
    """Say what is wrong with the settings before anything starts; the environment, where it is known.

    Args:
        dreaming: whether there is an experience model that no setting names.

    Raises:
        ConfigError: they cannot work together.
    """
    chosen, agent = config.train, config.agent
    spec = (
        find_environment(config.environment.name) if config.environment.name in environment_names() else None
    )
    if config.learner.algorithm == "dpo" and chosen.evaluate_every:
        raise ConfigError(
            "train.evaluate_every chooses among policies that practise; learner.algorithm=dpo does not: "
            "set it to 0 and evaluate the run afterwards"
        )
    if chosen.mode == "dream" and config.learner.algorithm != "dpo":
        if chosen.experience is None and not dreaming:
            raise ConfigError(
                "expected train.experience to name who dreams: the run of an experience model (dreamgym "
                "experience train) or a language model (endpoint:NAME), or train.mode=real"
            )
        grader = choose_grader(chosen.reward, spec)
        if chosen.experience is not None and names_language_model(chosen.experience):
            check_prompted_model(chosen.experience, config, grader)
        elif chosen.experience is not None:
            inherit_settings(config, chosen.experience)  # refuses another environment
        if names_language_model(grader):
            check_language_model(grader, config)
        if agent.enforce_actions or agent.show_actions != "never":
            raise ConfigError(
                "agent.show_actions and agent.enforce_actions need lists of admissible actions, which the "
                "dream does not have: leave them off, or practise in train.mode=real"
            )
        if chosen.tasks_from == "environment":
            raise ConfigError(
                "train.tasks_from=environment needs train.mode=real: a dream needs world sheets"
            )
        if chosen.real_steps is not None:
            raise ConfigError("train.real_steps needs train.mode=real: in the dream none are taken")
    generates(config, spec)
    if chosen.init_from is not None:
        named_policy(chosen.init_from)
    for source in chosen.data:
        dataset_path(source)
    return spec


async def train(
    config: Config,
    *,
    real: EnvironmentFactory | None = None,
    experience_model: ExperienceModel | None = None,
    make_tasks: MakeTaskSource | None = None,
    start_for: StartFor | None = None,
    on_progress: OnProgress | None = None,
) -> dict[str, Any]:
    """Run `config`, or go on with it; returns what stands in `summary.json` of its folder.

    Args:
        real: instead of the environment that the configuration names; the caller closes it.
        experience_model: instead of the one of `config.train.experience`.
        make_tasks: a source of tasks instead of the one that the settings ask for.
        start_for: the starts of tasks that it generates.

    Raises:
        ConfigError: the settings cannot work, or the folder was begun with others.
        TrainingCollapsedError: the monitors have stopped it.
        RolloutsFailingError: too many episodes fail.
    """
    spec = check(config, dreaming=experience_model is not None)
    offline = [found for source in config.train.data for found in read_trajectories(dataset_path(source))]
    tell = on_progress or (lambda told: None)
    with _run_folder(config) as folder:
        async with AsyncExitStack() as stack:
            models = await stack.enter_async_context(LanguageModels(config, folder=folder.path))
            run = _Run(config, spec, folder, offline, tell, models.usage)
            given = Overrides(
                real=real, experience_model=experience_model, start_for=start_for, models=models
            )
            why = await run.carry_through(stack, given, make_tasks)
            return run.finish(why)


class _Run:
    """One call of `train`."""

    def __init__(
        self,
        config: Config,
        spec: EnvironmentSpec | None,
        folder: RunDir,
        offline: Sequence[Trajectory],
        tell: OnProgress,
        usage: Usage,
    ) -> None:
        self._config = config
        self._usage = usage
        self._spec = spec
        self._folder = folder
        self._offline = offline
        self._tell = tell
        self._policy: Agent
        self._ledger: RunRecorder

    async def carry_through(
        self,
        stack: AsyncExitStack,
        given: Overrides,
        make_tasks: MakeTaskSource | None,
    ) -> str:
        config, chosen = self._config, self._config.train
        if given.real is None and (chosen.mode == "real" or chosen.evaluate_every):
            given.real = open_environment(config.environment.name, config.environment.options)
            stack.push_async_callback(given.real.aclose)
        self._policy = policy = self._begin()
        stack.push_async_callback(policy.aclose)
        if config.learner.algorithm == "dpo":
            return await self._prefer(stack)
        world = await open_episode_source(
            stack, config, self._spec, self._folder, self._offline, given, self._remembered
        )
        if given.models is not None:
            await given.models.check_reachable()  # rather than after a warm start
        await self._warm_start()
        learner = make_learner(config, policy, self._refusals)
        source = await self._tasks(stack, given, world, make_tasks)
        monitors = self._monitors()
        self._ledger = ledger = RunRecorder(
            config=chosen,
            folder=self._folder,
            log=stack.enter_context(MetricsLog(self._folder.path / METRICS)),
            keeper=stack.enter_context(TrajectoryWriter(self._folder.path / TRAJECTORIES)),
            parts={"learner": learner, "tasks": source, "monitors": monitors},
            weights=policy.weights,
            buffer=world.buffer if chosen.update_replay_buffer else None,
            predictions=stack.enter_context(MetricsLog(self._folder.path / PREDICTIONS))
            if world.experience_model is not None
            else None,
        )
        await ledger.resume()
        if (begun := self._folder.load(WARM_START)) is not None:
            ledger.spent["warm_start_seconds"] = seconds_of(begun)
        dreaming = chosen.mode == "dream"
        groups = self._groups()
        loop = Loop(
            tasks=source,
            factory=world.factory,
            make_policy=policy.policy_factory(self._folder.path.name),
            learner=learner,
            monitors=monitors,
            ledger=ledger,
            groups=groups,
            breaker=Breaker(groups, lambda why: self._say({}, [why])),
            origin=lambda: Origin(
                source="synthetic" if dreaming else "real",
                experience_model=chosen.experience if dreaming else None,
                policy_version=learner.updates,
            ),
            evaluate=self._validation(given.real)
            if chosen.evaluate_every and given.real is not None
            else None,
            seed=config.seed,
            refusals=self._refusals,
            on_step=self._say,
        )
        self._say({}, [])
        with stage("practice"):
            why = await loop.run()
        await ledger.remember()
        return why

    async def _prefer(self, stack: AsyncExitStack) -> str:
        """Without any world: pairs of offline trajectories are all that is learnt from."""
        await self._warm_start()
        folder, total = self._folder, self._config.train.steps
        self._ledger = ledger = RunRecorder(
            config=self._config.train,
            folder=folder,
            log=stack.enter_context(MetricsLog(folder.path / METRICS)),
            keeper=stack.enter_context(TrajectoryWriter(folder.path / TRAJECTORIES)),
            parts={},
            weights=self._policy.weights,
        )

        def told(step: int, row: Row) -> None:
            self._tell(Told(stage="preference", done=step, total=total, row=row))

        ledger.done = await train_dpo(self._policy, self._offline, self._config, folder, ledger.log, told)
        return f"{ledger.done} updates on recorded pairs were made"

    async def _tasks(
        self, stack: AsyncExitStack, given: Overrides, world: EpisodeSource, make_tasks: MakeTaskSource | None
    ) -> TaskSource:
        """What the caller makes; else a curriculum, where the settings ask for one; else the plain list."""
        if make_tasks is not None:
            return make_tasks(world.tasks)
        config, spec, model = self._config, self._spec, world.experience_model
        if spec is not None and model is not None and generates(config, spec):
            planned = await curriculum_of(
                config, spec, self._folder.path, self._offline, world.tasks, model, given.models
            )
            if planned is not None:
                curriculum, given.start_for = planned
                stack.callback(curriculum.pool.close)
                return curriculum
        return UniformTasks(world.tasks, seed=config.seed)

    def finish(self, why: str) -> dict[str, Any]:
        ledger, folder = self._ledger, self._folder
        folder.save_policy(ledger.done, self._policy.weights())
        self._policy.restore(folder.policy_weights(folder.chosen()))
        self._policy.save(folder.path / EXPORT)
        summary = {
            "out": str(folder.path),
            "ended": why,
            "steps": ledger.done,
            "policy": folder.chosen(),
            "policies": folder.kept_policies(),
            "spent": {name: round(amount, 2) for name, amount in ledger.spent.items()},
        }
        if self._usage.rows:
            summary["endpoints"] = self._usage.to_dict()
        write_text(folder.path / SUMMARY, json.dumps(summary, indent=2) + "\n")
        return summary

    def _begin(self) -> Agent:
        """The policy before its first update, or that of the run it goes on from."""
        config, folder = self._config, self._folder
        if config.train.init_from is None:
            return make_agent(config, self._offline, folder.path)
        run, step = named_policy(config.train.init_from)
        begun = read_config(run)
        if not same_policy(begun.agent, config.agent):
            raise ConfigError(
                f"train.init_from={config.train.init_from!r}: its policy has other agent settings than "
                f"these; take them from {run / 'config.json'}"
            )
        if not config.agent.model.startswith(HF_PREFIX) and not (folder.path / BASE).exists():
            with atomic_directory(folder.path / BASE) as copy:
                shutil.copytree(run / BASE, copy, dirs_exist_ok=True)
        policy = make_agent(config, self._offline, folder.path)
        theirs = RunDir(run)
        policy.restore(theirs.policy_weights(theirs.chosen() if step is None else step))
        return policy

    async def _warm_start(self) -> None:
        """Nothing, if it is behind us already."""
        folder, chosen = self._folder, self._config.train
        if 0 in folder.kept_policies():
            self._policy.restore(folder.policy_weights(0))
            return
        if chosen.init_from is None and chosen.warm_start_steps:

            def told(step: int, row: Row) -> None:
                self._tell(Told(stage="warm start", done=step, total=chosen.warm_start_steps, row=row))

            think = self._spec.think if self._spec is not None else None
            given = self._policy, self._offline, self._config, folder, told
            await warm_start(*given, refusals=self._refusals, think=think)
        folder.save_policy(0, self._policy.weights())

    @property
    def _refusals(self) -> tuple[str, ...]:
        return self._spec.refusals if self._spec is not None else ()

    def _monitors(self) -> Monitors:
        chosen = self._config.train
        limit = self._config.agent.max_tokens
        return Monitors(
            MonitorSettings(patience=chosen.monitor_patience, action=chosen.monitors, reply_limit=limit)
        )

    def _groups(self) -> GroupSettings:
        chosen = self._config.train
        return GroupSettings(
            size=chosen.group_size,
            concurrency=chosen.concurrency,
            retries=chosen.retries,
            limits=Limits(
                seconds=chosen.max_episode_seconds,
            ),
            failure_limit=chosen.max_failure_rate,
            pause=chosen.failure_pause_seconds,
        )

    def _validation(self, real: EnvironmentFactory) -> Callable[[], Any]:
        config, policy = self._config, self._policy
        settings = EvaluationSettings(
            split=config.train.evaluate_split, episodes=config.train.evaluate_episodes, seed=config.seed
        )
        members = policy.policy_factory(
            self._folder.path.name, temperature=config.agent.evaluation_temperature
        )

        async def validate() -> Evaluation:
            return await evaluate(real, members, settings, policy=self._folder.path.name)

        return validate

    def _remembered(self, done: int, total: int) -> None:
        self._tell(Told(stage="preparing", done=done, total=total, row={}))

    def _say(self, row: Row, warnings: Sequence[str]) -> None:
        budget, ledger = self._config.train.real_steps, self._ledger
        done, total = ledger.done, self._config.train.steps
        if budget is not None:
            done, total = min(budget, int(ledger.spent.get("real_steps", 0))), budget
        self._tell(
            Told(
                stage="practice",
                done=done,
                total=total,
                row=row,
                warnings=tuple(warnings),
                endpoints=self._usage.summary() if self._usage.rows else "",
            )
        )


@contextmanager
def _run_folder(config: Config) -> Iterator[RunDir]:
    folder = RunDir.begin(config)
    try:
        yield folder
    finally:
        folder.close()
