"""The experience model's question and answer: how a prompt is filled and how a reply is read.

One strict form serves training, prediction and tests. A reply has four lines, in this order:

    think: mug 1 is in desk 1, hands are free.
    change: - inreceptacle mug 1, desk 1; + holds agent1, mug 1;
    next: You pick up the mug 1 from the desk 1.
    end: no

`end` is ``no``, ``yes`` (the episode is over without success) or ``success``. Whatever does not read so is a
parse error, never a guess.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from dreamgym.errors import EpisodeFailedError
from dreamgym.experience.world_sheet import kinds, listings, tell, touched
from dreamgym.types import (
    Change,
    Demonstration,
    Fact,
    FailureKind,
    Note,
    Outcome,
    Task,
    Transition,
    WorldSheet,
)

_FORM = re.compile(
    r"\A\s*think: (?P<think>[^\n]*)\nchange:(?P<change>[^\n]*)\n"
    r"next: (?P<next>[^\n]+)\nend: (?P<end>no|yes|success)\s*\Z"
)
_FACT = re.compile(r"\A([+-]) (\S+)(?: (.+))?\Z")
OPENINGS = ("like: ", "then: ", "state: ", "fact: ", "task: ")
"""How a question may begin; no reply begins so."""
_LONGEST = 20_000
"""Characters of a reply; more is refused unread."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """A reply that was understood."""

    reasoning: str
    change: Change
    next_state: str
    terminated: bool
    success: bool


TellFacts = Callable[[WorldSheet, str], Sequence[str]]
"""The lines about a sheet that an action (``start`` for the first state) needs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptSettings:
    """What a prompt holds. Each part can be left out, which is how its worth is measured."""

    actor: str | None = None
    """The agent's own name in the sheet, where it has one."""
    tell_facts: TellFacts | None = None
    """Tells the part of a sheet that an action needs; by default `sheet_lines`."""
    history: int = 2
    """How many of the newest transitions are told; the newest one's outcome is the state itself."""
    demonstrations: int = 2
    sheet: bool = True
    reasoning: bool = True
    text_limit: int = 400
    """Characters of any one state in history, demonstrations and the present."""


def prompt(
    task: Task,
    sheet: WorldSheet | None,
    history: Sequence[Transition],
    state: str,
    action: str,
    demonstrations: Sequence[Demonstration] = (),
    *,
    settings: PromptSettings,
) -> str:
    """What the model is asked. What the answer copies from comes last: the facts that the action names, the
    task, the action."""

    def cut(text: str) -> str:
        return _one_line(text)[: settings.text_limit]

    lines: list[str] = []
    for found in reversed(demonstrations[: settings.demonstrations]):
        past = found.transition
        lines.append(f"like: {_action(past)} => {cut(past.outcome.next_state.text)}")
    recent = history[-settings.history :] if settings.history else ()
    lines += [f"then: {_action(past)} => {cut(past.outcome.next_state.text)}" for past in recent[:-1]]
    lines += [f"then: {_action(past)}" for past in recent[-1:]]
    lines.append(f"state: {cut(state)}")
    if settings.sheet and sheet is not None:
        told = settings.tell_facts or (lambda sheet, action: sheet_lines(sheet, action, settings.actor))
        lines += [f"fact: {_one_line(line)}" for line in told(sheet, action)]
    lines += [f"task: {_one_line(task.instruction)}", f"action: {_one_line(action)[:500]}"]
    return "\n".join(lines) + "\n"


def _action(past: Transition) -> str:
    return _one_line(past.action)[:500]


def sheet_lines(sheet: WorldSheet, action: str, actor: str | None) -> list[str]:
    """The part of a sheet that an action touches; all of it where the action names nothing."""
    facts = touched(sheet, action, actor=actor)
    named = [name for name in sorted({n for f in facts for n in f[1:]}, key=action.find) if name in action]
    return tell(facts, order=[actor, *named] if actor else named)


def reply_text(note: Note, outcome: Outcome, *, reasoning: bool = True) -> str:
    """The reply that a model should give: what it is trained on.

    >>> from dreamgym.types import State
    >>> done = Outcome(next_state=State(text="It opens."), reward=0.0, terminated=False)
    >>> print(reply_text(Note(reasoning="it is closed.", change=Change(begun=(("opened", "safe 1"),))), done))
    think: it is closed.
    change: + opened safe 1;
    next: It opens.
    end: no
    """
    end = "success" if outcome.success else "yes" if outcome.terminated else "no"
    facts = [f"- {_fact_text(fact)};" for fact in note.change.ended]
    facts += [f"+ {_fact_text(fact)};" for fact in note.change.begun]
    think = _one_line(note.reasoning) if reasoning else ""
    change = "".join(f" {fact}" for fact in facts)
    return f"think: {think}\nchange:{change}\nnext: {_one_line(outcome.next_state.text)}\nend: {end}"


def parse_reply(text: str) -> Reply:
    """Read a reply.

    Raises:
        EpisodeFailedError: it does not have the form, with what was expected and what came.
    """
    found = _FORM.match(text) if len(text) <= _LONGEST else None
    if found is None:
        raise EpisodeFailedError(
            FailureKind.PARSE_ERROR,
            f"expected the four lines think, change, next and end, got {text[:200]!r}",
        )
    next_state = _lines(found["next"]).strip()
    if not next_state:
        raise EpisodeFailedError(FailureKind.PARSE_ERROR, "expected a next state, got an empty one")
    return Reply(
        reasoning=_lines(found["think"]),
        change=_parse_change(found["change"]),
        next_state=next_state,
        terminated=found["end"] != "no",
        success=found["end"] == "success",
    )


def _parse_change(text: str) -> Change:
    ended: list[Fact] = []
    begun: list[Fact] = []
    for part in filter(None, (part.strip() for part in text.split(";"))):
        found = _FACT.match(part)
        if found is None:
            raise EpisodeFailedError(
                FailureKind.PARSE_ERROR, f"expected changes like '+ opened safe 1;', got {part[:100]!r}"
            )
        sign, predicate, arguments = found.groups()
        fact = (predicate, *(word.strip() for word in (arguments or "").split(",") if word.strip()))
        (begun if sign == "+" else ended).append(fact)
    return Change(ended=tuple(ended), begun=tuple(begun))


def _fact_text(fact: Fact) -> str:
    predicate, *arguments = fact
    return f"{predicate} {', '.join(arguments)}".strip()


def _one_line(text: str) -> str:
    """Line breaks written as ``\\n``, so that a form's line is one line.

    >>> _lines(_one_line("a\\nb")) == "a\\nb"
    True
    """
    return text.replace("\\", "\\\\").replace("\r", "").replace("\n", "\\n")


def _lines(text: str) -> str:
    return re.sub(r"\\(.)", lambda found: "\n" if found[1] == "n" else found[1], text)


def start_prompt(
    task: Task, sheet: WorldSheet, *, actor: str | None = None, tell_facts: TellFacts | None = None
) -> str:
    """Asks for the first state of an episode: what stands in the open, since nothing was looked into yet."""
    if tell_facts is not None:
        told = list(tell_facts(sheet, "start"))
    else:
        around = [fact for fact in touched(sheet, "", actor=actor) if len(fact) > 2] if actor else []
        told = [*tell(around), *listings(sheet)]
    lines = [f"fact: {_one_line(line)}" for line in told]
    return "\n".join([*lines, f"task: {_one_line(task.instruction)}", "action: start"]) + "\n"


def start_text(state: str) -> str:
    """The reply to `start_prompt` that a model should give."""
    return f"next: {_one_line(state)}"


def parse_start(text: str) -> str | None:
    """The first state in a reply, or None if it has none."""
    first, *rest = text.strip().split("\n")
    if rest or not first.startswith("next: ") or len(first) > _LONGEST:
        return None
    return _lines(first.removeprefix("next: ")).strip() or None


def variation_prompt(instruction: str, sheet: WorldSheet) -> str:
    """Asks for another task in the same world (the paper's Eq. 6, on the same weights)."""
    return f"fact: here: {', '.join(kinds(sheet))}\ntask: {_one_line(instruction)}\naction: vary\n"


def variation_text(instruction: str) -> str:
    """The reply to `variation_prompt` that a model should give."""
    return f"new: {_one_line(instruction)}"


def parse_variation(text: str) -> str | None:
    """The instruction in a reply, or None if it has none."""
    first, *rest = text.strip().split("\n")
    if rest or not first.startswith("new: ") or len(first) > _LONGEST:
        return None
    return _lines(first.removeprefix("new: ")).strip() or None
