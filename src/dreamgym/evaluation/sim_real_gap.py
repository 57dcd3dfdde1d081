"""How far success in the dream is from success in reality: the quickest sign that a dream is wrong.

In-dream success is a diagnostic and never a result. The policy that practice begins with is known in both
worlds, though: one that does well in reality and badly in its dream (or the other way round) says that the
dream, not the policy, is what to look at.
"""

from __future__ import annotations

from pathlib import Path

from dreamgym.training.metrics import read_metrics

FEW = 3
"""Steps that are taken together: one alone depends on its tasks."""
MUCH = 0.25
"""Practice is warmer than evaluation and its tasks are others: less than that is no sign."""


def success_in_dream(metrics: Path) -> dict[str, float]:
    """Of the first and of the last few steps of practice; nothing if there was none."""
    shares = [float(row["success"]) for row in read_metrics(metrics, "practice")]
    if not shares:
        return {}
    return {"first": _mean(shares[:FEW]), "last": _mean(shares[-FEW:])}


def gap_between(dream: float, real: float) -> str | None:
    """What to say about the first policy's two rates, if they are far apart.

    >>> gap_between(0.40, 0.45) is None
    True
    >>> gap_between(0.11, 0.85)
    'the first policy succeeds in 85% of real games and in 11% of dreamt ones: the dream is too hard'
    """
    if abs(dream - real) <= MUCH:
        return None
    wrong = "too hard" if dream < real else "too easy"
    return (
        f"the first policy succeeds in {real:.0%} of real games and in {dream:.0%} of dreamt ones: "
        f"the dream is {wrong}"
    )


def _mean(shares: list[float]) -> float:
    return round(sum(shares) / len(shares), 4)
