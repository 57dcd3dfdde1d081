"""Names exchanged at random for each rollout group: the policy learns what to do with a name, not which one.

Some words are names without a meaning: products, customers, ids. A small policy learns them by heart from few
tasks. Here the policy reads and writes an episode with its names exchanged, while environment and trajectory
keep the original ones. Every exchange is one to one, so the episode stays the same but for its names.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from dreamgym.experience.exchangeable import exchangeable_words
from dreamgym.protocols import Environment, Policy
from dreamgym.rollouts import PolicyFactory
from dreamgym.seeding import derive_seed
from dreamgym.types import Decision, State, Task, Trajectory, Transition

_ID = re.compile(r"(?<!\d)(?<!\d\.)\d{3,}(?!\d|\.\d)")
"""A number of three or more digits; shorter ones are counts and prices."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Names:
    """What can be exchanged."""

    classes: tuple[tuple[str, ...], ...] = ()
    """Words that can stand in for each other."""
    ids: bool = False
    """Whether numbers of three or more digits are ids."""

    def __bool__(self) -> bool:
        return bool(self.classes) or self.ids

    @classmethod
    def of(cls, trajectories: Sequence[Trajectory]) -> Names:
        """Found in recordings. Numbers are ids where actions hold them: the policy has to copy them."""
        ids = any(_ID.search(turn.action) for each in trajectories for turn in each.transitions)
        classes = tuple(tuple(sorted(each)) for each in exchangeable_words(trajectories))
        return cls(classes=classes, ids=ids)


class Renaming:
    """One exchange of names, drawn by a seed.

    >>> names = Names(classes=(("gum", "nuts", "soda"),), ids=True)
    >>> renaming = Renaming(names, seed=1)
    >>> renaming.text("take nuts from 1234") != "take nuts from 1234"
    True
    >>> renaming.original(renaming.text("take nuts from 1234"))
    'take nuts from 1234'
    """

    def __init__(self, names: Names, seed: int) -> None:
        self._seed, self._ids = seed, names.ids
        self._new: dict[str, str] = {}
        source = random.Random(seed)
        for group in names.classes:
            self._new |= zip(group, source.sample(group, len(group)), strict=True)
        self._old = {new: old for old, new in self._new.items()}
        words = sorted(self._new, key=len, reverse=True)
        parts = [rf"\b(?:{'|'.join(map(re.escape, words))})\b"] * bool(words)
        self._pattern = re.compile(
            "|".join([*parts, _ID.pattern]) if names.ids else "|".join(parts) or r"\Z."
        )

    def text(self, text: str) -> str:
        return self._pattern.sub(lambda found: self._new.get(found[0]) or self._id(found[0]), text)

    def original(self, text: str) -> str:
        """The inverse of `text`; a number that no text held stays as it is."""
        return self._pattern.sub(lambda found: self._old.get(found[0], found[0]), text)

    def _id(self, number: str) -> str:
        """Another number of the same length, the same for all members of a group; never one that is taken."""
        attempt, low = 0, 10 ** (len(number) - 1)
        while True:
            new = str(low + derive_seed(self._seed, number, attempt) % (9 * low))
            if self._old.get(new, number) == number:
                self._new[number], self._old[new] = new, number
                return new
            attempt += 1

    def state(self, state: State) -> State:
        actions = state.admissible_actions
        listed = None if actions is None else tuple(map(self.text, actions))
        return replace(state, text=self.text(state.text), admissible_actions=listed)

    def task(self, task: Task) -> Task:
        return replace(task, instruction=self.text(task.instruction))

    def transition(self, turn: Transition) -> Transition:
        """A sampled reply is kept: it was written with the exchanged names."""
        outcome = replace(turn.outcome, next_state=self.state(turn.outcome.next_state))
        thought = None if turn.thought is None else self.text(turn.thought)
        return replace(
            turn,
            state=self.state(turn.state),
            action=self.text(turn.action),
            thought=thought,
            outcome=outcome,
        )

    def trajectory(self, trajectory: Trajectory) -> Trajectory:
        """A recorded trajectory, all of it with exchanged names."""
        turns = tuple(replace(self.transition(each), completion=None) for each in trajectory.transitions)
        task, start = self.task(trajectory.task), self.state(trajectory.start)
        return replace(trajectory, task=task, start=start, transitions=turns)


class RenamingPolicy:
    """A policy that reads and writes one episode with exchanged names."""

    def __init__(self, policy: Policy, renaming: Renaming) -> None:
        self.name = policy.name
        self._policy, self._renaming = policy, renaming
        self._past: list[Transition] = []

    async def act(self, task: Task, history: Sequence[Transition], state: State) -> Decision:
        renaming = self._renaming
        self._past += map(renaming.transition, history[len(self._past) :])
        decision = await self._policy.act(renaming.task(task), self._past, renaming.state(state))
        thought = None if decision.thought is None else renaming.original(decision.thought)
        return replace(decision, action=renaming.original(decision.action), thought=thought)


def renaming_policies(make_policy: PolicyFactory, names: Names) -> PolicyFactory:
    """The same policies; the members of a rollout group share their exchange of names."""
    if not names:
        return make_policy

    def make(environment: Environment, trajectory_id: str, seed: int) -> Policy:
        group = trajectory_id.rpartition("-")[0]
        renaming = Renaming(names, derive_seed("renaming", group))
        return RenamingPolicy(make_policy(environment, trajectory_id, seed), renaming)

    return make


def renamed_copies(
    trajectories: Sequence[Trajectory], names: Names, *, copies: int, seed: int
) -> list[Trajectory]:
    """The trajectories themselves and copies of each with other names."""
    found = list(trajectories)
    for copy in range(copies if names else 0):
        found += [
            Renaming(names, derive_seed("copy", seed, each.id, copy)).trajectory(each)
            for each in trajectories
        ]
    return found
