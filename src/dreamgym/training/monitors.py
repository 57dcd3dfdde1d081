"""Collapse monitors: a sign that lasts for `train.monitor_patience` steps is a warning; after twice as many
steps the run stops. A good step resets the count."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from dreamgym.config import TrainConfig
from dreamgym.errors import TrainingCollapsedError
from dreamgym.evaluation.sim_real_gap import gap_warning
from dreamgym.types import JsonValue

GOOD_RETURN = 0.9
"""Above this mean return a low entropy is no sign of collapse."""
MIN_ENTROPY = 0.05
"""As a share of the entropy of the first step."""
MAX_REPEATED = 0.8
MAX_REFUSED = 0.9
MAX_FAILED = 0.5

Sign = Callable[[Mapping[str, Any], "Monitors"], bool]


class Monitors:
    """Watches the metrics of a run, step by step."""

    def __init__(self, config: TrainConfig, *, max_tokens: int | None = None) -> None:
        self.max_tokens = max_tokens
        self.first_entropy: float | None = None
        self._action = config.monitors
        self._patience = config.monitor_patience
        self._bad: dict[str, int] = {}

    def watch(self, row: Mapping[str, Any]) -> list[str]:
        """Warnings after this step."""
        if self._action == "off":
            return []
        entropy = row["learner"].get("entropy")
        if self.first_entropy is None and entropy is not None:
            self.first_entropy = float(entropy)
        warnings = []
        for name, (sign, advice) in _SIGNS.items():
            self._bad[name] = self._bad.get(name, 0) + 1 if sign(row, self) else 0
            if self._bad[name] == self._patience:
                warnings.append(f"{name} for {self._bad[name]} steps: {advice}")
        return warnings

    def check(self) -> None:
        for name, steps in self._bad.items():
            if steps >= 2 * self._patience and self._action == "stop":
                raise TrainingCollapsedError(
                    f"{name} for {steps} steps: {_SIGNS[name][1]}; train.monitors=warn continues nevertheless"
                )

    def watch_gap(self, row: Mapping[str, Any]) -> list[str]:
        """Warnings after an evaluation."""
        warning = None if self._action == "off" else gap_warning(row.get("gap"))
        return [] if warning is None else [warning]

    def state_dict(self) -> dict[str, JsonValue]:
        return {"first_entropy": self.first_entropy, "bad": dict(self._bad)}

    def load_state_dict(self, stored: Mapping[str, Any]) -> None:
        self.first_entropy = stored["first_entropy"]
        self._bad = dict(stored["bad"])


def _no_reward(row: Mapping[str, Any], _: Monitors) -> bool:
    return bool(row["episodes"] > 0 and row["return_mean"] == 0)


def _low_entropy(row: Mapping[str, Any], monitors: Monitors) -> bool:
    entropy, first = row["learner"].get("entropy"), monitors.first_entropy
    if entropy is None or first is None or row["return_mean"] >= GOOD_RETURN:
        return False
    return bool(entropy < MIN_ENTROPY * first)


def _truncated_replies(row: Mapping[str, Any], monitors: Monitors) -> bool:
    limit = monitors.max_tokens
    return limit is not None and limit > 1 and bool(row["reply_tokens"] > 0.95 * limit)


_SIGNS: dict[str, tuple[Sign, str]] = {
    "no reward at all": (
        _no_reward,
        "there is nothing to learn from; use a longer warm start, easier tasks or larger groups",
    ),
    "entropy near zero": (
        _low_entropy,
        "the policy no longer explores; lower learner.learning_rate, raise learner.entropy_coef or kl_coef",
    ),
    "repeated states": (
        lambda row, _: bool(row["repeated_share"] > MAX_REPEATED),
        "nearly all states occurred before in their episode; look at the saved trajectories",
    ),
    "nearly every action refused": (
        lambda row, _: bool(row["refused_share"] > MAX_REFUSED),
        "the policy has lost the format of actions; use an earlier policy, or a longer warm start",
    ),
    "most predictions unreadable": (
        lambda row, _: bool(row.get("unreadable_share", 0.0) > MAX_FAILED),
        "the experience model does not know these actions; fine-tune it longer, or use a longer warm start",
    ),
    "most rollout groups failing": (
        lambda row, _: bool(row["failure_share"] > MAX_FAILED),
        "see `dropped` in the metrics: the experience model or the environment is broken",
    ),
    "replies cut off": (
        _truncated_replies,
        "they reach agent.max_tokens; the policy no longer ends its replies",
    ),
}
