"""How well recorded episodes cover an environment's actions: kinds, how often tried, how often in vain."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from dreamgym.envs.exploration import action_kind
from dreamgym.types import Trajectory

FEW = 5
"""A kind that was tried less often is not learned."""
SAME_REPLY = 3
"""A text that answers at least this number of kinds of action is a refusal."""
OTHER = "other text"
"""Actions of no kind that the environment lists, or that ever had an effect."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KindCoverage:
    """The actions of one kind: those with the same first word."""

    kind: str
    tried: int
    different: int
    """Different actions."""
    in_vain: int
    """How often the state's text stayed the same, or the reply was one that many kinds of action get."""


@dataclass(slots=True)
class Coverage:
    """Counts over episodes; `kinds` and `to_dict` summarise them."""

    _tried: dict[str, Counter[str]] = field(default_factory=dict)
    _unchanged: Counter[str] = field(default_factory=Counter)
    _replies: dict[str, Counter[str]] = field(default_factory=dict)
    """Kind to replies that changed the state's text."""
    _listed: set[str] = field(default_factory=set)

    def add(self, trajectories: Iterable[Trajectory]) -> None:
        for trajectory in trajectories:
            for transition in trajectory.transitions:
                kind, text = action_kind(transition.action), transition.outcome.next_state.text
                self._listed.update(transition.state.admissible_actions or ())
                self._tried.setdefault(kind, Counter())[transition.action] += 1
                if text == transition.state.text:
                    self._unchanged[kind] += 1
                else:
                    self._replies.setdefault(kind, Counter())[text] += 1

    def kinds(self) -> list[KindCoverage]:
        """By name; what is of no known kind comes last, as `OTHER`."""
        kinds = Counter(text for replies in self._replies.values() for text in replies)
        refusals = [text for text, count in kinds.items() if count >= SAME_REPLY]
        listed = {action_kind(action) for action in self._listed}
        rows: dict[str, list[int]] = {kind: [0, 0, 0] for kind in listed}
        for kind, actions in self._tried.items():
            tried = actions.total()
            replies = self._replies.get(kind, Counter())
            in_vain = self._unchanged[kind] + sum(replies[text] for text in refusals)
            known = kind in listed if listed else in_vain < tried
            row = rows.setdefault(kind if known else OTHER, [0, 0, 0])
            for column, value in enumerate((tried, len(actions), in_vain)):
                row[column] += value
        names = sorted(rows, key=lambda kind: (kind == OTHER, kind))
        return [
            KindCoverage(kind=name, tried=rows[name][0], different=rows[name][1], in_vain=rows[name][2])
            for name in names
        ]

    def admissible_tried(self) -> float | None:
        """Share of the admissible actions that were tried at least once; None if none were recorded."""
        if not self._listed:
            return None
        tried = {action for actions in self._tried.values() for action in actions}
        return len(tried & self._listed) / len(self._listed)

    def rare(self) -> list[str]:
        """Kinds that were tried less than `FEW` times."""
        return [row.kind for row in self.kinds() if row.tried < FEW and row.kind != OTHER]

    def to_dict(self) -> dict[str, Any]:
        share = self.admissible_tried()
        return {
            "kinds": {
                row.kind: {
                    "tried": row.tried,
                    "different": row.different,
                    "in_vain": round(row.in_vain / max(row.tried, 1), 4),
                }
                for row in self.kinds()
            },
            "admissible_tried": None if share is None else round(share, 4),
            "rare": self.rare(),
        }
