"""Tools for tests: a checker for environments, a small environment and a scripted language model."""

from dreamgym.testing.corridor import Corridor, CorridorFactory
from dreamgym.testing.env_checker import Check, CheckReport, check_environment
from dreamgym.testing.scripted import ScriptedLanguageModel

__all__ = [
    "Check",
    "CheckReport",
    "Corridor",
    "CorridorFactory",
    "ScriptedLanguageModel",
    "check_environment",
]
