"""Every setting of a run, declared once, validated once and frozen.

Values come from the default, then the TOML file, then ``--set section.key=value``; later ones win. An unknown
key is refused with the nearest existing one before anything starts.
"""

from dreamgym.config.loader import config_json, load_config, nearest_name, settings, validate
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
    "load_config",
    "nearest_name",
    "settings",
    "validate",
]
