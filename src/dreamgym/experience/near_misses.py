"""Refusals that recordings prove without showing them: a winning action where it is not admissible.

A policy that practises tries the action that wins first. Recordings hold that action mostly where it wins, so
a model learns to grant it anywhere. Where the admissible actions of a state are recorded, every other action
is refused there: the winning action of another task, with the names of this task, becomes an example of that.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from random import Random

from dreamgym.experience.recorded_patterns import action_kind
from dreamgym.seeding import derive_seed
from dreamgym.types import Outcome, State, Trajectory, Transition

_WORD = re.compile(r"\w+")
PER_TRAJECTORY = 2
_MARK = "#near-miss-"


def is_near_miss(trajectory: Trajectory) -> bool:
    """Whether only the last transition of a trajectory is an example: the others were recorded elsewhere."""
    return _MARK in trajectory.id


def near_misses(
    trajectories: Sequence[Trajectory], names: Sequence[Collection[str]], *, refusal: str
) -> Iterator[Trajectory]:
    """Trajectories that end with such an action, refused; `names` are classes of exchangeable words."""
    winning = [each for each in trajectories if each.success and each.transitions]
    if not winning:
        return
    refusals = _refusals(trajectories)
    for trajectory in tuple(trajectories):  # the caller may append what it gets
        rng = Random(derive_seed("near misses", trajectory.id))
        places = [n for n, step in enumerate(trajectory.transitions) if step.state.admissible_actions]
        for number, place in enumerate(rng.sample(places, min(PER_TRAJECTORY, len(places)))):
            state = trajectory.transitions[place].state
            action = _translated(rng.choice(winning), trajectory.task.instruction, names)
            if action in (state.admissible_actions or ()):
                continue
            text = refusals.get(action_kind(action), refusal)
            refused = Outcome(next_state=State(text=text), reward=0.0, terminated=False)
            turn = Transition(state=state, action=action, outcome=refused)
            yield replace(
                trajectory,
                id=f"{trajectory.id}{_MARK}{number}",
                transitions=(*trajectory.transitions[:place], turn),
            )


def _translated(won: Trajectory, instruction: str, names: Sequence[Collection[str]]) -> str:
    """The last action of a success, with the names of another task in place of its own.

    A name of the action that its own instruction holds is replaced by the name of the same class in the
    other instruction.
    """
    own, other = (_WORD.findall(text) for text in (won.task.instruction, instruction))

    def translated(found: re.Match[str]) -> str:
        word = found[0]
        group = next((each for each in names if word in each), ())
        if word not in own or not group:
            return word
        return next((each for each in other if each in group), word)

    return _WORD.sub(translated, won.transitions[-1].action)


def _refusals(trajectories: Sequence[Trajectory]) -> dict[str, str]:
    """The most frequent reply to a kind of action where it was not admissible."""
    found: dict[str, Counter[str]] = {}
    for trajectory in trajectories:
        for step in trajectory.transitions:
            listed = step.state.admissible_actions
            if listed and step.action not in listed and not step.outcome.reward:
                replies = found.setdefault(action_kind(step.action), Counter())
                replies[step.outcome.next_state.text] += 1
    return {kind: replies.most_common(1)[0][0] for kind, replies in found.items()}
