"""The metrics of a run: one JSON object per step, append-only; of two rows of the same step the last one
counts."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from dreamgym.curriculum.entropy import reward_entropy
from dreamgym.envs.synthetic import UNREADABLE
from dreamgym.errors import DataError
from dreamgym.files import AppendLog
from dreamgym.rollouts import GroupReport
from dreamgym.types import Trajectory

Row = dict[str, Any]


class MetricsLog:
    """Appends rows to a file; a row survives a crash of the process when `append` returns."""

    def __init__(self, path: Path) -> None:
        self._log = AppendLog(path, bytes, fsync=False, lock=False, checksum=False)

    def append(self, row: Mapping[str, Any]) -> None:
        self._log.append([json.dumps(row, default=str).encode()])

    def close(self) -> None:
        self._log.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def read_metrics(path: Path, kind: str | None = None) -> list[Row]:
    """The rows of a run in order of steps, of one kind or all."""
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError as error:
        raise DataError(f"{path}: expected the metrics of a run, {error}") from None
    last: dict[tuple[str, int], Row] = {}
    for line in lines:
        try:
            row = json.loads(line)
        except ValueError:
            continue  # torn by a crash
        if isinstance(row, dict) and isinstance(row.get("step"), int) and kind in (None, row.get("kind")):
            last[str(row.get("kind")), row["step"]] = row
    return [last[key] for key in sorted(last, key=lambda key: (key[1], key[0]))]


def train_row(
    step: int, report: GroupReport, update: Mapping[str, Any], *, refusals: Collection[str] = ()
) -> Row:
    """The metrics of one training step; shares and means are over its episodes or turns. Success is that of
    episodes from their beginning, where there are any."""
    members = [each for group in report.groups for each in group.trajectories]
    whole = [member for member in members if not member.given] or members
    turns = [turn for member in members for turn in member.chosen]
    lengths = [len(turn.completion.token_ids) for turn in turns if turn.completion is not None]
    returns = [[each.total_reward for each in group.trajectories] for group in report.groups]
    return {
        "kind": "train",
        "step": step,
        "groups": len(report.groups),
        "dropped": {str(kind): count for kind, count in report.failures.items()},
        "failure_share": _share(len(report.dropped), len(report.groups) + len(report.dropped)),
        "last_failure": report.dropped[-1].message[:300] if report.dropped else None,
        "episodes": len(members),
        "turns": len(turns),
        "success": _share(sum(member.success for member in whole), len(whole)),
        "supported_success": _share(sum(map(supported_success, whole)), len(whole)),
        "return_mean": _share(sum(member.total_reward for member in members), len(members)),
        "reward_entropy": _mean([reward_entropy(each) for each in returns]),
        "truncated_share": _share(sum(_truncated(member) for member in members), len(members)),
        "refused_share": _share(sum(turn.outcome.next_state.text in refusals for turn in turns), len(turns)),
        "unreadable_share": _share(
            sum(turn.outcome.reward_source == UNREADABLE for turn in turns), len(turns)
        ),
        "repeated_share": _mean([repeated_share(member) for member in members]),
        "episode_turns": _mean([float(len(member)) for member in members]),
        "reply_tokens": _mean([float(length) for length in lengths]),
        "learner": {name: value for name, value in update.items() if name != "groups"},
        **report.metrics,
    }


def supported_success(trajectory: Trajectory) -> bool:
    """Whether it succeeds, and what the experience model has seen supports every step."""
    return trajectory.success and all(
        turn.outcome.info.get("supported", True) for turn in trajectory.transitions
    )


def repeated_share(trajectory: Trajectory) -> float:
    """The share of an episode's states that occurred in it before."""
    seen = {trajectory.start.text}
    again = 0
    for transition in trajectory.transitions:
        again += transition.outcome.next_state.text in seen
        seen.add(transition.outcome.next_state.text)
    return _share(again, len(trajectory))


def _truncated(trajectory: Trajectory) -> bool:
    return bool(trajectory.transitions) and trajectory.transitions[-1].outcome.truncated


def _share(part: float, whole: float) -> float:
    return part / whole if whole else 0.0


def _mean(values: Sequence[float]) -> float:
    return _share(sum(values), len(values))
