"""How long a job will take, from its first seconds on this machine."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

_SECONDS = 5.0
"""Measured before anything is said."""


@dataclass(slots=True)
class Estimator:
    """Says once for each job how long the rest of it takes."""

    _began: dict[str, tuple[float, int]] = field(default_factory=dict)
    _said: set[str] = field(default_factory=set)

    def first(self, job: str, done: int, total: int, *, now: float | None = None) -> str | None:
        """
        >>> estimator = Estimator()
        >>> estimator.first("train", 0, 40, now=0.0)
        >>> estimator.first("train", 2, 40, now=18.0)
        'train: 40 at 9.0 s each, about 6 minutes left'
        """
        now = time.monotonic() if now is None else now
        began, before = self._began.setdefault(job, (now, done))
        if job in self._said or done - before < 2 or now - began < _SECONDS or done >= total:
            return None
        self._said.add(job)
        each = (now - began) / (done - before)
        return f"{job}: {total} at {each:.1f} s each, about {_minutes(each * (total - done))} left"


def _minutes(seconds: float) -> str:
    """
    >>> _minutes(40), _minutes(342)
    ('1 minute', '6 minutes')
    """
    count = max(1, round(seconds / 60))
    return f"{count} minute{'s' if count > 1 else ''}"
