"""Notices when practice has stopped being practice: warns first, then stops the run while it can be mended.

Each monitor looks at the metrics of one step and says yes or no. What is bad for `patience` steps in a row is
told; what goes on for as many again ends the run. Good steps between start the count anew.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from dreamgym.errors import TrainingCollapsedError
from dreamgym.types import JsonValue

_GOOD = 0.9
"""A policy that succeeds this often may be as sure of itself as it likes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MonitorSettings:
    """Limits beyond which a step is a bad sign."""

    patience: int = 10
    action: Literal["stop", "warn", "off"] = "stop"
    entropy_floor: float = 0.05
    """Share of the entropy of the first step."""
    repeated_limit: float = 0.8
    refused_limit: float = 0.9
    failure_limit: float = 0.5
    gap_limit: float = 0.3
    """Success in the dream less success in reality."""
    reply_limit: int | None = None
    """Tokens at which a reply is cut off."""


Sign = Callable[[Mapping[str, Any], "Monitors"], bool]


class Monitors:
    """Watches the rows of a run, one step after another."""

    def __init__(self, settings: MonitorSettings) -> None:
        self.settings = settings
        self.first_entropy: float | None = None
        self._bad: dict[str, int] = {}

    def watch(self, row: Mapping[str, Any]) -> list[str]:
        """What is worth a warning after this step."""
        if self.settings.action == "off":
            return []
        entropy = row["learner"].get("entropy")
        if self.first_entropy is None and entropy is not None:
            self.first_entropy = float(entropy)
        warnings = []
        for name, (sign, advice) in _SIGNS.items():
            self._bad[name] = self._bad.get(name, 0) + 1 if sign(row, self) else 0
            if self._bad[name] == self.settings.patience:
                warnings.append(f"{name} for {self._bad[name]} steps: {advice}")
        return warnings

    def check(self) -> None:
        """
        Raises:
            TrainingCollapsedError: something was bad for too long.
        """
        for name, steps in self._bad.items():
            if steps >= 2 * self.settings.patience and self.settings.action == "stop":
                raise TrainingCollapsedError(
                    f"{name} for {steps} steps: {_SIGNS[name][1]}; train.monitors=warn goes on nevertheless"
                )

    def watch_gap(self, row: Mapping[str, Any]) -> list[str]:
        """What is worth a warning after an evaluation: a dream in which far more succeeds than in reality."""
        gap = row.get("gap")
        if self.settings.action == "off" or gap is None or gap <= self.settings.gap_limit:
            return []
        return [
            f"in the dream {gap:.0%} more of the episodes succeed than in reality: what is rewarded there is "
            "not what counts; measure the experience model (dreamgym experience eval), or use reward sheet"
        ]

    def state_dict(self) -> dict[str, JsonValue]:
        return {"first_entropy": self.first_entropy, "bad": dict(self._bad)}

    def load_state_dict(self, stored: Mapping[str, Any]) -> None:
        self.first_entropy = stored["first_entropy"]
        self._bad = dict(stored["bad"])


def _nothing_earned(row: Mapping[str, Any], _: Monitors) -> bool:
    return bool(row["episodes"] > 0 and row["return_mean"] == 0)


def _entropy_gone(row: Mapping[str, Any], monitors: Monitors) -> bool:
    entropy, first = row["learner"].get("entropy"), monitors.first_entropy
    if entropy is None or first is None or row["return_mean"] >= _GOOD:
        return False
    return bool(entropy < monitors.settings.entropy_floor * first)


def _in_circles(row: Mapping[str, Any], monitors: Monitors) -> bool:
    return bool(row["repeated_share"] > monitors.settings.repeated_limit)


def _refused(row: Mapping[str, Any], monitors: Monitors) -> bool:
    return bool(row["refused_share"] > monitors.settings.refused_limit)


def _unreadable(row: Mapping[str, Any], monitors: Monitors) -> bool:
    return bool(row.get("unreadable_share", 0.0) > monitors.settings.failure_limit)


def _failing(row: Mapping[str, Any], monitors: Monitors) -> bool:
    return bool(row["failure_share"] > monitors.settings.failure_limit)


def _cut_off(row: Mapping[str, Any], monitors: Monitors) -> bool:
    limit = monitors.settings.reply_limit
    return limit is not None and limit > 1 and bool(row["reply_tokens"] > 0.95 * limit)


_SIGNS: dict[str, tuple[Sign, str]] = {
    "no reward at all": (
        _nothing_earned,
        "nothing can be learnt from it; warm-start longer, choose easier tasks or larger groups",
    ),
    "entropy near nothing": (
        _entropy_gone,
        "the policy no longer explores; lower learner.learning_rate, raise learner.entropy_coef or kl_coef",
    ),
    "episodes in circles": (
        _in_circles,
        "nearly all states had been there before; look at the saved trajectories",
    ),
    "nearly every action refused": (
        _refused,
        "the policy has lost the form of actions; go back to an earlier policy, or warm-start longer",
    ),
    "most replies of the experience model unreadable": (
        _unreadable,
        "it does not know what the policy does; warm-start longer, or teach it longer",
    ),
    "most rollout groups failing": (
        _failing,
        "the metrics count them by kind under dropped; the experience model or the environment is broken",
    ),
    "replies cut off": (
        _cut_off,
        "they run into agent.max_tokens; the policy has lost the end of a reply",
    ),
}
