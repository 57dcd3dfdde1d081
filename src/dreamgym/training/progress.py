"""The progress of a training run, for a progress bar or a log."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from dreamgym.training.metrics import Row


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """The progress of a run, for a progress bar or a log."""

    stage: str
    """``replay buffer``, ``gate``, ``warm start``, ``dpo`` or ``train``."""
    done: int
    total: int
    """In steps; with a budget of real steps, in those."""
    row: Row
    warnings: tuple[str, ...] = ()
    endpoints: str = ""
    """Usage of endpoints so far, in one line; empty where none was used."""

    @property
    def note(self) -> str:
        """The newest result in a few words."""
        row = self.row
        if row.get("kind") == "audit":
            return f"{row['successes']['value'] or 0:.0%} of {row['successes']['count']} successes real"
        if row.get("kind") == "train":
            return f"success {row['success']:.0%}, return {row['return_mean']:.2f}"
        if row.get("kind") == "evaluation":
            value = row["success"]["value"]
            return "" if value is None else f"real success {value:.0%} on {row['split']}"
        return f"loss {row['loss']:.3f}" if "loss" in row else ""


OnProgress = Callable[[Progress], None]
