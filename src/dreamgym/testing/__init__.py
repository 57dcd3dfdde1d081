"""Tools for tests: a checker for environments and a small environment."""

from dreamgym.testing.corridor import Corridor, CorridorFactory
from dreamgym.testing.env_checker import Check, CheckReport, check_environment

__all__ = [
    "Check",
    "CheckReport",
    "Corridor",
    "CorridorFactory",
    "check_environment",
]
