"""What recordings show about an environment whose rules are not known: kinds of action, replies without
effect, persistent replies, counters, and how successes end. Only texts are compared."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Final

from dreamgym.types import Trajectory, Transition

_WORD = re.compile(r"\w+")
NUMBER: Final = re.compile(r"\d+")
_SENTENCE = re.compile(r"(?<=[.!?;])\s+|\n+")
_MIN_PAIRS = 5
_PERSISTENT = 0.95
"""Share of equal replies in different states from which the replies to a kind of action are persistent."""
_SAME_PLACE = 0.98
"""Share of equal texts from which a first sentence names a place."""
_FREQUENT, _EQUAL = 0.1, 0.6
"""Share of the tasks that know a reply without effect, and of equal replies before and after it."""


def split_words(text: str) -> list[str]:
    return _WORD.findall(text)


def split_sentences(text: str) -> list[str]:
    return [part for part in map(str.strip, _SENTENCE.split(text)) if part]


def by_task(trajectories: Iterable[Trajectory]) -> dict[str, list[Trajectory]]:
    tasks: dict[str, list[Trajectory]] = {}
    for trajectory in trajectories:
        tasks.setdefault(trajectory.task.id, []).append(trajectory)
    return tasks


def action_kind(action: str) -> str:
    """The first word of an action, and how many more it has: a kind without a grammar.

    >>> action_kind("insert coin"), action_kind("get_ticket id=4821")
    ('insert/2', 'get_ticket/3')
    """
    words = split_words(action)
    return f"{words[0]}/{len(words)}" if words else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class NoEffect:
    """What leaves an environment as it is; see `no_effect`."""

    replies: frozenset[str] = frozenset()
    """Texts such as refusals; they say nothing about the state either."""
    kinds: frozenset[str] = frozenset()
    """Kinds of action that only read."""

    def __contains__(self, step: Transition) -> bool:
        return step.outcome.next_state.text in self.replies or action_kind(step.action) in self.kinds

    def states(self, transitions: Sequence[Transition]) -> list[Transition]:
        """The same transitions; a state lasts until something has an effect."""
        found: list[Transition] = []
        for before, step in zip((None, *transitions), transitions, strict=False):
            state = found[-1].state.text if before is not None and before in self else step.state.text
            same = state == step.state.text
            found.append(step if same else replace(step, state=replace(step.state, text=state)))
        return found

    def state_after(self, history: Sequence[Transition], state: str) -> str:
        """The state that lasts after a history with `states`."""
        return history[-1].state.text if history and history[-1] in self else state


NOTHING_KNOWN: Final = NoEffect()


def no_effect(trajectories: Iterable[Trajectory]) -> NoEffect:
    """Mines replies and kinds of action without effect: what is done next gets the reply that it got before,
    counted over actions to which the task knows several replies. Such replies are known in many tasks; texts
    like first states describe the state and are none of them."""
    tasks = by_task(trajectories)
    known: dict[tuple[str, str, str], set[str]] = defaultdict(set)
    replies: dict[tuple[str, str], set[str]] = defaultdict(set)
    where: dict[str, set[str]] = defaultdict(set)
    for task, recordings in tasks.items():
        for step in (step for each in recordings for step in each.transitions):
            text = step.outcome.next_state.text
            known[task, step.state.text, step.action].add(text)
            replies[task, step.action].add(text)
            where[text].add(task)
    pairs = [
        (first, second.outcome.next_state.text in before)
        for task, recordings in tasks.items()
        for each in recordings
        for first, second in pairwise(each.transitions)
        if (before := known.get((task, first.state.text, second.action)))
        and len(replies[task, second.action]) > 1
        and first.state.text != second.state.text
    ]
    firsts = {NUMBER.sub("#", each.start.text) for recordings in tasks.values() for each in recordings}
    least = max(2, _FREQUENT * len(tasks))

    def described(step: Transition) -> bool:
        return NUMBER.sub("#", step.outcome.next_state.text) in firsts

    texts = [(step.outcome.next_state.text, same) for step, same in pairs if not described(step)]
    inert = _mostly((text, same) for text, same in texts if len(where[text]) >= least)
    kinds = _mostly(
        (action_kind(step.action), same)
        for step, same in pairs
        if not described(step) and step.outcome.next_state.text not in inert
    )
    return NoEffect(replies=inert, kinds=kinds)


def _mostly(found: Iterable[tuple[str, bool]]) -> frozenset[str]:
    """The names for which most pairs are equal."""
    pairs: Counter[str] = Counter()
    equal: Counter[str] = Counter()
    for name, same in found:
        pairs[name] += 1
        equal[name] += same
    return frozenset(
        name for name, count in pairs.items() if count >= _MIN_PAIRS and equal[name] >= _EQUAL * count
    )


def persistent_kinds(trajectories: Iterable[Trajectory]) -> frozenset[str]:
    """The kinds of action whose reply does not depend on the state: in one task, the same action gets the
    same reply in different states."""
    replies: dict[tuple[str, str], dict[str, str]] = defaultdict(dict)
    for trajectory in trajectories:
        for step in trajectory.transitions:
            replies[trajectory.task.id, step.action][step.state.text] = step.outcome.next_state.text
    pairs: Counter[str] = Counter()
    equal: Counter[str] = Counter()
    for (_, action), by_state in replies.items():
        found = list(by_state.values())
        for first, second in pairwise(found):
            pairs[action_kind(action)] += 1
            equal[action_kind(action)] += first == second
    return frozenset(
        kind for kind, count in pairs.items() if count >= _MIN_PAIRS and equal[kind] >= _PERSISTENT * count
    )


def place_forms(trajectories: Iterable[Trajectory]) -> frozenset[str]:
    """Forms of first sentences that say which state of a task it is: in one task, texts that begin with the
    same sentence are the same. A place that was seen once is known from every side.

    Counted over states that were reached by different actions or from different states, where the first
    sentence has a number and the text goes on after it.
    """
    texts: dict[tuple[str, str], dict[tuple[str, str], str]] = defaultdict(dict)
    for trajectory in trajectories:
        for step in trajectory.transitions:
            text = step.outcome.next_state.text
            first, *rest = split_sentences(text) or [""]
            if rest and NUMBER.search(first) and not step.outcome.over:
                texts[trajectory.task.id, first][step.state.text, step.action] = text
    pairs: Counter[str] = Counter()
    equal: Counter[str] = Counter()
    for (_, first), found in texts.items():
        for one, other in pairwise(found.values()):
            pairs[NUMBER.sub("#", first)] += 1
            equal[NUMBER.sub("#", first)] += one == other
    return frozenset(
        form for form, count in pairs.items() if count >= _MIN_PAIRS and equal[form] >= _SAME_PLACE * count
    )


def start_tells(trajectories: Iterable[Trajectory]) -> bool:
    """Whether tasks differ in the words of their first states: what is wanted, or recipes. Numbers do not
    count."""
    return len({NUMBER.sub("#", trajectory.start.text) for trajectory in trajectories}) > 1


def first_sentence(text: str) -> str:
    return next(iter(split_sentences(text)), "")


def counter_forms(trajectories: Iterable[Trajectory], inert: Collection[str] = ()) -> frozenset[str]:
    """Sentences whose numbers change within episodes, with ``#`` for each number: counters."""
    changing: Counter[str] = Counter()
    for trajectory in trajectories:
        values: dict[str, set[str]] = {}
        for text in (
            trajectory.start.text,
            *(step.outcome.next_state.text for step in trajectory.transitions),
        ):
            if text in inert:
                continue
            for sentence in split_sentences(text):
                values.setdefault(NUMBER.sub("#", sentence), set()).add(sentence)
        changing.update(form for form, seen in values.items() if "#" in form and len(seen) > 1)
    return frozenset(form for form, count in changing.items() if count >= _MIN_PAIRS)


def success_forms(trajectories: Iterable[Trajectory], names: Collection[str]) -> frozenset[str]:
    """How recorded successes ended: kinds of action with the forms of their replies."""
    return frozenset(
        success_form(step.action, step.outcome.next_state.text, names, trajectory.task.instruction)
        for trajectory in trajectories
        for step in trajectory.transitions
        if step.outcome.success
    )


def success_form(action: str, reply: str, names: Collection[str], instruction: str) -> str:
    """Words that the task names are ``$``, so that another product than the one it asks for is no success.

    >>> success_form("take nuts", "You take the nuts.", {"nuts", "gum"}, "Get nuts.")
    'take/2 => You take the $.'
    >>> success_form("take nuts", "You take the nuts.", {"nuts", "gum"}, "Get gum.")
    'take/2 => You take the *.'
    """
    wanted = set(names).intersection(split_words(instruction))
    marked = _WORD.sub(lambda found: "$" if found[0] in wanted else found[0], reply)
    return f"{action_kind(action)} => {reply_form(marked, names)}"


def reply_form(text: str, names: Collection[str]) -> str:
    """A text with ``#`` for each number and ``*`` for each name.

    >>> reply_form("You take the nuts for 3 coins.", {"nuts", "gum"})
    'You take the * for # coins.'
    """
    return _WORD.sub(lambda found: "*" if found[0] in names else found[0], NUMBER.sub("#", text))
