"""Finds words that are names without a meaning, so that fine-tuning can exchange them: a small model then
learns to copy a name from its prompt instead of guessing a frequent one.

No list of names is needed. A name occurs in some tasks and not in others, and shares its place in the texts
with other names: the words next to it are the same.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable

from dreamgym.types import Trajectory

_TOKEN = re.compile(r"[^\W\d_]+|\d+|[^\w\s]")
_COMMON = 0.6
"""Words that occur in a larger share of the tasks are no names."""
_MIN_COUNT = 8
_MIN_CLASS = 3


def exchangeable_words(trajectories: Iterable[Trajectory]) -> list[frozenset[str]]:
    """Classes of words that can stand in for each other."""
    texts: dict[str, list[list[str]]] = defaultdict(list)
    for trajectory in trajectories:
        found = texts[trajectory.task.id]
        found.append(_TOKEN.findall(trajectory.task.instruction))
        found.append(_TOKEN.findall(trajectory.start.text))
        for step in trajectory.transitions:
            found.append(_TOKEN.findall(step.action))
            found.append(_TOKEN.findall(step.outcome.next_state.text))
    tasks: Counter[str] = Counter()
    for found in texts.values():
        tasks.update({word for text in found for word in text if word.isalpha()})
    rare = {word for word, count in tasks.items() if count <= _COMMON * len(texts)}

    def neighbour(text: list[str], position: int) -> str:
        if not 0 <= position < len(text):
            return ""
        word = text[position]
        return "#" if word.isdigit() else "*" if word in rare else word

    places: dict[str, Counter[tuple[str, str]]] = defaultdict(Counter)
    for found in texts.values():
        for text in found:
            for position, word in enumerate(text):
                if word in rare:
                    places[word][neighbour(text, position - 1), neighbour(text, position + 1)] += 1
    classes: dict[tuple[str, str], set[str]] = defaultdict(set)
    for word, around in places.items():
        if around.total() >= _MIN_COUNT:
            classes[around.most_common(1)[0][0]].add(word)
    return [frozenset(words) for _, words in sorted(classes.items()) if len(words) >= _MIN_CLASS]
