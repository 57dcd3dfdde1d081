"""Outcomes that recordings of other tasks determine: the pages of one shop, the rooms of one house.

Recordings of different tasks are compared, with each task's own instruction left out of every text. Where
tasks that were in the same situation agree on the reply to a kind of action, the reply in a situation that
any task has recorded is repeated. Ends and rewards are the task's own, so only replies that end nothing are
shared; and a situation in which an action of this kind got two replies (a refusal hides where one is) says
nothing.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Final

from dreamgym.experience.recorded_patterns import by_task, split_words
from dreamgym.types import Outcome, State, Task, Trajectory, Transition

SHARED: Final = "recorded elsewhere"
"""`reward_source` of an outcome that a recording of another task holds."""
_LENGTHS: Final = (0, 1, 2, 3)
"""Newest transitions that a situation has beside the state; the fewest that suffice are used."""
_AGREEMENT, _MIN_PAIRS = 0.98, 20
"""Share of the situations of several tasks in which these agree, and how often tasks repeat others."""
_FREQUENT = 0.25
"""Share of the tasks from which a word is part of a kind of action."""
_INSTRUCTION: Final = "\0"
"""Stands for the instruction in a text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedOutcomes:
    """What recordings of all tasks say about one."""

    words: frozenset[str] = frozenset()
    """The words of actions that many tasks use."""
    lengths: Mapping[str, int] = field(default_factory=dict)
    """Kind of action to the number of transitions of its situations."""
    agreement: Mapping[str, float] = field(default_factory=dict)
    """Kind of action to the share of situations in which different tasks agree."""
    replies: Mapping[str, str] = field(default_factory=dict)
    """By a digest of situation and action."""

    def find(self, task: Task, history: Sequence[Transition], state: str, action: str) -> Outcome | None:
        """The outcome in this situation, if a recording of any task knows it."""
        kind = shared_kind(action, self.words)
        if kind not in self.lengths:
            return None
        text = self.replies.get(_digest(task, *_situation(history, state, self.lengths[kind]), action))
        if text is None:
            return None
        return Outcome(
            next_state=State(text=text.replace(_INSTRUCTION, task.instruction)),
            reward=0.0,
            terminated=False,
            confidence=1.0,
            reward_source=SHARED,
            info={"support": self.agreement[kind], "supported": True},
        )


def shared_kind(action: str, words: Iterable[str]) -> str:
    """The frequent words of an action, with ``*`` for the others between them.

    >>> shared_kind("click[b07xyz]", {"click", "prev"}), shared_kind("click[< prev]", {"click", "prev"})
    ('click *', 'click prev')
    """
    kept: list[str] = []
    for word in split_words(action):
        shown = word if word in words else "*"
        if kept[-1:] != ["*"] or shown != "*":
            kept.append(shown)
    return " ".join(kept)


def shared_outcomes(trajectories: Iterable[Trajectory]) -> SharedOutcomes:
    """Mines the kinds of action with which different tasks agree, and the shortest situations."""
    recorded = list(trajectories)
    words = _frequent_words(recorded)
    lengths: dict[str, int] = {}
    agreement: dict[str, float] = {}
    replies: dict[str, str] = {}
    for length in _LENGTHS:
        known: dict[tuple[str, str, str], dict[str, set[str | None]]] = defaultdict(lambda: defaultdict(set))
        for trajectory in recorded:
            for where, key, kind, reply in _steps(trajectory, words, length):
                known[where, key, kind][trajectory.task.id].add(reply)
        told = {each: set().union(*tasks.values()) for each, tasks in known.items()}
        unclear = {(where, kind) for (where, _, kind), texts in told.items() if len(texts) > 1}
        compared = {(where, kind) for (where, _, kind), tasks in known.items() if len(tasks) > 1}
        several, pairs = Counter(kind for _, kind in compared), Counter[str]()
        for (_, _, kind), tasks in known.items():
            pairs[kind] += len(tasks) - 1
        clear = Counter(kind for _, kind in compared - unclear)
        for kind, count in several.items():
            if kind not in lengths and pairs[kind] >= _MIN_PAIRS and clear[kind] >= _AGREEMENT * count:
                lengths[kind], agreement[kind] = length, clear[kind] / count
        for (where, key, kind), texts in told.items():
            text = next(iter(texts))
            if lengths.get(kind) == length and (where, kind) not in unclear and text is not None:
                replies[key] = text
    return SharedOutcomes(words=words, lengths=lengths, agreement=agreement, replies=replies)


def _frequent_words(trajectories: Sequence[Trajectory]) -> frozenset[str]:
    tasks = by_task(trajectories)
    counts = Counter(
        word
        for recordings in tasks.values()
        for word in {w for each in recordings for step in each.transitions for w in split_words(step.action)}
    )
    return frozenset(word for word, count in counts.items() if count >= max(2, _FREQUENT * len(tasks)))


def _steps(
    trajectory: Trajectory, words: frozenset[str], length: int
) -> Iterator[tuple[str, str, str, str | None]]:
    """The situation of each transition, with its action, the kind of action and the reply; None for a reply
    that ends something."""
    task = trajectory.task
    for position, step in enumerate(trajectory.transitions):
        outcome = step.outcome
        if outcome.graded and not outcome.truncated:
            situation = _situation(trajectory.transitions[:position], step.state.text, length)
            ends = outcome.terminated or outcome.success or outcome.reward
            reply = None if ends else _without_instruction(outcome.next_state.text, task)
            kind = shared_kind(step.action, words)
            yield _digest(task, *situation), _digest(task, *situation, step.action), kind, reply


def _situation(history: Sequence[Transition], state: str, length: int) -> list[str]:
    newest = history[-length:] if length else ()
    return [str(length), state, *(text for each in newest for text in (each.action, each.state.text))]


def _digest(task: Task, *texts: str) -> str:
    digest = blake2b(digest_size=8)
    for text in texts:
        digest.update(_without_instruction(text, task).encode("utf-8", "surrogatepass") + b"\1")
    return digest.hexdigest()


def _without_instruction(text: str, task: Task) -> str:
    return text.replace(task.instruction, _INSTRUCTION) if task.instruction else text
