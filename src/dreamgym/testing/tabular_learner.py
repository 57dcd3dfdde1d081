"""The simplest learner: does an environment reward what was rewarded before?"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Sequence


class TabularLearner:
    """Q-learning on observed texts, with updates at the end of each episode.

    >>> learner = TabularLearner(["left", "right"])
    >>> for _ in range(100):
    ...     learner.update([float(learner.choose("a fork", []) == "right")])
    >>> [learner.choose("a fork", []) for _ in range(20)].count("right") > 15
    True
    """

    def __init__(self, words: Sequence[str]) -> None:
        """`words` are the actions where none are listed."""
        self._words = words
        self._values: dict[tuple[str, str], float] = defaultdict(float)
        self._visited: list[tuple[str, str]] = []
        self._rng = random.Random(0)
        self._explore = 1.0

    def choose(self, text: str, actions: Sequence[str]) -> str:
        candidates = list(actions or self._words)
        greedy = max(candidates, key=lambda each: (self._values[text, each], self._rng.random()))
        action = self._rng.choice(candidates) if self._rng.random() < self._explore else greedy
        self._visited.append((text, action))
        return action

    def update(self, rewards: Sequence[float]) -> None:
        """Learn from the rewards of the actions chosen since the last update."""
        later = 0.0
        for key, reward in zip(reversed(self._visited), reversed(rewards), strict=False):
            later = reward + 0.9 * later
            self._values[key] += 0.5 * (later - self._values[key])
        self._visited.clear()
        self._explore = max(0.05, self._explore * 0.97)
