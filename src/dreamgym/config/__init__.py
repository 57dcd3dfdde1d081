"""Every setting, declared once and frozen: the default, then the TOML file, then ``--set
section.key=value``."""

from dreamgym.config.loader import config_json, config_values, load_config, nearest_name, settings, validate
from dreamgym.config.sections import (
    DEFAULT_KEY,
    HF_PREFIX,
    WITHOUT,
    AgentConfig,
    BudgetConfig,
    CollectConfig,
    Config,
    CurriculumConfig,
    EndpointConfig,
    EnvironmentConfig,
    ExperienceConfig,
    LearnerConfig,
    Part,
    PromptedConfig,
    ReplayConfig,
    Section,
    TrainConfig,
)

__all__ = [
    "DEFAULT_KEY",
    "HF_PREFIX",
    "WITHOUT",
    "AgentConfig",
    "BudgetConfig",
    "CollectConfig",
    "Config",
    "CurriculumConfig",
    "EndpointConfig",
    "EnvironmentConfig",
    "ExperienceConfig",
    "LearnerConfig",
    "Part",
    "PromptedConfig",
    "ReplayConfig",
    "Section",
    "TrainConfig",
    "config_json",
    "config_values",
    "load_config",
    "nearest_name",
    "settings",
    "validate",
]
