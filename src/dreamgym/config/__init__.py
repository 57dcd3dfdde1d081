"""Every setting, declared once and frozen: the default, then the TOML file, then ``--set
section.key=value``."""

from dreamgym.config.databases import is_database
from dreamgym.config.endpoints import DEFAULT_KEY, BudgetConfig, EndpointConfig
from dreamgym.config.loader import config_json, config_values, load_config, nearest_name, settings, validate
from dreamgym.config.section import Section
from dreamgym.config.sections import (
    HF_PREFIX,
    WITHOUT,
    AgentConfig,
    ClusterConfig,
    CollectConfig,
    Config,
    CurriculumConfig,
    Device,
    EnvironmentConfig,
    ExperienceConfig,
    LearnerConfig,
    Part,
    PromptedConfig,
    ReplayConfig,
    TrainConfig,
)

__all__ = [
    "DEFAULT_KEY",
    "HF_PREFIX",
    "WITHOUT",
    "AgentConfig",
    "BudgetConfig",
    "ClusterConfig",
    "CollectConfig",
    "Config",
    "CurriculumConfig",
    "Device",
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
    "is_database",
    "load_config",
    "nearest_name",
    "settings",
    "validate",
]
