"""The policy `explore`: records an unknown environment so that its refusals and consequences are seen.

It uses the task, the states, the admissible actions if there are any, and what earlier episodes of the same
collection have shown (`ExplorationMemory`); never an expert. Most actions are admissible ones. The others are
errors on purpose: an action seen elsewhere, the action that won another task, a near miss (one argument
exchanged), the last action again, free text. Some episodes first repeat an earlier episode of the same task
up to a random place, or follow the actions of a success in another task, so that successes occur where random
actions find few.
"""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from dreamgym.types import Decision, State, Task, Trajectory, Transition

ERRORS = {"elsewhere": 3, "winning": 3, "near miss": 4, "repeated": 1, "free text": 1}
"""Relative frequencies of the errors."""
ERROR_SHARES = (0.05, 0.2, 0.5)
"""Share of errors among the actions of an episode, one of these: episodes with few of them get far."""
FOLLOW = 0.6
"""Share of episodes that begin with actions of an earlier one, while there are few successes."""
ENOUGH = 0.25
"""Share of successes from which on nothing is repeated: failures are what teaches consequences."""
UNIFORM = 0.3
"""Share of admissible actions that are drawn without regard to what was tried before."""
DRAWN = 4
"""Successes of which the shortest is followed: what random actions find is full of detours."""
OMITTED = (0.0, 0.1, 0.3)
"""Share of its actions that are left out, one of these: it shows which are needed, and makes it shorter."""
PER_KIND, SUCCESSES = 300, 300
"""Actions of a kind and successes that are remembered."""

_TOKEN = re.compile(r'"[^"]*"|[\w.-]*\w')
_BLANK = "{}"


def action_kind(action: str) -> str:
    """The first word of an action, without its arguments.

    >>> action_kind('search_tickets customer="Ada"'), action_kind("click[Buy now]"), action_kind("!")
    ('search_tickets', 'click', '!')
    """
    found = _TOKEN.search(action)
    return found.group().lower() if found else action[:20]


@dataclass(slots=True)
class ExplorationMemory:
    """What the episodes of a collection have shown so far, from their texts alone."""

    actions: dict[str, dict[str, bool]] = field(default_factory=dict)
    """Kind to actions of that kind, and whether one of them has ever changed the state's text."""
    tried: Counter[str] = field(default_factory=Counter)
    """How often each action and each kind was tried."""
    successes: list[tuple[str, tuple[str, ...]]] = field(default_factory=list)
    """Instructions and actions of successful episodes."""
    episodes: int = 0
    won: int = 0

    def add(self, trajectory: Trajectory) -> None:
        self.episodes += 1
        self.won += trajectory.success
        if trajectory.success:
            actions = tuple(transition.action for transition in trajectory.transitions)
            self.successes = [*self.successes, (trajectory.task.instruction, actions)][-SUCCESSES:]
        refusal = _commonest(transition.outcome.next_state.text for transition in trajectory.transitions)
        for transition in trajectory.transitions:
            for action in transition.state.admissible_actions or ():
                self._know(action, effect=True)
            self.tried.update((transition.action, action_kind(transition.action)))
            text = transition.outcome.next_state.text
            self._know(transition.action, effect=text not in (transition.state.text, refusal))

    def _know(self, action: str, *, effect: bool) -> None:
        known = self.actions.setdefault(action_kind(action), {})
        if action in known:
            known[action] |= effect
        elif len(known) < PER_KIND:
            known[action] = effect

    def novelty(self, action: str) -> float:
        return float(((1 + self.tried[action]) * (1 + self.tried[action_kind(action)])) ** -0.5)

    def useful(self, source: random.Random) -> str | None:
        """An action that has had an effect somewhere; kinds are equally likely."""
        kinds = [kind for kind, actions in self.actions.items() if any(actions.values())]
        if not kinds:
            return None
        return source.choice([each for each, effect in self.actions[source.choice(kinds)].items() if effect])


class ExplorePolicy:
    """One episode of exploration; see the module."""

    name = "explore"

    def __init__(
        self,
        seed: int,
        *,
        memory: ExplorationMemory | None = None,
        earlier: Sequence[Trajectory] = (),
        templates: Sequence[str] = (),
    ) -> None:
        """
        Args:
            earlier: episodes of the same task.
            templates: actions to begin with where none are listed; ``{}`` stands for any word.
        """
        self._random = random.Random(seed)
        self._memory = memory or ExplorationMemory()
        self._earlier = earlier
        self._templates = templates
        self._errors = self._random.choice(ERROR_SHARES)
        self._plan: list[str] | None = None

    async def act(self, task: Task, history: Sequence[Transition], state: State) -> Decision:
        if self._plan is None:
            self._plan = self._choose_plan(task)
        if self._random.random() < self._errors:
            kind = self._random.choices(list(ERRORS), list(ERRORS.values()))[0]
            wrong = self._error(kind, task, history, state)
            if wrong is not None:
                return Decision(action=wrong)
        return Decision(action=self._planned(state) or self._any_action(task, state))

    # --- what earlier episodes have shown ---

    def _choose_plan(self, task: Task) -> list[str]:
        """Actions of an earlier episode: of this task up to a random place, or all of a success elsewhere."""
        memory = self._memory
        if memory.won > ENOUGH * max(memory.episodes, 1) or self._random.random() >= FOLLOW:
            return []
        best = max(self._earlier, key=lambda each: (each.success, _distinct_states(each)), default=None)
        if best is not None and self._random.random() < (
            0.5 if best.success or not memory.successes else 0.2
        ):
            place = self._random.randint(0, len(best) - 1 + best.success)
            return [transition.action for transition in best.transitions[:place]]
        alike = [each for each in memory.successes if _alike(each[0], task.instruction)] or memory.successes
        if not alike:
            return []
        drawn = self._random.choices(alike, k=DRAWN)
        instruction, actions = min(drawn, key=lambda each: len(each[1]))
        omitted = self._random.choice(OMITTED)
        return [
            translate(action, instruction, task.instruction)
            for action in actions
            if self._random.random() >= omitted
        ]

    def _planned(self, state: State) -> str | None:
        """The next action of the plan, or the admissible one most similar to it."""
        assert self._plan is not None
        while self._plan:
            wanted = self._plan.pop(0)
            if state.admissible_actions is None or wanted in state.admissible_actions:
                return wanted
            kind = action_kind(wanted)
            others = [each for each in state.admissible_actions if action_kind(each) == kind]
            if others:
                likeness = [_common_words(each, wanted) for each in others]
                best = [each for each, like in zip(others, likeness, strict=True) if like == max(likeness)]
                return self._random.choice(best)
        return None

    # --- actions ---

    def _any_action(self, task: Task, state: State) -> str:
        """An admissible action; by preference one that was rarely tried, since it may lead somewhere new."""
        actions = state.admissible_actions
        if not actions:
            return self._invented(task, state)
        if self._random.random() < UNIFORM:
            return self._random.choice(actions)
        return self._random.choices(actions, [self._memory.novelty(action) for action in actions])[0]

    def _invented(self, task: Task, state: State) -> str:
        """An action where none are listed: a template, one that had an effect, or words of the texts."""
        chance = self._random.random()
        if self._templates and chance < 0.6:
            return self._filled(self._random.choice(self._templates), task, state)
        known = self._memory.useful(self._random)
        if known is not None and chance < 0.9:
            changed = self.near_miss(known, task, state) if chance < 0.75 else None
            return changed or known
        return self.free_text(task, state)

    def _filled(self, template: str, task: Task, state: State) -> str:
        words = _words(f"{task.instruction} {state.text}") or ["it"]
        while _BLANK in template:
            template = template.replace(_BLANK, self._random.choice(words), 1)
        return template

    # --- errors ---

    def _error(self, kind: str, task: Task, history: Sequence[Transition], state: State) -> str | None:
        if kind == "repeated":
            return history[-1].action if history else None
        if kind == "free text":
            return self.free_text(task, state)
        if kind == "winning":
            return self._winning(task)
        if kind == "elsewhere":
            return self._memory.useful(self._random)
        sources = list(state.admissible_actions or ())
        known = self._memory.useful(self._random)
        if known is not None:
            sources.append(known)
        return self.near_miss(self._random.choice(sources), task, state) if sources else None

    def _winning(self, task: Task) -> str | None:
        """The last action of a success in another task: a policy that practises tries it too early."""
        if not self._memory.successes:
            return None
        instruction, actions = self._random.choice(self._memory.successes)
        return translate(actions[-1], instruction, task.instruction)

    def free_text(self, task: Task, state: State) -> str:
        """Words of the task and the state."""
        words = _words(f"{task.instruction} {state.text}") or ["hello"]
        return " ".join(self._random.choices(words, k=self._random.randint(1, 3)))

    def near_miss(self, action: str, task: Task, state: State) -> str | None:
        """The action with one argument exchanged: for another of the same shape, or a number one off."""
        spots = list(_TOKEN.finditer(action))[1:]
        values = [spot for spot in spots if action[spot.start() - 1] in "=:[("]
        if not spots:
            return None
        spot = self._random.choice(values or spots)
        other = self._argument_like(spot.group(), action, task, state)
        return f"{action[: spot.start()]}{other}{action[spot.end() :]}" if other is not None else None

    def _argument_like(self, old: str, action: str, task: Task, state: State) -> str | None:
        if old.isdigit() and self._random.random() < 0.3:
            return str(max(int(old) + self._random.choice((-1, 1)), 0))
        texts = [*(state.admissible_actions or ()), *self._memory.actions.get(action_kind(action), ())]
        found = {token for text in texts for token in _TOKEN.findall(text)[1:]}
        found |= set(_words(f"{task.instruction} {state.text}"))
        shape = _shape(old)
        others = sorted(token for token in found if _shape(token) == shape and token != old)
        return self._random.choice(others) if others else None


def translate(action: str, instruction: str, wanted: str) -> str:
    """An action of another task, with the words in which the instructions differ exchanged.

    >>> translate("take nuts", "Get the nuts.", "Get the gum.")
    'take gum'
    """
    before, after = _TOKEN.findall(instruction), _TOKEN.findall(wanted)
    if len(before) != len(after):
        return action
    names = {old: new for old, new in zip(before, after, strict=True) if old != new}
    return re.sub(r"[\w.-]*\w", lambda match: names.get(match.group(), match.group()), action)


def _alike(left: str, right: str) -> bool:
    """Whether two instructions have the same form."""
    mine, theirs = _TOKEN.findall(left), _TOKEN.findall(right)
    return len(mine) == len(theirs) and mine[:1] == theirs[:1]


def _words(text: str) -> list[str]:
    return sorted(set(_TOKEN.findall(text)))


def _shape(token: str) -> str:
    return "number" if token.isdigit() else "quoted" if token.startswith('"') else "word"


def _commonest(texts: Iterable[str]) -> str | None:
    counts: dict[str, int] = {}
    for text in texts:
        counts[text] = counts.get(text, 0) + 1
    best = max(counts, key=lambda text: counts[text], default=None)
    return best if best is not None and counts[best] > 1 else None


def _distinct_states(trajectory: Trajectory) -> int:
    return len({transition.outcome.next_state.text for transition in trajectory.transitions})


def _common_words(left: str, right: str) -> float:
    mine, theirs = set(_TOKEN.findall(left)), set(_TOKEN.findall(right))
    return len(mine & theirs) / max(len(mine | theirs), 1)
