"""Collapse monitors: a sign that lasts for `train.monitor_patience` steps is a warning; after twice as many
steps the run stops. A good step resets the count."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from dreamgym.config import TrainConfig
from dreamgym.errors import DreamExploitedError, TrainingCollapsedError
from dreamgym.evaluation.sim_real_gap import gap_warning
from dreamgym.types import JsonValue

GOOD_RETURN = 0.9
"""Above this mean return a low entropy is no sign of collapse."""
MIN_ENTROPY = 0.05
"""As a share of the entropy of the first step."""
MAX_REPEATED = 0.8
MAX_REFUSED = 0.9
MAX_FAILED = 0.5
EXPLOITED = "success in the dream rises, and success that is supported does not"
UNREAL = "success in the dream rises, and the share that audits find in reality does not"
_EXPLOITED_ADVICE = (
    "the policy learns errors of the dream; use an earlier policy, mend the experience model, or audit more"
)
MIN_RISE = 0.15
"""Of success in the dream, from which on the rise is compared."""
MIN_FOLLOWED = 0.25
"""Share of the rise that supported or audited success must follow."""
_SMOOTHING = 0.3
"""Weight of the newest step in the running means."""
_FIRST_STEPS = 3
"""Steps whose mean is the start that a rise is measured from."""

Sign = Callable[[Mapping[str, Any], "Monitors"], bool]


class Monitors:
    """Watches the metrics of a run, step by step."""

    def __init__(self, config: TrainConfig, *, max_tokens: int | None = None) -> None:
        self.max_tokens = max_tokens
        self.first_entropy: float | None = None
        self._action = config.monitors
        self._patience = config.monitor_patience
        self._bad: dict[str, int] = {}
        self._since: dict[str, int] = {}
        """The step at which a present sign began."""
        self._steps = 0
        self._first: tuple[float, float] = (0.0, 0.0)
        """Mean success and supported success of the first steps."""
        self._mean: tuple[float, float] = (0.0, 0.0)
        """Running means of both."""
        self._first_audit: tuple[float, float] | None = None

    def watch(self, row: Mapping[str, Any]) -> list[str]:
        """Warnings after this step."""
        if self._action == "off":
            return []
        entropy = row["learner"].get("entropy")
        if self.first_entropy is None and entropy is not None:
            self.first_entropy = float(entropy)
        warnings = []
        self._count_success(row)
        for name, (sign, advice) in _SIGNS.items():
            self._bad[name] = self._bad.get(name, 0) + 1 if sign(row, self) else 0
            if self._bad[name] == 1:
                self._since[name] = int(row.get("step", 0))
            if self._bad[name] == self._patience:
                warnings.append(f"{name} for {self._bad[name]} steps: {advice}")
        return warnings

    def _count_success(self, row: Mapping[str, Any]) -> None:
        if "success" not in row:
            return
        now = (float(row["success"]), float(row.get("supported_success", row["success"])))
        self._steps += 1
        if self._steps <= _FIRST_STEPS:
            self._first = self._mean = tuple(  # type: ignore[assignment]
                old + (new - old) / self._steps for old, new in zip(self._first, now, strict=True)
            )
        else:
            self._mean = tuple(  # type: ignore[assignment]
                old + _SMOOTHING * (new - old) for old, new in zip(self._mean, now, strict=True)
            )

    @property
    def exploited(self) -> bool:
        return _rises_alone(self._first, self._mean)

    def watch_audit(self, row: Mapping[str, Any], success: float) -> list[str]:
        """Warnings after an audit: two in a row in which only success in the dream rises stop the run."""
        real = row["successes"]["value"]
        if self._action == "off" or real is None:
            return []
        now = (success, success * real)
        if self._first_audit is None:
            self._first_audit = now
        if not _rises_alone(self._first_audit, now):
            self._bad.pop(UNREAL, None)
            return []
        self._bad[UNREAL] = self._bad.get(UNREAL, 0) + 1
        if self._bad[UNREAL] > 1:
            return []
        self._since[UNREAL] = int(row["step"]) - 1
        n, k = row["successes"]["count"], round(real * row["successes"]["count"])
        return [f"{UNREAL} ({k} of {n} are real): {_EXPLOITED_ADVICE}"]

    def check(self) -> None:
        if self._action != "stop":
            return
        for name, limit in ((EXPLOITED, 2 * self._patience), (UNREAL, 2)):
            if self._bad.get(name, 0) >= limit:
                since = self._since.get(name, 0)
                raise DreamExploitedError(f"{name}, since step {since}: {_EXPLOITED_ADVICE}", since=since)
        for name, steps in self._bad.items():
            if steps >= 2 * self._patience and name in _SIGNS:
                raise TrainingCollapsedError(
                    f"{name} for {steps} steps: {_SIGNS[name][1]}; train.monitors=warn continues nevertheless"
                )

    def watch_gap(self, row: Mapping[str, Any]) -> list[str]:
        """Warnings after an evaluation."""
        warning = None if self._action == "off" else gap_warning(row.get("gap"))
        return [] if warning is None else [warning]

    def state_dict(self) -> dict[str, JsonValue]:
        return {
            "first_entropy": self.first_entropy,
            "bad": dict(self._bad),
            "since": dict(self._since),
            "steps": self._steps,
            "first": list(self._first),
            "mean": list(self._mean),
            "first_audit": None if self._first_audit is None else list(self._first_audit),
        }

    def load_state_dict(self, stored: Mapping[str, Any]) -> None:
        self.first_entropy = stored["first_entropy"]
        self._bad, self._since = dict(stored["bad"]), dict(stored["since"])
        self._steps = stored["steps"]
        self._first, self._mean = tuple(stored["first"]), tuple(stored["mean"])
        first = stored["first_audit"]
        self._first_audit = None if first is None else tuple(first)


def _rises_alone(before: tuple[float, float], now: tuple[float, float]) -> bool:
    """Whether success in the dream has risen, and the other has not followed it.

    >>> _rises_alone((0.2, 0.2), (0.8, 0.25)), _rises_alone((0.2, 0.2), (0.8, 0.7))
    (True, False)
    """
    rise = now[0] - before[0]
    return rise >= MIN_RISE and now[1] - before[1] < MIN_FOLLOWED * rise


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
    EXPLOITED: (lambda _, monitors: monitors.exploited, _EXPLOITED_ADVICE),
    "replies cut off": (
        _truncated_replies,
        "they reach agent.max_tokens; the policy no longer ends its replies",
    ),
}
