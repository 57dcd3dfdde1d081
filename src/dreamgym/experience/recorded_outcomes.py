"""Outcomes that recordings determine: in the same situation of the same task, the same action has the same
outcome, so it is repeated instead of predicted.

A situation is the present state and the newest transitions that had an effect. How many of these count is
mined for each kind of action: the fewest with which the recordings of a task agree. A kind for which they
never agree (chance, or something that no text shows) is left to the experience model.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Final

from dreamgym.experience.recorded_patterns import NoEffect, action_kind, by_task
from dreamgym.types import Fact, Outcome, State, Trajectory, Transition, WorldSheet

OUTCOME: Final = "outcome"
"""Predicate of ``("outcome", SITUATION, REPLY, ENDING)``; the situation is a digest."""
RECORDED: Final = "recorded"
"""`reward_source` of an outcome that a recording of the task holds."""
_LENGTHS: Final = (0, 1, 2, 3, 1_000)
"""Transitions of a situation that are tried, the last for the whole episode."""
_AGREEMENT = 0.98
"""Share of equal outcomes from which the recordings agree."""
_MIN_PAIRS = 5
_ENDINGS: Final = {(False, False): "open", (True, False): "lost", (True, True): "success"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Determined:
    """The kinds of action whose outcomes recordings determine."""

    lengths: Mapping[str, int] = field(default_factory=dict)
    """Kind of action to the number of transitions of its situations."""
    agreement: Mapping[str, float] = field(default_factory=dict)
    """Kind of action to the share of equal outcomes in equal situations of one task."""

    def __contains__(self, action: str) -> bool:
        return action_kind(action) in self.lengths

    def facts(self, trajectory: Trajectory, inert: NoEffect) -> list[Fact]:
        """The outcomes of a recording, as facts of its task."""
        turns = inert.states(trajectory.transitions)
        found: list[Fact] = []
        for position, step in enumerate(turns):
            if step.outcome.graded and not step.outcome.truncated and step.action in self:
                length = self.lengths[action_kind(step.action)]
                key = _situation(turns[:position], inert, step.state.text, step.action, length)
                found.append((OUTCOME, key, step.outcome.next_state.text, _ending(step.outcome)))
        return found

    def find(
        self, sheet: WorldSheet, turns: Sequence[Transition], inert: NoEffect, state: str, action: str
    ) -> Outcome | None:
        """The outcome that the recordings of the sheet agree on, if they know the situation.

        Args:
            turns: the episode so far, with the states of `NoEffect.states`.
            state: the present state, of `NoEffect.state_after`.
        """
        if action not in self:
            return None
        kind = action_kind(action)
        key = _situation(turns, inert, state, action, self.lengths[kind])
        known = {fact[2:] for fact in sheet.facts if fact[0] == OUTCOME and fact[1] == key}
        if len(known) != 1:
            return None
        [(reply, ending)] = known
        name, _, reward = ending.partition(" ")
        return Outcome(
            next_state=State(text=reply),
            reward=float(reward),
            terminated=name != _ENDINGS[False, False],
            success=name == _ENDINGS[True, True],
            confidence=1.0,
            reward_source=RECORDED,
            info={"support": self.agreement[kind], "supported": True},
        )


def determined(trajectories: Iterable[Trajectory], inert: NoEffect) -> Determined:
    """Mines the kinds of action with which the recordings of a task agree, and the shortest situations."""
    tasks = [recordings for recordings in by_task(trajectories).values() if len(recordings) > 1]
    steps = [
        (number, recording.id, position, turns, step)
        for number, recordings in enumerate(tasks)
        for recording in recordings
        for turns in [inert.states(recording.transitions)]
        for position, step in enumerate(turns)
        if step.outcome.graded and not step.outcome.truncated
    ]
    lengths: dict[str, int] = {}
    agreement: dict[str, float] = {}
    for length in _LENGTHS:
        situations: dict[tuple[str, int, str], list[tuple[str, Fact]]] = defaultdict(list)
        for number, episode, position, turns, step in steps:
            kind = action_kind(step.action)
            if kind not in lengths:
                key = _situation(turns[:position], inert, step.state.text, step.action, length)
                outcome = (step.outcome.next_state.text, _ending(step.outcome))
                situations[kind, number, key].append((episode, outcome))
        for kind, share in _agreement(situations).items():
            lengths[kind], agreement[kind] = length, share
    return Determined(lengths=lengths, agreement=agreement)


def _agreement(situations: Mapping[tuple[str, int, str], Sequence[tuple[str, Fact]]]) -> dict[str, float]:
    """The kinds that agree between episodes, with the share of equal outcomes."""
    pairs: Counter[str] = Counter()
    equal: Counter[str] = Counter()
    for (kind, _, _), known in situations.items():
        for position, (episode, outcome) in enumerate(known):
            others = [other for name, other in known[:position] if name != episode]
            pairs[kind] += bool(others)
            equal[kind] += bool(others) and all(other == outcome for other in others)
    return {
        kind: equal[kind] / count
        for kind, count in pairs.items()
        if count >= _MIN_PAIRS and equal[kind] >= _AGREEMENT * count
    }


def _situation(turns: Sequence[Transition], inert: NoEffect, state: str, action: str, length: int) -> str:
    effective = [each for each in turns if each not in inert][-length:] if length else []
    digest = blake2b(digest_size=8)
    parts = [text for each in effective for text in (each.action, each.outcome.next_state.text)]
    for part in (str(length), state, action, *parts):
        digest.update(part.encode("utf-8", "surrogatepass") + b"\0")
    return digest.hexdigest()


def _ending(outcome: Outcome) -> str:
    return f"{_ENDINGS[outcome.terminated or outcome.success, outcome.success]} {outcome.reward!r}"
