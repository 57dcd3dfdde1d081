"""Workers for real episodes: collection and evaluation."""

from __future__ import annotations

from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

from dreamgym.config import Config
from dreamgym.distributed.worker import WorkerState, can_be_pickled, use_one_thread
from dreamgym.envs.registry import EnvironmentSpec, find_environment, is_known, open_environment, register
from dreamgym.models.registry import LanguageModels
from dreamgym.protocols import Environment, EnvironmentFactory, Policy


@dataclass(frozen=True, slots=True, kw_only=True)
class RealSetup:
    """A worker with the real environment of the settings and its language models."""

    config: Config
    spec: EnvironmentSpec | None = None
    """Of the environment, for workers that do not know its name."""
    real: EnvironmentFactory | None = None
    """Instead of the named environment."""
    cache: Path | None = None
    """Replies of endpoints, shared by all workers."""

    @classmethod
    def of(cls, config: Config, factory: EnvironmentFactory, cache: Path | None = None) -> RealSetup:
        """An environment is opened by its name if it has one; else the factory is sent."""
        name = config.environment.name
        if not is_known(name):
            return cls(config=config, real=factory, cache=cache)
        spec = find_environment(name)
        if can_be_pickled(spec):
            return cls(config=config, spec=spec, cache=cache)
        # A worker reads a file by its name; what was registered only in this process it cannot know.
        registered = ":" not in name and can_be_pickled(factory)
        return cls(config=config, real=factory if registered else None, cache=cache)

    async def open(self, stack: AsyncExitStack) -> WorkerState:
        models = await stack.enter_async_context(LanguageModels(self.config, cache=self.cache))
        return WorkerState(factory=self.environment(stack), make_policy=_no_policy, models=models, agent=None)

    def environment(self, stack: AsyncExitStack) -> EnvironmentFactory:
        chosen = self.config.environment
        if self.spec is not None and not is_known(chosen.name):
            register(self.spec)
        if self.real is not None:
            return self.real
        factory = open_environment(chosen.name, chosen.options)
        stack.push_async_callback(factory.aclose)
        return factory


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationSetup:
    """A worker that plays real episodes with a policy that it loads by name."""

    real: RealSetup
    policy: str
    """``RUN@STEP``, or the name of a language model."""
    temperature: float | None = None

    async def open(self, stack: AsyncExitStack) -> WorkerState:
        from dreamgym.evaluation.policies import open_policy

        use_one_thread()
        config = self.real.config
        models = await stack.enter_async_context(LanguageModels(config, cache=self.real.cache))
        opened = open_policy(self.policy, config, self.temperature, [], models)
        make_policy, _ = await stack.enter_async_context(opened)
        factory = self.real.environment(stack)
        return WorkerState(factory=factory, make_policy=make_policy, models=models)


def _no_policy(environment: Environment, name: str, seed: int) -> Policy:
    raise AssertionError("a worker of a collection gets the policy with each job")
