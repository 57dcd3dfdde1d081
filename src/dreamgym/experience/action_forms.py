"""Actions that an environment does not know: forms of action that no recording shows with an effect.

A policy that practises tries texts that were never recorded (``press press``). A model has not learnt what
they do and may grant them anything. A form of action is its text with names and numbers left out. Recordings
tell for each first word (with few of them, for all together) whether forms that occur in a single task are
refused; then forms that no recording holds are refused, too. Where such forms have effects (a search with any
words), nothing is concluded.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

from dreamgym.experience.recorded_patterns import reply_form, split_words
from dreamgym.types import Trajectory

_MIN_FORMS = 5
_REFUSED = 0.95
"""Share of the forms of a single task without effect from which unknown forms are refused."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ActionForms:
    """What is known about forms of action."""

    effective: frozenset[str] = frozenset()
    """Forms that had an effect somewhere."""
    refused: Mapping[str, str] = field(default_factory=dict)
    """Forms that never had one, with their most frequent reply."""
    closed: Mapping[str, str] = field(default_factory=dict)
    """First words whose unknown forms are refused, with the reply; ``""`` for words that no action begins
    with."""

    def refusal(self, action: str, names: Collection[str]) -> str | None:
        """The reply to an action that the environment does not know; None if it may know it."""
        form = reply_form(action, names)
        if form in self.effective:
            return None
        if form in self.refused:
            return self.refused[form]
        return self.closed.get(_first(form) if _first(form) in self._first_words() else "")

    def _first_words(self) -> set[str]:
        return {_first(form) for form in self.effective}


def action_forms(
    trajectories: Iterable[Trajectory], names: Collection[str], inert: Collection[str]
) -> ActionForms:
    """
    Args:
        inert: replies without effect.
    """
    replies: dict[str, Counter[str]] = defaultdict(Counter)
    tasks: dict[str, set[str]] = defaultdict(set)
    effective = set()
    for trajectory in trajectories:
        for step in trajectory.transitions:
            form, text = reply_form(step.action, names), step.outcome.next_state.text
            replies[form][text] += 1
            tasks[form].add(trajectory.task.id)
            if step.outcome.terminated or step.outcome.reward or text not in inert:
                effective.add(form)
    used = {_first(form) for form in effective}
    single: dict[str, list[str]] = defaultdict(list)
    for form, where in tasks.items():
        if len(where) == 1:
            single[_first(form) if _first(form) in used else ""].append(form)
    everything = [form for forms in single.values() for form in forms]
    closed = {}
    for first in used | {""}:
        mine = single[first] if len(single[first]) >= _MIN_FORMS else everything
        without = sum(form not in effective for form in mine)
        own = [form for form in replies if (_first(form) if _first(form) in used else "") == first]
        unknown = sum((replies[form] for form in own if form not in effective), Counter[str]())
        answers = unknown or sum((replies[form] for form in own), Counter[str]())
        refusals = [text for text, _ in answers.most_common() if text in inert]
        if len(mine) >= _MIN_FORMS and without >= _REFUSED * len(mine) and refusals:
            closed[first] = refusals[0]
    refused = {
        form: found.most_common(1)[0][0]
        for form, found in replies.items()
        if form not in effective and found.total() > 1
    }
    return ActionForms(effective=frozenset(effective), refused=refused, closed=closed)


def _first(form: str) -> str:
    return next(iter(split_words(form)), "")
