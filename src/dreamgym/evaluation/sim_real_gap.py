"""The gap between success in the dream, a diagnostic and never a result, and success in reality."""

from __future__ import annotations

from pathlib import Path

from dreamgym.errors import DataError
from dreamgym.training.metrics import read_metrics

MAX_GAP = 0.3
"""Training samples at a higher temperature than evaluation and on other tasks: a smaller gap is no sign."""
_STEPS = 3
"""Training steps per mean: one step depends much on its tasks."""


def dream_success(metrics: Path) -> dict[str, float]:
    """Mean success of the first and of the last training steps in the dream; empty without any."""
    try:
        rows = read_metrics(metrics, "train")
    except DataError:
        return {}
    shares = [float(row["success"]) for row in rows if "synthetic_steps" in row.get("spent", {})]
    return {"first": _mean(shares[:_STEPS]), "last": _mean(shares[-_STEPS:])} if shares else {}


def gap_warning(gap: float | None) -> str | None:
    """The warning for success in the dream minus success in reality, where that is large.

    >>> gap_warning(0.25) is None
    True
    >>> gap_warning(0.875)
    'success in the dream is 88 points above success in reality: the dream rewards what reality does not; \
measure it (dreamgym experience eval), see where it differs (dreamgym experience audit)'
    """
    if gap is None or abs(gap) <= MAX_GAP:
        return None
    if gap < 0:
        return (
            f"success in the dream is {-gap * 100:.0f} points below success in reality: the dream refuses "
            "what reality allows; measure it (dreamgym experience eval)"
        )
    return (
        f"success in the dream is {gap * 100:.0f} points above success in reality: the dream rewards what "
        "reality does not; measure it (dreamgym experience eval), see where it differs "
        "(dreamgym experience audit)"
    )


def _mean(shares: list[float]) -> float:
    return round(sum(shares) / len(shares), 4)
