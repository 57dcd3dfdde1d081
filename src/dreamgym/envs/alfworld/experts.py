"""The experts of ALFWorld: the benchmark's hand-coded expert, with a fix, and its planner.

The hand-coded expert searches the room as an agent would. The version in alfworld 0.4.2 expects the word
``put`` where the current grammar has ``move``, so it never notices that it has put an object down. The fix
translates between the two in both directions; the expert plays old and new game files. The planner knows the
full state and goes straight to the goal.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from random import Random
from typing import Any

_OLD_PUT = re.compile(r"^put (.+?) in/on (.+)$")
_MOVE = re.compile(r"^move (.+?) to (.+)$")


class HandcodedExpert:
    """Observes an episode from its start and selects the next action; a random one if it has no plan."""

    def __init__(self, goal: Mapping[str, Any], rng: Random, *, max_steps: int = 500) -> None:
        from alfworld.agents.expert import handcoded_expert, handcoded_expert_tw
        from alfworld.gen import constants

        handcoded_expert.random = rng  # instead of the module's shared generator
        parameters = {
            key: value.lower() if value in constants.OBJECTS else value for key, value in goal.items()
        }
        self._policy = handcoded_expert_tw.HandCodedTWAgent().get_task_policy(parameters)(
            parameters, max_steps=max_steps
        )
        self._rng = rng

    def follow(self, feedback: str, admissible: list[str], facts: Any, last_action: str | None) -> str:
        """Observe the result of `last_action` (None at the start) and select the next action."""
        commands = [_OLD_PUT.sub(r"move \1 to \2", action) for action in admissible]
        state = {"feedback": feedback, "admissible_commands": commands, "facts": facts}
        last = "look" if last_action is None else _MOVE.sub(r"put \1 in/on \2", last_action)
        try:
            wanted = self._policy.act(state, last)
        except (NameError, IndexError, KeyError, ValueError):  # NameError: its time-out
            wanted = None
        if wanted == last_action or wanted not in commands:
            return self._rng.choice(admissible)
        return admissible[commands.index(wanted)]


class Planner:
    """Follows its plan; after another action it plans again from the current state."""

    def __init__(self) -> None:
        self._plan: list[str] = []
        self._expected: str | None = None

    def next_action(self, last_action: str | None, replan: Any) -> str | None:
        """The next action of a plan, or None if the goal cannot be reached from here."""
        if not self._plan or last_action != self._expected:
            self._plan = replan()
        if not self._plan:
            return None
        self._expected = self._plan.pop(0)
        return self._expected
