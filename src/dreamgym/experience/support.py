"""How far a prediction can be trusted: the probability that it is what the environment would reply.

The score is a logistic regression on evidence that costs nothing more than the prediction itself, fitted on
recorded transitions of tasks that were held out of fine-tuning.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from dreamgym.experience.recorded_patterns import action_kind
from dreamgym.types import Trajectory

_RIDGE = 1.0
_ROUNDS = 50


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """What is known about one prediction."""

    confidence: float
    """The probability of the sampled reply."""
    here: bool
    """The reply to this action in this state is known: recorded, or of this episode."""
    known: bool
    """A reply to this action is known for the task; imagined ones count where nothing else is known."""
    similarity: float
    """Of the nearest demonstration."""
    seen: int
    """Recorded actions of the same kind."""

    def features(self) -> tuple[float, ...]:
        logit = math.log(max(self.confidence, 1e-6))
        known = (float(self.here), float(self.known))
        return (1.0, logit, *known, self.similarity, math.log1p(min(self.seen, 1000)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Support:
    """A calibrated score; without weights it is the model's own confidence."""

    weights: tuple[float, ...] = ()
    seen: Counter[str] = field(default_factory=Counter)
    """Recorded actions by kind."""

    def score(self, evidence: Evidence) -> float:
        if not self.weights:
            return evidence.confidence
        total = sum(w * x for w, x in zip(self.weights, evidence.features(), strict=True))
        return 1 / (1 + math.exp(-max(-50.0, min(50.0, total))))

    def times_seen(self, action: str) -> int:
        return self.seen[action_kind(action)]


def kinds_seen(trajectories: Iterable[Trajectory]) -> Counter[str]:
    return Counter(action_kind(step.action) for each in trajectories for step in each.transitions)


def fit_support(found: Sequence[tuple[Evidence, bool]], seen: Counter[str]) -> Support:
    """Fit the score to (evidence, whether the prediction was right); with too few of either, none."""
    right = sum(ok for _, ok in found)
    if min(right, len(found) - right) < 5:
        return Support(seen=seen)
    features = np.array([evidence.features() for evidence, _ in found])
    labels = np.array([float(ok) for _, ok in found])
    weights = np.zeros(features.shape[1])
    penalty = _RIDGE * np.eye(len(weights))
    penalty[0, 0] = 1e-3
    for _ in range(_ROUNDS):  # Newton's method
        p = 1 / (1 + np.exp(-np.clip(features @ weights, -30, 30)))
        gradient = features.T @ (p - labels) + penalty @ weights
        hessian = (features * (p * (1 - p))[:, None]).T @ features + penalty
        step = np.linalg.solve(hessian, gradient)
        weights -= step
        if float(np.abs(step).max()) < 1e-8:
            break
    return Support(weights=tuple(map(float, weights)), seen=seen)
