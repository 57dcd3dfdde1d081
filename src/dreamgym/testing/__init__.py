"""What users need to test against DreamGym: a conformance checker for environments, and stand-ins.

`check_environment` says whether an environment keeps the promises of `dreamgym.protocols.Environment`.
`Corridor` is a small world that keeps them all, for tests that need some environment and not a certain one.
`ScriptedLanguageModel` says what a test wants said; `ScriptedServer` (in
`dreamgym.testing.scripted_server`) says it
over HTTP, as an endpoint.
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
