"""Checks the settings of a training run before anything starts."""

from __future__ import annotations

from dreamgym.config import Config, is_database
from dreamgym.data.datasets import dataset_path
from dreamgym.distributed.setup import check_budget
from dreamgym.envs.registry import EnvironmentSpec
from dreamgym.errors import ConfigError
from dreamgym.models.registry import ENDPOINT, check_language_model, names_language_model
from dreamgym.training.curriculum_setup import generates
from dreamgym.training.experience_loading import check_prompted_model, choose_grader
from dreamgym.training.experience_run import inherit_settings, known_environment


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
    dreams = chosen.mode == "dream" and config.learner.algorithm != "dpo"
    if chosen.warm_start_success is not None and not dreams and chosen.init_from is None:
        raise ConfigError("train.warm_start_success is measured in the dream: it needs train.mode=dream")
    if dreams:
        _check_dream(config, spec, has_experience_model)
    if chosen.resets != "none" and (not dreams or chosen.start_states != "recorded"):
        raise ConfigError(
            f"train.resets={chosen.resets} begins within known episodes of a dream: it needs "
            "train.mode=dream, train.start_states=recorded and an algorithm with rollouts"
        )
    if chosen.mode == "real" and chosen.audit_every:
        raise ConfigError("train.audit_every audits a dream: set it to 0, or set train.mode=dream")
    if chosen.workers:
        check_budget(config, "train.workers=0")
    if chosen.max_staleness:
        _check_staleness(config)
    if chosen.policy_servers:
        _check_policy_servers(config)
    generates(config, spec)
    for source in chosen.data:
        dataset_path(source)
    if is_database(config.replay.store) and config.learner.algorithm != "dpo":
        from dreamgym.replay.pgschema import check_database

        check_database(config.replay.store)
    return spec


def _check_staleness(config: Config) -> None:
    chosen = config.train
    if not chosen.workers:
        raise ConfigError("train.max_staleness: rollouts overlap with updates on workers: set train.workers")
    if config.learner.old_logprobs != "recorded" or config.agent.temperature != 1:
        raise ConfigError(
            "train.max_staleness trains on rollouts of older policies: their log-probs must be those "
            "of sampling: set learner.old_logprobs=recorded and agent.temperature=1"
        )
    if chosen.resets != "none":
        raise ConfigError("train.resets depends on the step before: set train.max_staleness=0")
    if chosen.real_steps is not None:
        raise ConfigError("train.max_staleness begins rollouts that a budget of real_steps cannot foresee")


def _check_policy_servers(config: Config) -> None:
    for name in config.train.policy_servers:
        if not name.startswith(ENDPOINT):
            raise ConfigError(f"train.policy_servers: expected {ENDPOINT}NAME, got {name!r}")
        check_language_model(name, config)
    if config.agent.enforce_actions:
        raise ConfigError(
            "agent.enforce_actions needs the tokens that each choice allows, which servers do not send: turn "
            "it off, or leave train.policy_servers empty"
        )
    if config.train.max_staleness:
        raise ConfigError(
            "train.policy_servers take new weights between two steps: set train.max_staleness=0"
        )
    if config.learner.algorithm == "dpo":
        raise ConfigError(
            "train.policy_servers sample rollouts, learner.algorithm=dpo has none: leave it empty"
        )


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
    listed = spec is not None and spec.dreamt_actions is not None
    if not listed and (agent.enforce_actions or agent.show_actions != "never"):
        raise ConfigError(
            "agent.show_actions and agent.enforce_actions need lists of admissible actions, which the dream "
            "does not have (the environment has no role dreamt_actions): turn them off, or set "
            "train.mode=real"
        )
    if chosen.tasks_from == "environment":
        raise ConfigError("train.tasks_from=environment needs train.mode=real: a dream needs world sheets")
    if chosen.real_steps is not None and not chosen.audit_every:
        raise ConfigError(
            "train.real_steps needs train.mode=real or train.audit_every: otherwise no real step is taken"
        )
