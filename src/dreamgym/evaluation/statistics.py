"""Measured shares and means with their intervals, and what the paper's theorem makes of them.

Rows of one trajectory are not independent: a model that misreads a room misreads it all episode long. So
shares of steps get a Wilson interval whose sample size is shrunk to what the spread between trajectories
supports, means of steps are bootstrapped over whole trajectories, and only shares of episodes are plain
Wilson intervals. All intervals are 95%.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

Z = 1.959964
"""Standard normal quantile of a 95% interval."""

_RESAMPLES = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """A measured number; None throughout where there was nothing to measure."""

    value: float | None
    low: float | None
    high: float | None
    count: int
    """Rows behind it: steps or episodes."""

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        if self.value is None or self.low is None or self.high is None:
            return "–"
        return f"{self.value:.3f} [{self.low:.3f}, {self.high:.3f}]"

    def percent(self, *, signed: bool = False) -> str:
        """As per cent; a difference with its sign, in points.

        >>> Estimate(value=0.4, low=0.168, high=0.687, count=10).percent()
        '40.0% [16.8%, 68.7%]'
        >>> Estimate(value=-0.15, low=-0.264, high=-0.042, count=60).percent(signed=True)
        '-15.0 points [-26.4, -4.2]'
        """
        if self.value is None or self.low is None or self.high is None:
            return "–"
        if signed:
            return f"{100 * self.value:+.1f} points [{100 * self.low:+.1f}, {100 * self.high:+.1f}]"
        return f"{self.value:.1%} [{self.low:.1%}, {self.high:.1%}]"


NOTHING = Estimate(value=None, low=None, high=None, count=0)


def wilson(right: float, total: float) -> tuple[float, float]:
    """The Wilson interval of a proportion: never empty, never outside 0 to 1, even where all are right.

    >>> [round(end, 3) for end in wilson(95, 100)]
    [0.888, 0.978]
    >>> [round(end, 3) for end in wilson(200, 200)]
    [0.981, 1.0]
    """
    share = right / total
    centre = share + Z**2 / (2 * total)
    half = Z * math.sqrt(share * (1 - share) / total + Z**2 / (4 * total**2))
    scale = 1 + Z**2 / total
    return max(0.0, (centre - half) / scale), min(1.0, (centre + half) / scale)


def share_of_episodes(right: Iterable[bool]) -> Estimate:
    """A share of episodes, which are independent of one another."""
    rows = list(right)
    if not rows:
        return NOTHING
    low, high = wilson(sum(rows), len(rows))
    return Estimate(value=sum(rows) / len(rows), low=low, high=high, count=len(rows))


def share_of_steps(rows: Iterable[tuple[str, bool]]) -> Estimate:
    """A share of steps, each given with the trajectory it belongs to.

    >>> alike = [(f"episode {number}", number < 5) for number in range(10) for _ in range(50)]
    >>> print(share_of_steps(alike))  # 500 rows that say no more than 10 would
    0.500 [0.227, 0.773]
    """
    sums, counts = _by_trajectory((trajectory, float(right)) for trajectory, right in rows)
    total = int(counts.sum())
    if not total:
        return NOTHING
    share = float(sums.sum()) / total
    low, high = wilson(share * (size := _effective_size(sums, counts, share)), size)
    return Estimate(value=share, low=low, high=high, count=total)


def mean_of_steps(rows: Iterable[tuple[str, float]], *, seed: int = 0) -> Estimate:
    """A mean over steps with a percentile bootstrap over whole trajectories; the same rows, the same ends."""
    sums, counts = _by_trajectory(rows)
    if not len(counts):
        return NOTHING
    picks = np.random.default_rng(seed).integers(len(counts), size=(_RESAMPLES, len(counts)))
    means = sums[picks].sum(axis=1) / counts[picks].sum(axis=1)
    low, high = np.quantile(means, [0.025, 0.975])
    return Estimate(
        value=float(sums.sum() / counts.sum()), low=float(low), high=float(high), count=int(counts.sum())
    )


def _by_trajectory(rows: Iterable[tuple[str, float]]) -> tuple[np.ndarray, np.ndarray]:
    """Sum and number of rows of each trajectory, in the order of first appearance."""
    found: dict[str, list[float]] = {}
    for trajectory, value in rows:
        found.setdefault(trajectory, []).append(value)
    sums = np.array([sum(values) for values in found.values()], dtype=np.float64)
    return sums, np.array([len(values) for values in found.values()], dtype=np.float64)


def _effective_size(sums: np.ndarray, counts: np.ndarray, share: float) -> float:
    """How many independent rows would be as uncertain as these; where every row agrees, the number of
    trajectories."""
    trajectories, total = len(counts), float(counts.sum())
    if share in (0.0, 1.0) or trajectories == 1:
        return float(trajectories)
    residuals = sums - share * counts
    variance = trajectories / (trajectories - 1) * float((residuals**2).sum()) / total**2
    return total if variance == 0 else max(1.0, min(total, share * (1 - share) / variance))


def paired_difference(pairs: Iterable[tuple[bool, bool]]) -> Estimate:
    """How much larger the first share is than the second, where both were tried on the same episodes.

    Newcombe's score interval for paired proportions: Wilson's of both, less what they have in common
    (Statistics in Medicine 17, 1998, method 10).

    >>> both, first, second, neither = (True, True), (True, False), (False, True), (False, False)
    >>> print(paired_difference([both] * 20 + [first] * 12 + [second] * 2 + [neither] * 16))
    0.200 [0.056, 0.329]
    """
    rows = list(pairs)
    if not rows:
        return NOTHING
    total = len(rows)
    ones, twos = sum(one for one, _ in rows), sum(two for _, two in rows)
    (low1, high1), (low2, high2) = wilson(ones, total), wilson(twos, total)
    share1, share2 = ones / total, twos / total
    both = sum(one and two for one, two in rows)
    alike = both * (total - ones - twos + both) - (ones - both) * (twos - both)
    spread = ones * (total - ones) * twos * (total - twos)
    phi = (max(alike - total / 2, 0.0) if alike > 0 else alike) / math.sqrt(spread) if spread else 0.0

    def half(one: float, two: float) -> float:
        return math.sqrt(max(0.0, one**2 - 2 * phi * one * two + two**2))

    return Estimate(
        value=share1 - share2,
        low=max(-1.0, share1 - share2 - half(share1 - low1, high2 - share2)),
        high=min(1.0, share1 - share2 + half(high1 - share1, share2 - low2)),
        count=total,
    )


def mcnemar(first_only: int, second_only: int) -> float:
    """The exact two-sided p-value that paired successes differ by chance alone.

    >>> round(mcnemar(12, 2), 4)
    0.0129
    >>> mcnemar(0, 0)
    1.0
    """
    total = first_only + second_only
    tail = sum(math.comb(total, count) for count in range(min(first_only, second_only) + 1))
    return min(1.0, 2.0 * tail / 2.0**total)


def auroc(confident: Sequence[tuple[float, bool]]) -> float | None:
    """How often a right prediction is stated with more confidence than a wrong one; a tie counts half.

    >>> auroc([(0.9, True), (0.6, True), (0.7, False), (0.1, False)])
    0.75
    """
    right = np.array([confidence for confidence, exact in confident if exact], dtype=np.float64)
    wrong = np.sort([confidence for confidence, exact in confident if not exact])
    if not len(right) or not len(wrong):
        return None
    below = np.searchsorted(wrong, right, side="left") + np.searchsorted(wrong, right, side="right")
    return float(below.sum() / (2 * len(right) * len(wrong)))


def calibration_error(confident: Sequence[tuple[float, bool]], *, bins: int = 10) -> float | None:
    """Expected calibration error: the mean gap between confidence and share of right ones, by equal bins.

    >>> calibration_error([(0.75, True), (0.75, False)])
    0.25
    """
    if not confident:
        return None
    gaps = [0.0] * bins
    for confidence, exact in confident:
        gaps[min(bins - 1, int(confidence * bins))] += confidence - exact
    return sum(map(abs, gaps)) / len(confident)


@dataclass(frozen=True, slots=True, kw_only=True)
class Theorem1:
    """What the paper's Theorem 1 says at measured errors (R_max is the largest reward of a step)."""

    gamma: float
    largest_reward: float
    reward_error: float
    """ε_R, as put in."""
    transition_error: float
    """ε_P, as put in."""
    trust_region: float
    """δ: the largest KL between the policy before and after an update."""
    return_gap: float
    """Lemma 1: real and synthetic return of any policy differ by at most this."""
    needed_advantage: float
    """What an update must gain in the dream for a gain in reality to be guaranteed."""

    @property
    def vacuous(self) -> bool:
        """Whether the gap exceeds the largest return there could be, so that nothing is guaranteed."""
        return self.return_gap >= self.largest_reward / (1 - self.gamma)

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "vacuous": self.vacuous}


def theorem1(
    reward_error: float,
    transition_error: float,
    *,
    gamma: float,
    largest_reward: float = 1.0,
    trust_region: float = 0.0,
) -> Theorem1:
    """Fill in the paper's bound.

    The theorem speaks of suprema, which no sample shows; with measured means it is read as a bound for the
    states and actions that the sample stands for.

    >>> found = theorem1(0.01, 0.02, gamma=0.9)
    >>> round(found.return_gap, 6), round(found.needed_advantage, 6), found.vacuous
    (3.7, 7.4, False)
    """
    if not 0 <= gamma < 1:
        raise ValueError(f"expected a gamma of at least 0 and below 1, got {gamma!r}")
    gap = reward_error / (1 - gamma) + 2 * gamma * largest_reward * transition_error / (1 - gamma) ** 2
    largest_value = largest_reward / (1 - gamma)
    return Theorem1(
        gamma=gamma,
        largest_reward=largest_reward,
        reward_error=reward_error,
        transition_error=transition_error,
        trust_region=trust_region,
        return_gap=gap,
        needed_advantage=4 * gamma / (1 - gamma) ** 2 * largest_value * trust_region + 2 * gap,
    )
