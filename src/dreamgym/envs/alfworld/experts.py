"""Who knows how to solve a household task: the benchmark's hand-coded expert, repaired, and its planner.

The hand-coded expert searches the room as an agent would. As shipped (alfworld 0.4.2) it cannot see that it
has put something down, because it waits for the word ``put`` where today's grammar says ``move``; it then
carries its first object for ever. The repair translates between the wordings, in both directions, so the
expert plays old and new game files alike. The planner knows everything and walks straight to the goal.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from random import Random
from typing import Any

_OLD_PUT = re.compile(r"^put (.+?) in/on (.+)$")
_MOVE = re.compile(r"^move (.+?) to (.+)$")


class HandcodedExpert:
    """Follows an episode from its start and says what to do next. At its wits' end it guesses."""

    def __init__(self, goal: Mapping[str, Any], rng: Random, *, max_steps: int = 500) -> None:
        from alfworld.agents.expert import handcoded_expert, handcoded_expert_tw
        from alfworld.gen import constants

        handcoded_expert.random = rng  # the expert draws from the module; an episode must not share its dice
        parameters = {
            key: value.lower() if value in constants.OBJECTS else value for key, value in goal.items()
        }
        self._policy = handcoded_expert_tw.HandCodedTWAgent().get_task_policy(parameters)(
            parameters, max_steps=max_steps
        )
        self._rng = rng

    def follow(self, feedback: str, admissible: list[str], facts: Any, last_action: str | None) -> str:
        """Take note of what `last_action` (None at the start) led to and choose the next action."""
        commands = [_current_wording(action) for action in admissible]
        state = {"feedback": feedback, "admissible_commands": commands, "facts": facts}
        last = "look" if last_action is None else _MOVE.sub(r"put \1 in/on \2", last_action)
        try:
            wish = self._policy.act(state, last)
        except (NameError, IndexError, KeyError, ValueError):  # its own time-out and failure are NameErrors
            wish = None
        if wish == last_action or wish not in commands:
            return self._rng.choice(admissible)
        return admissible[commands.index(wish)]


def _current_wording(action: str) -> str:
    return _OLD_PUT.sub(r"move \1 to \2", action)


class Planner:
    """Keeps to its plan while it is followed, and plans anew from the present state when it is not."""

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
