"""The errors that DreamGym raises on purpose: one class per boundary, each with an exit code.

Failures take three ways:

* A wrong setting or damaged input raises `ConfigError` or `DataError` before work starts.
* A failure of one episode raises `EpisodeFailedError`. `rollouts` catches it, retries, and then records a
  `RolloutFailure`: one episode is lost and the run continues.
* A failure that affects the whole run (a full disk, a spent budget, most rollouts failing) ends the run with
  its state on disk; the same command resumes it.

A message states what was expected, what came and what to do. Any other exception is a bug.
"""

from __future__ import annotations

from collections.abc import Iterable

from dreamgym.types import FailureKind


class DreamGymError(Exception):
    """Base class of every error that DreamGym raises on purpose."""

    exit_code = 1


class ConfigError(DreamGymError):
    """A setting is unknown, malformed or impossible; raised before work starts."""

    exit_code = 2


class UnknownSplitError(ConfigError):
    """An environment has no split of this name."""

    def __init__(self, split: str, splits: Iterable[str], environment: str) -> None:
        known = ", ".join(splits) or "none"
        super().__init__(f"unknown split {split!r} of environment {environment!r}; it has: {known}")


class DataError(DreamGymError):
    """A file does not have the content that its format requires; the message starts with ``file:line``."""

    exit_code = 3


class MissingExtraError(DreamGymError):
    """An optional dependency is not installed."""

    exit_code = 4

    def __init__(self, what: str, extra: str) -> None:
        super().__init__(f"{what} needs the extra {extra!r}: pip install 'dreamgym[{extra}]'")


class StoreError(DreamGymError):
    """A store cannot be opened or written: locked, full, or made with another embedder."""

    exit_code = 5


class StoppedError(DreamGymError):
    """A signal ended the run; its state is on disk, and the same command resumes it."""

    exit_code = 143


class EpisodeFailedError(DreamGymError):
    """The environment or a model failed during one episode. Costs the episode, not the run."""

    exit_code = 6

    def __init__(self, kind: FailureKind, message: str) -> None:
        super().__init__(message)
        self.kind = kind


class RolloutsFailingError(DreamGymError):
    """Too many rollouts fail: the run stops, and resumes from its last checkpoint."""

    exit_code = 6


class GradientsFailedError(DreamGymError):
    """Processes that compute gradients are lost again and again: the run stops, and resumes from its last
    checkpoint."""

    exit_code = 6


class EndpointError(DreamGymError):
    """A network endpoint cannot be reached, refuses the request or sends an invalid reply, after retries."""

    exit_code = 7


class BudgetSpentError(DreamGymError):
    """The next request could exceed the budget, so it was not sent; the run stops."""

    exit_code = 8


class TrainingCollapsedError(DreamGymError):
    """Training has not improved the policy for too long; the best policy is kept."""


class DreamExploitedError(TrainingCollapsedError):
    """Success in the dream rises and success that is supported, or real, does not; the run is saved."""

    def __init__(self, message: str, *, since: int) -> None:
        super().__init__(message)
        self.since = since
        """Training steps before the first sign."""


class DreamRefusedError(DreamGymError):
    """The dream is too wrong or too forgiving to train in; raised before the first update."""

    exit_code = 9


class EpisodeOverError(DreamGymError):
    """A method was called outside the episode (before `start`, after its end): a bug of the caller."""
