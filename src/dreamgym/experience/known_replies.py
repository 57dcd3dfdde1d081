"""Facts in hindsight for any text: what earlier or later episodes of the same task replied to which action.

An environment without a world sheet still discloses its hidden facts, one reply at a time. What an action
revealed in one recording of a task was true in all of them, so the sheet of a task is the list of its known
replies: ``("reply", STATE, ACTION, REPLY)``. A prompt shows those that matter for an action (`select`):
replies to the same action in the same state, to the same action elsewhere, and to actions that share rare
words with it. No grammar of the environment is needed.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import Final

from dreamgym.experience.recorded_outcomes import OUTCOME, Determined, determined
from dreamgym.experience.recorded_patterns import (
    NOTHING_KNOWN,
    NUMBER,
    NoEffect,
    action_kind,
    by_task,
    no_effect,
    split_sentences,
    split_words,
)
from dreamgym.experience.reply_format import refer
from dreamgym.seeding import derive_seed
from dreamgym.types import Demonstration, Fact, Trajectory, Transition, WorldSheet

REPLY: Final = "reply"
IMAGINED: Final = "imagined"
"""Like `REPLY`, of a reply that no recording holds: the experience model sampled it."""
SEED: Final = "seed"
"""Predicate of the fact that holds an episode's seed, from which unknown replies are sampled."""
_ELSEWHERE, _RELATED = 2, 3
"""Replies to the same action in other states, and replies to other actions, in one prompt."""
_MAX_COUNTS = 8
_MAX_SHARED = 8
_MAX_MENTIONS = 4
_FUTURE, _DROPPED, _UNRECORDED = 0.5, 0.4, 0.15


def reply_fact(state: str, action: str, reply: str) -> Fact:
    return (REPLY, state, action, reply)


def recorded_replies(sheet: WorldSheet) -> list[Fact]:
    return [fact for fact in sheet.facts if fact[0] == REPLY and len(fact) == 4]


def known_replies(sheet: WorldSheet, history: Sequence[Transition]) -> list[Fact]:
    """Recorded and imagined replies, then those of the episode itself, newest last."""
    known = [fact for fact in sheet.facts if fact[0] in (REPLY, IMAGINED) and len(fact) == 4]
    return [*known, *map(_fact, history)]


def is_unrecorded(sheet: WorldSheet) -> bool:
    """Whether a sheet of replies holds none that was recorded: all of its facts are imagined."""
    return holds_replies(sheet) and not recorded_replies(sheet)


def holds_replies(sheet: WorldSheet | None) -> bool:
    """Whether a sheet lists known replies rather than facts of an environment."""
    facts = sheet.facts if sheet is not None else ()
    return bool(facts) and all(fact[0] in (REPLY, IMAGINED, SEED, OUTCOME) for fact in facts)


def seed_of(sheet: WorldSheet) -> int:
    return next((int(fact[1]) for fact in sheet.facts if fact[0] == SEED), 0)


def with_seed(sheet: WorldSheet, seed: int) -> WorldSheet:
    return WorldSheet(facts=((SEED, str(seed)), *(fact for fact in sheet.facts if fact[0] != SEED)))


def _fact(step: Transition) -> Fact:
    return reply_fact(step.state.text, step.action, step.outcome.next_state.text)


def trajectory_replies(trajectory: Trajectory, inert: NoEffect = NOTHING_KNOWN) -> list[Fact]:
    return list(map(_fact, inert.states(trajectory.transitions)))


def task_sheets(trajectories: Iterable[Trajectory]) -> dict[str, WorldSheet]:
    """The known replies of each task, over all its recordings, and the outcomes that they determine."""
    recorded = list(trajectories)
    inert = no_effect(recorded)
    certain = determined(recorded, inert)
    return {task: _sheet(recordings, inert, certain) for task, recordings in by_task(recorded).items()}


def _sheet(recordings: Iterable[Trajectory], inert: NoEffect, certain: Determined) -> WorldSheet:
    facts = (
        fact
        for recording in recordings
        for fact in (*trajectory_replies(recording, inert), *certain.facts(recording, inert))
    )
    return WorldSheet(facts=tuple(dict.fromkeys(facts)))


def with_known_replies(trajectories: Sequence[Trajectory]) -> list[Trajectory]:
    """Each trajectory with the known replies of the other recordings of its task as its sheet."""
    tasks, inert = by_task(trajectories), no_effect(trajectories)
    certain = determined(trajectories, inert)

    def others(trajectory: Trajectory) -> list[Trajectory]:
        return [other for other in tasks[trajectory.task.id] if other.id != trajectory.id]

    return [replace(each, sheet=with_seed(_sheet(others(each), inert, certain), 0)) for each in trajectories]


@dataclass(frozen=True, slots=True, kw_only=True)
class Selected:
    """The known replies that a prompt shows for one action, the most relevant last."""

    related: tuple[Fact, ...] = ()
    elsewhere: tuple[Fact, ...] = ()
    here: Fact | None = None
    counts: tuple[str, ...] = ()
    """The newest value of each counter that the state does not show."""

    @property
    def known(self) -> bool:
        """Whether a reply to this very action is among them."""
        return self.here is not None or bool(self.elsewhere)


def select(
    replies: Sequence[Fact], state: str, action: str, counters: frozenset[str] = frozenset()
) -> Selected:
    """The replies that matter for an action; newer ones win. Replies to other actions are left out if they
    hold a counter, whose value is that of another moment.

    >>> facts = [reply_fact("s", "read A", "nuts"), reply_fact("s", "read B", "gum")]
    >>> select(facts, "t", "press A").related
    (('reply', 's', 'read A', 'nuts'),)
    >>> select(facts, "t", "read B").elsewhere
    (('reply', 's', 'read B', 'gum'),)
    """
    same = [fact for fact in reversed(replies) if fact[2] == action]
    here = next((fact for fact in same if fact[1] == state), None)
    elsewhere: dict[str, Fact] = {}
    for fact in same:
        if fact[1] != state and (here is None or fact[3] != here[3]):
            elsewhere.setdefault(fact[3], fact)
    return Selected(
        related=tuple(reversed(_related(replies, action, counters))),
        elsewhere=tuple(reversed(list(elsewhere.values())[:_ELSEWHERE])),
        here=here,
    )


def _related(replies: Sequence[Fact], action: str, counters: frozenset[str]) -> list[Fact]:
    """Replies to other actions by the rare words they share with this one, best first."""
    wanted = set(split_words(action)[1:])  # the first word is the verb, which says little about what is meant
    others: dict[tuple[str, str], tuple[Fact, set[str]]] = {}
    for fact in replies:
        if fact[2] != action and not (counters and counters & _forms(fact[3])):
            others[fact[2], fact[3]] = (fact, {*split_words(fact[2]), *split_words(fact[3])})
    counts = Counter(word for _, words in others.values() for word in words & wanted)
    scored = [
        (sum(math.log(1 + len(others) / counts[word]) for word in words & wanted), number, fact)
        for number, (fact, words) in enumerate(others.values())
    ]
    # A word that all replies share says nothing.
    floor = math.log(2 + 1e-9) * 1.5
    best = sorted((each for each in scored if each[0] > floor), key=lambda each: (-each[0], -each[1]))
    return [fact for _, _, fact in best[:_RELATED]]


def _forms(text: str) -> set[str]:
    return {NUMBER.sub("#", sentence) for sentence in split_sentences(text)}


def training_replies(
    trajectory: Trajectory,
    position: int,
    inert: NoEffect = NOTHING_KNOWN,
    certain: Determined | None = None,
) -> list[Fact]:
    """Known replies for one training example: those of its sheet, of the past, and sometimes of its future,
    but never its own. Some replies to the same action are left out, so that the model also learns to predict
    what is not known; a determined outcome never reaches the model, so its reply is always left out. Some
    examples know the past alone, as in a dream of imagined facts."""
    rng = Random(derive_seed("known replies", trajectory.id, position))
    future, forget, unrecorded = (rng.random() < share for share in (_FUTURE, _DROPPED, _UNRECORDED))
    action = trajectory.transitions[position].action
    own = trajectory_replies(trajectory, inert)
    here = own[position][1] if certain is not None and action in certain else None
    sheet = trajectory.sheet or WorldSheet(facts=())
    before = [] if unrecorded else [*recorded_replies(sheet), *(own[position + 1 :] if future else ())]
    return [
        *(fact for fact in before if not (fact[2] == action and (forget or fact[1] == here))),
        *own[:position],
    ]


def shared_words(action: str, instruction: str, state: str) -> str:
    """Which words of an action, after the first, the task and the state name too: small models compare
    badly what they read in two places.

    >>> shared_words("take nuts", "Get the nuts.", "The gum falls.")
    'task nuts; state -'
    """
    words = list(dict.fromkeys(split_words(action)[1:]))[:_MAX_SHARED]

    def named(text: str) -> str:
        known = set(split_words(text))
        return " ".join(word for word in words if word in known) or "-"

    return f"task {named(instruction)}; state {named(state)}"


def mentions(history: Sequence[Transition], action: str) -> tuple[Transition, ...]:
    """The newest transition of each kind of action in an episode that names a word of this action, the
    newest last: what has happened to the things that the action is about."""
    words = set(split_words(action)[1:])
    found: dict[str, Transition] = {}
    for past in reversed(history):
        if words & {*split_words(past.action)[1:], *split_words(past.outcome.next_state.text)}:
            found.setdefault(action_kind(past.action), past)
    return tuple(reversed(list(found.values())[:_MAX_MENTIONS]))


def newest_counts(forms: Collection[str], history: Sequence[Transition], state: str) -> tuple[str, ...]:
    """The newest sentence of each of these forms in an episode, without those that the state shows."""
    shown = _forms(state)
    found: dict[str, str] = {}
    for past in reversed(history):
        for sentence in split_sentences(past.state.text):
            form = NUMBER.sub("#", sentence)
            if form in forms and form not in shown:
                found.setdefault(form, sentence)
    return tuple(sorted(found.values()))[:_MAX_COUNTS]


def references(selected: Selected, state: str, demonstrations: Sequence[Demonstration]) -> dict[str, str]:
    """Texts of a prompt that a reply can name instead of repeating them, by name; the first name of a text
    is the one to use."""
    named = {"=here": selected.here[3]} if selected.here is not None else {}
    named |= {f"=else {n}": fact[3] for n, fact in enumerate(reversed(selected.elsewhere), 1)}
    named["=state"] = state
    named |= {
        f"=like {n}": each.transition.outcome.next_state.text for n, each in enumerate(demonstrations, 1)
    }
    return named


def explain(transition: Transition, selected: Selected, named: Mapping[str, str]) -> str:
    """The cause of a reply that can be seen: how its counters differ from their newest values. A reply that
    repeats a text of the prompt needs none."""
    reply = transition.outcome.next_state.text
    if refer(reply, named).startswith("="):
        return ""
    newest = {
        NUMBER.sub("#", each): each for each in (*selected.counts, *split_sentences(transition.state.text))
    }
    changes = []
    for sentence in split_sentences(reply):
        before = newest.get(NUMBER.sub("#", sentence))
        if before is not None and before != sentence:
            pairs = zip(NUMBER.findall(before), NUMBER.findall(sentence), strict=True)
            changes += [f"{old} to {new}" for old, new in pairs if old != new]
    return f"{', '.join(changes)}." if changes else ""
