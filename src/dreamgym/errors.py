"""One tree of errors, by boundary: settings, data, extras, stores, episodes.

A message says what was expected, what came, and what to do. The exit code is the command line's promise to
scripts (`dreamgym --help` lists them).
"""

from __future__ import annotations

from dreamgym.types import FailureKind


class DreamGymError(Exception):
    """Anything that DreamGym reports on purpose; everything else is a bug."""

    exit_code = 1


class ConfigError(DreamGymError):
    """A setting is unknown, malformed or impossible; raised before anything starts."""

    exit_code = 2


class DataError(DreamGymError):
    """A file's content is not what its format promises; the message starts with ``file:line``."""

    exit_code = 3


class MissingExtraError(DreamGymError):
    """An optional dependency is needed and not installed."""

    exit_code = 4

    def __init__(self, what: str, extra: str) -> None:
        super().__init__(f"{what} needs the extra {extra!r}: pip install 'dreamgym[{extra}]'")


class StoreError(DreamGymError):
    """A durable store cannot be opened or written (locked, full, made by another embedder)."""

    exit_code = 5


class EndpointError(DreamGymError):
    """A network endpoint cannot be reached, refuses, or answers nonsense, after retries."""

    exit_code = 7


class BudgetSpentError(DreamGymError):
    """The next request could cost more than is left of the budget, so it was not sent; the run stops."""

    exit_code = 8


class EpisodeFailedError(DreamGymError):
    """This episode cannot go on. It costs the episode, never the run."""

    exit_code = 6

    def __init__(self, kind: FailureKind, message: str) -> None:
        super().__init__(message)
        self.kind = kind


class RolloutsFailingError(DreamGymError):
    """Too many episodes fail, so the run stops where it is; mend the cause and go on from there."""

    exit_code = 6


class TrainingCollapsedError(DreamGymError):
    """Practice has stopped teaching anything, for too long; what was learnt before is kept."""


class EpisodeOverError(DreamGymError):
    """`step` was called on an episode that has not started, is over, or is closed: a caller's bug."""
