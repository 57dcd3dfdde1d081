"""Opens policies by name: training runs (``RUN``, ``RUN@STEP``), language models, scripted policies."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, nullcontext

from dreamgym.config import Config
from dreamgym.envs.scripted_policies import make_policy, resolve_policy
from dreamgym.errors import ConfigError
from dreamgym.models.registry import LanguageModels, check_language_model, names_language_model
from dreamgym.models.usage import stage
from dreamgym.prompted_policy import prompted_policy_factory
from dreamgym.protocols import Environment, Policy
from dreamgym.rollouts import PolicyFactory
from dreamgym.training.agent import Agent
from dreamgym.training.run_dir import CONFIG, parse_policy_name


def names_run(name: str) -> bool:
    return (parse_policy_name(name)[0] / CONFIG).is_file()


def is_scripted(name: str) -> bool:
    """
    >>> is_scripted("noisy:0.3"), is_scripted("runs/agent")
    (True, False)
    """
    try:
        return resolve_policy(name, seed=0, episode=0) == name
    except ConfigError:
        return False


def check_policy(name: str, config: Config) -> None:
    """
    Raises:
        ConfigError: no policy has this name.
    """
    if names_language_model(name):
        check_language_model(name, config)
    elif not names_run(name) and not is_scripted(name):
        raise ConfigError(
            f"unknown policy {name!r}: expected a run directory (RUN or RUN@STEP), a language model "
            "(hf:NAME_OR_PATH, endpoint:NAME, endpoint:MODEL@URL) or a scripted policy (expert, random, "
            "noisy:SHARE …)"
        )


@asynccontextmanager
async def open_policy(
    name: str,
    config: Config,
    temperature: float | None,
    notes: list[str],
    models: LanguageModels | None = None,
) -> AsyncIterator[tuple[PolicyFactory, str]]:
    """The factory of a policy and its full name; `notes` receives what endpoints cost, unless the caller has
    opened `models`."""
    if names_language_model(name):
        chosen = config.agent.evaluation_temperature if temperature is None else temperature
        async with nullcontext(models) if models is not None else LanguageModels(config) as opened:
            with stage("evaluation"):
                model = opened.open(name, role="agent")
                await opened.check_reachable()
                yield prompted_policy_factory(model, config.agent.at_temperature(chosen), name=name), name
            if models is None and opened.usage.rows:
                notes.append(f"endpoints: {opened.usage.summary()}")
        return
    if not names_run(name) and is_scripted(name):
        yield scripted_policy_factory(name), name
        return
    async with Agent.load(name, device=config.agent.device) as agent:
        chosen = agent.config.evaluation_temperature if temperature is None else temperature
        yield agent.policy_factory(temperature=chosen), agent.name


def scripted_policy_factory(name: str) -> PolicyFactory:
    """Makes the scripted policy of each episode."""

    def make(environment: Environment, conversation: str, seed: int) -> Policy:
        return make_policy(name, environment, seed=seed)

    return make
