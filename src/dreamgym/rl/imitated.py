"""Episodes that a learner imitates along with the rollouts of a step: recorded successes, and its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from random import Random
from typing import Any

from dreamgym.types import Completion

Turn = tuple[Completion, bool]
"""The tokens of a turn, and whether they are trained."""
_KEPT = 512
"""Own successes, one of each task, the newest."""


class ImitatedEpisodes:
    """A stock of episodes to draw from; the policy's own ones are the shortest success of each task."""

    def __init__(self, recorded: Sequence[list[Turn]], *, seed: int) -> None:
        self._recorded = recorded
        self._own: dict[str, list[Turn]] = {}
        self._seed = seed

    def draw(self, step: int, *, recorded: int, own: int) -> list[list[Turn]]:
        """At most the wanted number of each kind, at random; the same for the same step and stock."""
        random = Random(f"{self._seed}/{step}/imitated")
        mine = list(self._own.values())
        return [
            *random.sample(self._recorded, min(recorded, len(self._recorded))),
            *random.sample(mine, min(own, len(mine))),
        ]

    def add(self, task: str, turns: list[Turn]) -> None:
        """A success of the policy; it replaces a longer one of the same task."""
        known = self._own.pop(task, None)
        self._own[task] = turns if known is None or len(turns) < len(known) else known
        if len(self._own) > _KEPT:
            del self._own[next(iter(self._own))]

    def state_dict(self) -> dict[str, Any]:
        return {task: encode(turns) for task, turns in self._own.items()}

    def load_state_dict(self, stored: Mapping[str, Any]) -> None:
        self._own = {task: decode(rows) for task, rows in stored.items()}


def encode(turns: Sequence[Turn]) -> list[dict[str, Any]]:
    """Plain values; prompts without what they share with the turn before, since most extend it."""
    rows, before = [], list[int]()
    for completion, trained in turns:
        prompt = list(completion.prompt_token_ids)
        pairs = zip(before, prompt, strict=False)
        shared = next((n for n, (a, b) in enumerate(pairs) if a != b), min(len(before), len(prompt)))
        reply = list(completion.token_ids)
        rows.append(
            {
                "shared": shared,
                "prompt": prompt[shared:],
                "reply": reply,
                "allowed": [list(tokens) for tokens in completion.allowed],
                "trained": trained,
            }
        )
        before = prompt + reply
    return rows


def decode(rows: Sequence[Mapping[str, Any]]) -> list[Turn]:
    """The turns of `encode`, without texts and recorded log-probs."""
    turns, before = list[Turn](), list[int]()
    for row in rows:
        prompt = before[: row["shared"]] + row["prompt"]
        completion = Completion(
            text="",
            prompt_token_ids=tuple(prompt),
            token_ids=tuple(row["reply"]),
            allowed=tuple(map(tuple, row["allowed"])),
        )
        turns.append((completion, row["trained"]))
        before = prompt + row["reply"]
    return turns
