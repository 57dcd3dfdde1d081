"""Carries what a foreign format has no place for, so that our own exports come back without loss.

An exported record holds the texts where its format wants them, and beside them, under one key, the row
without those texts. On the way back the texts are put into the row again and it is checked as any row is; so
an edited text is taken over, and a record with a turn missing is refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from dreamgym.data.schema import row_of, shorten, trajectory_from_row
from dreamgym.errors import DataError
from dreamgym.types import Trajectory

KEY = "dreamgym"


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnTexts:
    """The texts of one turn."""

    action: str
    thought: str | None
    next_state: str


def remainder_of(trajectory: Trajectory) -> dict[str, Any]:
    """The row without the texts of its states, actions and thoughts."""
    row = row_of(trajectory)
    del row["start"]["text"]
    for turn in row["turns"]:
        del turn["action"], turn["outcome"]["next_state"]["text"]
        turn.pop("thought", None)
    return row


def restore(remainder: Any, start: str, turns: Sequence[TurnTexts]) -> Trajectory:
    """The trajectory of a remainder and its texts, or `DataError`."""
    row = _object(remainder, KEY)
    given = row.get("turns")
    if not isinstance(given, list) or len(given) != len(turns):
        raise DataError(f"expected {KEY}.turns to be a list of {len(turns)} turns, got {shorten(given)}")
    filled = [_fill(given[position], texts, position) for position, texts in enumerate(turns)]
    start_row = _object(row.get("start"), f"{KEY}.start") | {"text": start}
    return trajectory_from_row(row | {"start": start_row, "turns": filled})


def _fill(turn: Any, texts: TurnTexts, position: int) -> dict[str, Any]:
    where = f"{KEY}.turns.{position}"
    row = _object(turn, where)
    outcome = _object(row.get("outcome"), f"{where}.outcome")
    rest = _object(outcome.get("next_state"), f"{where}.outcome.next_state")
    outcome = outcome | {"next_state": rest | {"text": texts.next_state}}
    return row | {"action": texts.action, "thought": texts.thought, "outcome": outcome}


def _object(value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise DataError(f"expected {where} to be an object, got {shorten(value)}")
    return value
