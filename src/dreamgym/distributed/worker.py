"""The worker: holds a copy of the policy and its own environment, and does jobs. Processes and Ray actors run
the same code."""

from __future__ import annotations

import os
import pickle
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from dreamgym.config import Config
from dreamgym.distributed.jobs import Job, UsageRows
from dreamgym.envs.registry import EnvironmentSpec, is_known, open_environment, register
from dreamgym.envs.synthetic import EpisodeStart, StartFor
from dreamgym.envs.wrappers import StepCounter
from dreamgym.gc_pause import gc_frozen
from dreamgym.models.registry import CACHE, LanguageModels
from dreamgym.protocols import EnvironmentFactory, ExperienceModel, Retriever
from dreamgym.rollouts import PolicyFactory
from dreamgym.types import Transition

if TYPE_CHECKING:
    from dreamgym.training.dream_loading import Dream
    from dreamgym.training.experience_versions import ExperienceVersions

Weights = Mapping[str, Any]
Fetch = Callable[[], Awaitable[Weights]]
"""Reads published weights from where the driver put them."""


class TakesWeights(Protocol):
    def restore(self, weights: Weights) -> None: ...


@dataclass(slots=True, kw_only=True)
class WorkerState:
    """What a worker has open between jobs."""

    factory: EnvironmentFactory
    make_policy: PolicyFactory
    models: LanguageModels
    agent: TakesWeights | None = None
    """None for a policy whose weights do not change."""
    real: EnvironmentFactory | None = None
    """For audits of a dream."""
    experience: ExperienceVersions | None = None
    """None for an experience model whose weights do not change."""
    starts: dict[tuple[str, int], EpisodeStart] = field(default_factory=dict)
    """Of generated tasks, by task and seed."""
    turns: dict[str, Sequence[Transition]] = field(default_factory=dict)
    """After which imagined episodes begin, by task."""
    version: int = -1
    """Of the weights; -1 for none yet."""
    _reported: dict[tuple[str, str, str], Any] = field(default_factory=dict)

    def counter(self, limit: int | None) -> StepCounter:
        """The environment, for one job that may take `limit` steps."""
        counter = StepCounter(self.factory)
        counter.limit = limit
        return counter

    def new_usage(self) -> UsageRows:
        """Usage of endpoints since the last call."""
        rows, self.models.usage.rows = self.models.usage.rows, {}
        return rows

    def load_experience(self, version: int) -> None:
        """Like `load`, from the run directory."""
        if self.experience is not None:
            self.experience.load(version)

    async def load(self, version: int, fetch: Fetch | None) -> None:
        """Load these weights, unless they or newer ones are loaded: then a restarted worker has the same
        weights as one that never stopped."""
        if fetch is None or self.agent is None or version <= self.version:
            return
        weights = await fetch()
        if version > self.version:  # another job may have loaded them meanwhile
            self.agent.restore(weights)
            self.version = version


class WorkerSetup(Protocol):
    """How a worker opens its state; sent to it once, when it starts."""

    async def open(self, stack: AsyncExitStack) -> WorkerState: ...


class RolloutWorker:
    """Does jobs concurrently in one event loop."""

    def __init__(self, setup: WorkerSetup) -> None:
        self._setup = setup
        self._stack = AsyncExitStack()
        self._state: WorkerState | None = None

    async def open(self) -> None:
        self._state = await self._setup.open(self._stack)
        self._stack.enter_context(gc_frozen())

    async def run(self, job: Job, version: int, fetch: Fetch | None) -> Any:
        """Do a job with the weights of `version`."""
        assert self._state is not None, "open the worker first"
        await self._state.load(version, fetch)
        return await job.run(self._state)

    async def aclose(self) -> None:
        await self._stack.aclose()


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainSetup:
    """A worker of a training run: the agent and the environment of its settings. The worker reads the run
    directory, the data and the experience run at the same paths as the driver."""

    config: Config
    folder: Path
    """The run directory."""
    spec: EnvironmentSpec | None = None
    """Of the environment, for workers that do not know its name."""
    real: EnvironmentFactory | None = None
    experience_model: ExperienceModel | None = None
    store: str = ""
    """The run's replay buffer: a file, or the address of a database."""
    retriever: Retriever | None = None
    """Searches the driver's replay buffer from another machine; by default `store` is opened."""

    @classmethod
    def of(
        cls,
        config: Config,
        folder: Path,
        spec: EnvironmentSpec | None,
        real: EnvironmentFactory | None,
        experience_model: ExperienceModel | None,
    ) -> TrainSetup:
        """An environment that the caller passed is sent, if it can be, and else opened by its name."""
        named = is_known(config.environment.name)
        unused = config.train.mode == "dream" and not config.train.audit_every
        return cls(
            config=config,
            folder=folder,
            spec=spec if can_be_pickled(spec) else None,
            real=None if unused or (named and not can_be_pickled(real)) else real,
            experience_model=experience_model,
        )

    @property
    def searches(self) -> bool:
        """Whether the experience model is shown demonstrations from the run's replay buffer."""
        from dreamgym.training.dream_loading import uses_demonstrations

        return self.experience_model is None and uses_demonstrations(self.config)

    async def open(self, stack: AsyncExitStack) -> WorkerState:
        from dreamgym.training.agent import open_agent
        from dreamgym.training.served import open_served_agent

        use_one_thread()
        config = self.config
        if self.spec is not None and not is_known(config.environment.name):
            register(self.spec)
        models = await stack.enter_async_context(LanguageModels(config, cache=self.folder / CACHE))
        served = bool(config.train.policy_servers)
        agent = open_served_agent(config, self.folder) if served else open_agent(config, self.folder)
        stack.push_async_callback(agent.aclose)
        make_policy = agent.policy_factory(self.folder.name)
        real = self._real(stack) if config.train.mode == "real" or config.train.audit_every else None
        if real is not None and config.train.mode == "real":
            return WorkerState(factory=real, make_policy=make_policy, models=models, agent=agent)
        starts: dict[tuple[str, int], EpisodeStart] = {}
        turns: dict[str, Sequence[Transition]] = {}
        dream = await self._dream(stack, models, lambda task, seed: starts.get((task.id, seed)))
        dream.begin_after = lambda task: turns.get(task.id, ())
        return WorkerState(
            factory=dream,
            make_policy=make_policy,
            models=models,
            agent=agent,
            real=real,
            experience=self._versions(dream),
            starts=starts,
            turns=turns,
        )

    def _real(self, stack: AsyncExitStack) -> EnvironmentFactory:
        if self.real is not None:
            return self.real
        chosen = self.config.environment
        real = open_environment(chosen.name, chosen.options)
        stack.push_async_callback(real.aclose)
        return real

    def _versions(self, dream: Dream) -> ExperienceVersions | None:
        from dreamgym.training.audit_setup import experience_versions
        from dreamgym.training.run_dir import RunDir

        if not self.config.train.audit_every:
            return None
        return experience_versions(self.config, dream.experience_model, RunDir(self.folder))

    async def _dream(self, stack: AsyncExitStack, models: LanguageModels, start_for: StartFor) -> Dream:
        from dreamgym.data.datasets import dataset_path
        from dreamgym.data.trajectories import read_trajectories
        from dreamgym.replay.buffer import ReplayBuffer
        from dreamgym.training.dream_loading import Dream

        config = self.config
        sources = config.train.data
        offline = [each for source in sources for each in read_trajectories(dataset_path(source))]
        if self.experience_model is not None:
            return Dream(self.experience_model, offline, config, start_for=start_for)
        buffer = None
        if self.retriever is None and self.searches:
            buffer = stack.enter_context(
                ReplayBuffer.open_configured(self.store, config.replay, create=False)
            )
        dream = Dream.create(
            config, offline, buffer, models=models, start_for=start_for, retriever=self.retriever
        )
        stack.push_async_callback(dream.aclose)
        return dream


def can_be_pickled(value: object) -> bool:
    try:
        pickle.dumps(value)
    except Exception:  # whatever a user's object holds
        return False
    return True


def use_one_thread() -> None:
    """Workers share the cores of a machine: threads of one would wait for those of another."""
    import torch

    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
