"""Writes `predictions.jsonl`: demonstrations and changed facts behind each synthetic step of the saved
episodes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from dreamgym.types import Demonstration, Trajectory

PREDICTIONS = "predictions.jsonl"


def prediction_rows(trajectory: Trajectory) -> Iterator[dict[str, Any]]:
    """One row for each synthetic step; the row of the first step also has the world sheet."""
    for position, transition in enumerate(trajectory.transitions):
        info = transition.outcome.info
        if "change" not in info:
            continue
        yield {
            "trajectory": trajectory.id,
            "position": position,
            **({"sheet": info["sheet"].facts} if position == 0 else {}),
            "ended": info["change"].ended,
            "begun": info["change"].begun,
            "refused": info["refused"],
            "demonstrations": [_row(each) for each in info["demonstrations"]],
        }


def _row(demonstration: Demonstration) -> dict[str, Any]:
    transition = demonstration.transition
    return {
        "state": transition.state.text,
        "action": transition.action,
        "next_state": transition.outcome.next_state.text,
        "similarity": round(demonstration.similarity, 4),
        "trajectory": demonstration.trajectory_id,
        "source": demonstration.provenance.source,
    }
