"""The worst actions and states of an experience model: which kinds of replies are wrong, why, and what to do.

A kind is an action with its arguments masked. No grammar of an environment is used: numbers, ids, quoted
values and the words that vary between episodes become slots.
"""

from __future__ import annotations

import json
import re
import shlex
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, TypeAlias

from dreamgym.evaluation.one_step import StepRecord
from dreamgym.evaluation.statistics import Estimate, share_of_steps

SLOT = "…"
_TOKEN = re.compile(r"\"[^\"\n]*\"|[^\W_][\w'’-]*|\S")
_NAMED_VALUE = re.compile(r":\s*\"([^\"\n]+)\"")
_VALUE = re.compile(r"\d|^\"|^[A-Z]$")
"""In numbers, ids and quoted values."""
_NUMBER = re.compile(r"[-+]?\d+(?:[.,]\d+)*")
_STATE_TOKENS = 12
"""Of a state that say what kind of state it is."""
_KEPT = 0.5
"""A word is kept where at least this share of the episodes has it."""
_FEW = 30
"""Recorded examples of a kind below which more are asked for."""
_EXAMPLE = 200
"""Characters of a text in an example."""

Kind: TypeAlias = Callable[[str], str]
"""The kind of a text."""


class Kinds:
    """Masks what varies between the episodes of some texts.

    >>> texts = [(f"e{n}", f"put {thing} in slot {n}") for n, thing in enumerate(["gum", "nuts", "tea"])]
    >>> kind = Kinds([*texts, ("e0", "insert coin"), ("e1", "insert coin")])
    >>> kind("put cola in slot 7"), kind("insert coin")
    ('put … in slot …', 'insert coin')
    """

    def __init__(self, texts: Iterable[tuple[str, str]], *, most: int | None = None) -> None:
        """
        Args:
            texts: each with the id of its episode.
            most: tokens of a text that count; None for all.
        """
        self._most = most
        episodes: dict[str, set[str]] = defaultdict(set)
        found: dict[str, dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
        for episode, text in texts:
            head = _head(text)
            episodes[head].add(episode)
            for token in self._tokens(text):
                found[head][token].add(episode)
        self._kept = {
            head: {word for word, where in words.items() if len(where) >= _KEPT * len(episodes[head])}
            for head, words in found.items()
        }
        self._cache: dict[str, str] = {}

    def __call__(self, text: str) -> str:
        if text not in self._cache:
            self._cache[text] = self._masked(text)
        return self._cache[text]

    def _tokens(self, text: str) -> list[str]:
        return _TOKEN.findall(text)[: self._most]

    def _masked(self, text: str) -> str:
        head = _head(text)
        kept, masked = self._kept.get(head, set()), list[str]()
        for token in self._tokens(text):
            value = token.strip('"')
            fixed = value == head or (token in kept and not _VALUE.search(token))
            word = token if fixed or not re.search(r"\w", token) else SLOT
            if word != SLOT or not masked or masked[-1] != SLOT:
                masked.append(word)
        return " ".join(masked) or SLOT


def _head(text: str) -> str:
    """The word that says what is done: the first one, or the first named value of a JSON object.

    >>> _head("insert coin"), _head('{"name": "close_ticket", "arguments": {}}'), _head("search[cat food]")
    ('insert', 'close_ticket', 'search')
    """
    named = _NAMED_VALUE.search(text) if text.lstrip().startswith("{") else None
    word = re.search(r"[^\W\d]\w*", text)
    return named[1] if named is not None else word[0] if word is not None else ""


def numbers_differ_only(text: str, other: str) -> bool:
    """Whether two different texts are equal but for their numbers.

    >>> numbers_differ_only("coins left 2", "coins left 1"), numbers_differ_only("a 1", "b 1")
    (True, False)
    """
    return text != other and _NUMBER.sub("#", text) == _NUMBER.sub("#", other)


@dataclass(frozen=True, slots=True, kw_only=True)
class AdviceSettings:
    """What the advice depends on: how the experience model was made."""

    environment: str
    options: Mapping[str, Any] = field(default_factory=dict)
    prompted: bool = False
    exchange_numbers: bool = False
    history: int = 1
    text_limit: int = 64
    sheet: bool = True
    steps: int = 0
    recorded: Sequence[tuple[str, str]] = ()
    """The actions that it learnt from, each with the id of its episode; empty if they are unknown."""
    refusals: Collection[str] = ()
    policies: tuple[str, str] | None = ("explore", "explore")
    """Policies that record more of all actions, and more failures; None if it cannot be played here."""

    @property
    def section(self) -> str:
        return "prompted" if self.prompted else "experience"


@dataclass(frozen=True, slots=True, kw_only=True)
class WorstKind:
    """One kind of action, or of state, with its wrong replies."""

    kind: str
    exact: Estimate
    """Share of next states that are word for word right."""
    right: Estimate
    """Share of these that are also no false success."""
    wrong: int
    false_successes: int
    """Success predicted where the record has none."""
    recorded: int | None
    """Actions of this kind in the data that it learnt from, if known."""
    causes: dict[str, int] = field(default_factory=dict)
    """Wrong replies by measured cause."""
    example: dict[str, str]
    advice: str

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        share, example = self.exact.value or 0.0, self.example
        invented = f", {self.false_successes} false successes" if self.false_successes else ""
        return (
            f"`{self.kind}`: {share:.0%} of {self.exact.count} replies exact{invented}; expected "
            f"{example['expected']!r}, predicted {example['predicted']!r}; {self.advice}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Worst:
    """The kinds of action and of state with the most certainly wrong replies, worst first."""

    actions: tuple[WorstKind, ...] = ()
    states: tuple[WorstKind, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        return {
            "actions": [each.to_dict() for each in self.actions],
            "states": [each.to_dict() for each in self.states],
        }

    def markdown(self) -> str:
        """Two tables; empty where every reply is exact."""
        return "".join(
            f"\n| worst {what} | exact [95% interval] | n | expected | predicted | what to do |\n"
            "| --- | --- | ---: | --- | --- | --- |\n"
            + "".join(f"| {' | '.join(map(_cell, _row(each)))} |\n" for each in found)
            for what, found in (("actions", self.actions), ("states", self.states))
            if found
        )


def _row(found: WorstKind) -> tuple[str, ...]:
    example = found.example
    return (
        f"`{found.kind}`",
        *(found.exact.percent(), str(found.exact.count)),
        *(example["expected"], example["predicted"], found.advice),
    )


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def worst_kinds(records: Sequence[StepRecord], settings: AdviceSettings, *, most: int = 5) -> Worst:
    """The worst of these predictions, at most `most` kinds of action and of state."""
    if not records:
        return Worst()
    measured = [(each.trajectory_id, each.action) for each in records]
    action_kind = Kinds([*settings.recorded, *measured])
    state_kind = Kinds([(each.trajectory_id, each.state) for each in records], most=_STATE_TOKENS)
    known = Counter(action_kind(action) for _, action in settings.recorded) if settings.recorded else None
    ambiguous = _ambiguous(records, settings)
    return Worst(
        actions=_ranked(records, lambda each: action_kind(each.action), known, ambiguous, settings)[:most],
        states=_ranked(records, lambda each: state_kind(each.state), None, ambiguous, settings)[:most],
    )


def _ranked(
    records: Sequence[StepRecord],
    kind_of: Callable[[StepRecord], str],
    recorded: Counter[str] | None,
    ambiguous: dict[Hashable, str],
    settings: AdviceSettings,
) -> tuple[WorstKind, ...]:
    by_kind: dict[str, list[StepRecord]] = defaultdict(list)
    for each in records:
        by_kind[kind_of(each)].append(each)
    found = [
        _worst(kind, some, recorded, ambiguous, settings)
        for kind, some in by_kind.items()
        if not all(each.right for each in some)
    ]
    # By the share of wrong replies that is certain: one wrong reply of one is no evidence.
    return tuple(sorted(found, key=lambda each: (each.right.high or 0.0, -each.wrong, each.kind)))


def _worst(
    kind: str,
    records: Sequence[StepRecord],
    recorded: Counter[str] | None,
    ambiguous: dict[Hashable, str],
    settings: AdviceSettings,
) -> WorstKind:
    wrong = [each for each in records if not each.right]
    causes = Counter(_cause(each, ambiguous, settings) for each in wrong)
    cause = causes.most_common(1)[0][0]
    seen = None if recorded is None else recorded[kind]
    example = next(each for each in wrong if _cause(each, ambiguous, settings) == cause)
    return WorstKind(
        kind=kind,
        exact=share_of_steps((each.trajectory_id, each.exact) for each in records),
        right=share_of_steps((each.trajectory_id, each.right) for each in records),
        wrong=len(wrong),
        false_successes=sum(each.false_success for each in records),
        recorded=seen,
        causes=dict(causes.most_common()),
        example={
            "action": example.action,
            "state": example.state[:_EXAMPLE],
            "expected": example.real.next_state.text[:_EXAMPLE],
            "predicted": _predicted(example)[:_EXAMPLE],
        },
        advice=_advice(cause, seen, settings),
    )


def _predicted(record: StepRecord) -> str:
    if record.predicted is None:
        return f"({record.failure})"
    return record.predicted.next_state.text + (" (success)" if record.false_success else "")


UNREADABLE, FORGIVEN, GRANTED = "no readable reply", "success predicted", "a refused action is granted"
NUMBERS, CUT, HIDDEN, OTHER = "only numbers differ", "the state is cut", "the past decides", "another text"


def _cause(record: StepRecord, ambiguous: dict[Hashable, str], settings: AdviceSettings) -> str:
    if record.predicted is None:
        return UNREADABLE
    if record.false_success:
        return FORGIVEN
    expected, predicted = record.real.next_state.text, record.predicted.next_state.text
    if expected in settings.refusals and predicted not in settings.refusals:
        return GRANTED
    if (known := ambiguous.get(_visible(record, settings))) is not None:
        return known
    return NUMBERS if numbers_differ_only(expected, predicted) else OTHER


def _visible(record: StepRecord, settings: AdviceSettings) -> Hashable:
    return record.state[: settings.text_limit], record.action, record.facts if settings.sheet else ()


def _ambiguous(records: Sequence[StepRecord], settings: AdviceSettings) -> dict[Hashable, str]:
    """The questions with more than one real reply: by what is cut off the state, or by the past."""
    replies: dict[Hashable, dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
    for each in records:
        replies[_visible(each, settings)][each.state].add(each.real.next_state.text)
    return {
        question: HIDDEN if any(len(found) > 1 for found in states.values()) else CUT
        for question, states in replies.items()
        if len(set().union(*states.values())) > 1
    }


def _advice(cause: str, recorded: int | None, settings: AdviceSettings) -> str:
    section = settings.section
    longer = (
        "show more demonstrations (replay.k), or use a stronger model"
        if settings.prompted
        else f"fine-tune longer (experience.steps, {settings.steps} now)"
    )
    if recorded is not None and recorded < _FEW and cause != CUT:
        return f"{recorded} examples were recorded; {_record_more(settings, failures=False)}"
    if cause in (FORGIVEN, GRANTED):
        return f"its failures are not known; {_record_more(settings, failures=True)}"
    if cause == NUMBERS and settings.exchange_numbers and not settings.prompted:
        return "only numbers are wrong: fine-tune with experience.exchange_numbers=false"
    if cause == CUT:
        return f"the state is cut to {settings.text_limit} characters: raise {section}.text_limit"
    if cause == HIDDEN:
        return f"the prompt does not hold what decides: raise {section}.history ({settings.history} now)"
    return longer


def _record_more(settings: AdviceSettings, *, failures: bool) -> str:
    if settings.policies is None:
        return "add traces of this kind, failures among them"
    policy = settings.policies[failures]
    command = ["dreamgym", "collect", "--env", settings.environment]
    for name, value in settings.options.items():
        text = value if isinstance(value, str) else json.dumps(value, default=str)
        command += ["--set", f"environment.options.{name}={text}"]
    return f"record more of this kind: {shlex.join([*command, '--policy', policy, '--episodes', '300'])}"
