"""Tools for tests: a checker for environments, a small environment, and scripted language models.

`check_environment` tests an environment against the contract of `dreamgym.protocols.Environment`. `Corridor`
is a small environment that fulfils it. `ScriptedLanguageModel` returns scripted replies; `ScriptedServer` (in
`dreamgym.testing.scripted_server`) does so over HTTP.
"""

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
