"""The prompt and the reply of a fine-tuned experience model: how they are written, parsed and checked.

One strict format serves fine-tuning, prediction and tests. A reply has four lines, in this order:

    think: mug 1 is in desk 1, hands are free.
    change: - inreceptacle mug 1, desk 1; + holds agent1, mug 1;
    next: You pick up the mug 1 from the desk 1.
    end: no

`end` is ``no``, ``yes`` (the episode is over without success) or ``success``. Everything else is a parse
error.

Where the facts after the change determine the next state, `next` is its name (``=p224``) instead of its
text; a name that they do not have is a parse error.

Code checks two things in the reasoning (`corrected`). Small models read both sides of a comparison correctly
and still decide by habit, so the verdict of ``LEAD, LEFT = RIGHT: yes`` is recomputed. And where the prompt
says ``red apple: carried, raw``, a clause that opens with ``red apple: `` must repeat it: a policy soon finds
out that the model writes what a goal needs instead.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from dreamgym.config import ExperienceConfig
from dreamgym.experience.world_sheet import fact_lines, object_kinds, relevant_facts, visible_names
from dreamgym.structured import parse_error, quote_action, unify_line_breaks
from dreamgym.types import Change, Demonstration, Fact, Note, Outcome, Task, Transition, WorldSheet

_REPLY = re.compile(
    r"\A\s*think: (?P<think>[^\n]*)\nchange:(?P<change>[^\n]*)\n"
    r"next: (?P<next>[^\n]+)\nend: (?P<end>no|yes|success)\s*\Z"
)
_CHANGE = re.compile(r"\A([+-]) (\S+)(?: (.+))?\Z")
_MAX_DIGITS = 9
PROMPT_STARTS = ("like: ", "then: ", "state: ", "fact: ", "task: ", "known: ", "else: ", "here: ")
"""A prompt starts with one of these; no reply does."""
_FACT = "fact: "
_CLAUSE_ENDS = frozenset(".;")
"""A fact that contains one of these cannot be quoted as one clause."""
_CLAUSE = re.compile(r"(?:(?<=^think: )|(?<=[.;] ))(?P<name>[^.,;:=\n]+): (?P<rest>[^.;\n]*)")
_COMPARISON = re.compile(r"(?P<left>[^.,;:=\n]+) = (?P<right>[^.,;:=\n]+): (?P<verdict>yes|no)\b")
_MAX_CHARACTERS = 20_000
"""Of a reply; a longer one is rejected without parsing."""
_MAX_UNNAMED_FACTS = 40
"""Shown for an action that names none of them."""
_NO_CHANGE = Change()


@dataclass(frozen=True, slots=True, kw_only=True)
class ParsedReply:
    """An experience model's reply to one action."""

    next_state: str
    reasoning: str = ""
    change: Change = _NO_CHANGE
    terminated: bool = False
    success: bool | None = None
    """None if the format has no place for it: the grader then decides as if success were claimed."""
    confidence: float | None = None


SelectFacts = Callable[[WorldSheet, str], Sequence[str]]
"""Renders the facts of a sheet that an action (``start`` for the first state) needs, one line each."""
StateTexts = Callable[[Task, WorldSheet], Mapping[str, str]]
"""The texts of the states that the facts of a sheet determine, by short names."""


class PromptSettings(ExperienceConfig):
    """The settings of an experience model, and what its environment adds to a prompt."""

    actor: str | None = None
    """The agent's name in the sheet, where it has one."""
    select_facts: SelectFacts | None = None
    """Renders the facts that an action needs; by default `sheet_lines`."""
    state_texts: StateTexts | None = None
    """The states that facts determine, by name; see `EnvironmentSpec.state_texts`."""
    demonstrations: int = 1


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
    """The prompt for one action. What the reply copies from comes last: relevant facts, task, action."""

    def cut(text: str) -> str:
        return escape(text)[: settings.text_limit]

    lines: list[str] = []
    for found in reversed(demonstrations[: settings.demonstrations]):
        past = found.transition
        lines.append(f"like: {quote_action(past.action)} => {cut(past.outcome.next_state.text)}")
    recent = history[-settings.history :] if settings.history else ()
    lines += [
        f"then: {quote_action(past.action)} => {cut(past.outcome.next_state.text)}" for past in recent[:-1]
    ]
    lines += [f"then: {quote_action(past.action)}" for past in recent[-1:]]
    lines.append(f"state: {cut(refer_state(state, task, sheet, settings))}")
    if settings.sheet and sheet is not None:
        render = settings.select_facts or (lambda sheet, action: sheet_lines(sheet, action, settings.actor))
        lines += [_FACT + escape(line) for line in render(sheet, action)]
    lines += [f"task: {escape(task.instruction)}", f"action: {quote_action(action)}"]
    return "\n".join(lines) + "\n"


def sheet_lines(sheet: WorldSheet, action: str, actor: str | None) -> list[str]:
    """The facts that an action touches; all of them, up to a limit, if it names none.

    >>> sheet_lines(WorldSheet(facts=(("price", "cola", "2"), ("jammed", "slot 1"))), "read labels", None)
    ['price 2: cola', 'slot 1: jammed']
    """
    facts = relevant_facts(sheet, action, actor=actor) or sheet.facts[:_MAX_UNNAMED_FACTS]
    named = [name for name in sorted({n for f in facts for n in f[1:]}, key=action.find) if name in action]
    return fact_lines(facts, order=[actor, *named] if actor else named)


def reply_text(note: Note, outcome: Outcome, *, reasoning: bool = True) -> str:
    """The reply to fine-tune on.

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
    think = escape(note.reasoning) if reasoning else ""
    change = "".join(f" {fact}" for fact in facts)
    return f"think: {think}\nchange:{change}\nnext: {escape(outcome.next_state.text)}\nend: {end}"


def parse_reply(text: str) -> ParsedReply:
    found = _REPLY.match(text) if len(text) <= _MAX_CHARACTERS else None
    if found is None:
        raise parse_error(f"expected the four lines think, change, next and end, got {text[:200]!r}")
    next_state = unescape(found["next"]).strip()
    if not next_state:
        raise parse_error("expected a next state, got an empty one")
    return ParsedReply(
        reasoning=unescape(found["think"]),
        change=_parse_change(found["change"]),
        next_state=next_state,
        terminated=found["end"] != "no",
        success=found["end"] == "success",
    )


def _parse_change(text: str) -> Change:
    ended: list[Fact] = []
    begun: list[Fact] = []
    for part in filter(None, (part.strip() for part in text.split(";"))):
        found = _CHANGE.match(part)
        if found is None:
            raise parse_error(f"expected changes like '+ opened safe 1;', got {part[:100]!r}")
        sign, predicate, arguments = found.groups()
        fact = (predicate, *(word.strip() for word in (arguments or "").split(",") if word.strip()))
        check_fact(fact)
        (begun if sign == "+" else ended).append(fact)
    return Change(ended=tuple(ended), begun=tuple(begun))


def check_fact(fact: Fact) -> None:
    for name in fact[1:]:
        if not has_plain_number(name):
            raise parse_error(f"expected names with numbers like 'safe 1', got {name[:100]!r}")


def has_plain_number(name: str) -> bool:
    """Whether the number of a name, if it has one, is written in at most 9 decimal digits.

    >>> has_plain_number("mug 2"), has_plain_number("lantern"), has_plain_number("mug ²")
    (True, True, False)
    """
    last = name.rpartition(" ")[2]
    return not last.isdigit() or (last.isdecimal() and len(last) <= _MAX_DIGITS)


def _fact_text(fact: Fact) -> str:
    predicate, *arguments = fact
    return f"{predicate} {', '.join(arguments)}".strip()


def escape(text: str) -> str:
    """The text on one line: line breaks of any kind become ``\\n``.

    >>> unescape(escape("a\\nb")) == "a\\nb"
    True
    """
    return unify_line_breaks(text).replace("\\", "\\\\").replace("\n", "\\n")


def unescape(text: str) -> str:
    return re.sub(r"\\(.)", lambda found: "\n" if found[1] == "n" else found[1], text)


def refer(text: str, named: Mapping[str, str]) -> str:
    """The name of a text, or the text itself; a text that looks like a name gets a second ``=``.

    >>> refer("It opens.", {"=here": "It opens."}), refer("=here", {})
    ('=here', '==here')
    """
    for name, known in named.items():
        if known == text:
            return name
    return f"={text}" if text.startswith("=") else text


def resolve(text: str, named: Mapping[str, str]) -> str:
    """The text that a reply means: the inverse of `refer`.

    Raises:
        EpisodeFailedError: the prompt has no text of this name.
    """
    if text.startswith("=="):
        return text[1:]
    if not text.startswith("="):
        return text
    if text not in named:
        raise parse_error(f"expected a text or one of {', '.join(named)}, got {text[:50]!r}")
    return named[text]


def refer_state(text: str, task: Task, sheet: WorldSheet | None, settings: PromptSettings) -> str:
    """The name of a state that the facts determine, or its text."""
    return text if settings.state_texts is None else refer(text, _determined(task, sheet, settings))


def resolve_state(text: str, task: Task, sheet: WorldSheet | None, settings: PromptSettings) -> str:
    """The text that a reply means, given the facts after its change: the inverse of `refer_state`.

    Raises:
        EpisodeFailedError: the facts determine no state of this name.
    """
    named = _determined(task, sheet, settings)
    if named and not is_name(text):
        raise parse_error(f"expected one of {', '.join(named)}, got {text[:50]!r}")
    return text if settings.state_texts is None else resolve(text, named)


def is_name(text: str) -> bool:
    """Whether a next state in a reply is the name of a text."""
    return text.startswith("=") and not text.startswith("==")


def _determined(task: Task, sheet: WorldSheet | None, settings: PromptSettings) -> dict[str, str]:
    """None are where no facts are shown."""
    if settings.state_texts is None or sheet is None or not settings.sheet:
        return {}
    return {f"={name}": text for name, text in settings.state_texts(task, sheet).items()}


def start_prompt(task: Task, sheet: WorldSheet, settings: PromptSettings) -> str:
    """The prompt for the first state of an episode, with the facts that are visible at the start."""
    actor = settings.actor
    if settings.select_facts is not None:
        shown = list(settings.select_facts(sheet, "start"))
    else:
        around = [fact for fact in relevant_facts(sheet, "", actor=actor) if len(fact) > 2] if actor else []
        shown = [*fact_lines(around), *visible_names(sheet)]
    lines = [_FACT + escape(line) for line in shown]
    return "\n".join([*lines, f"task: {escape(task.instruction)}", "action: start"]) + "\n"


def start_text(state: str) -> str:
    """The reply to `start_prompt` to fine-tune on."""
    return f"next: {escape(state)}"


def parse_start(text: str) -> str:
    found = _parse_line(text, "next: ")
    if found is None:
        raise parse_error(f"expected a first state, got {text[:200]!r}")
    return found


def variation_prompt(instruction: str, sheet: WorldSheet) -> str:
    """The prompt for another task in the same room (the paper's Eq. 6, on the same weights)."""
    return f"fact: here: {', '.join(object_kinds(sheet))}\ntask: {escape(instruction)}\naction: vary\n"


def variation_text(instruction: str) -> str:
    """The reply to `variation_prompt` to fine-tune on."""
    return f"new: {escape(instruction)}"


def parse_variation(text: str) -> str | None:
    """The instruction in a reply, or None if it has none."""
    return _parse_line(text, "new: ")


def _parse_line(text: str, start: str) -> str | None:
    first, *rest = text.strip().split("\n")
    if rest or not first.startswith(start) or len(first) > _MAX_CHARACTERS:
        return None
    return unescape(first.removeprefix(start)).strip() or None


def corrected(reply: str, facts: Sequence[str] = ()) -> str | None:
    """The reply up to its first wrong verdict or quote, corrected; None if there is none.

    Args:
        facts: the facts in the prompt.

    >>> corrected("think: asked from, table = counter: yes. all is well.")
    'think: asked from, table = counter: no'
    >>> corrected("think: asked from, table = table: yes. asked from table: no.") is None
    True
    >>> corrected("think: knife: carried, sharp; knife, carried = carried: yes.", ["knife: on table, sharp"])
    'think: knife: on table, sharp'
    """
    reasoning = reply.partition("\n")[0]
    found = [each for each in (_verdict(reasoning), _quote(reasoning, facts)) if each is not None]
    if not found:
        return None
    start, right = min(found)
    return reasoning[:start] + right


def prompt_facts(text: str) -> list[str]:
    """The facts in a prompt."""
    return [line.removeprefix(_FACT) for line in text.split("\n") if line.startswith(_FACT)]


def _verdict(reasoning: str) -> tuple[int, str] | None:
    """The position of the first wrong verdict, and the right one."""
    for found in _COMPARISON.finditer(reasoning):
        right = "yes" if found["left"].strip() == found["right"].strip() else "no"
        if found["verdict"] != right:
            return found.start("verdict"), right
    return None


def _quote(reasoning: str, facts: Sequence[str]) -> tuple[int, str] | None:
    """The position of the first wrong quote, and the fact in the prompt."""
    known: dict[str, list[str]] = {}
    for fact in facts:
        name, colon, rest = fact.partition(": ")
        if colon and not _CLAUSE_ENDS & set(rest):
            known.setdefault(name, []).append(rest)
    for found in _CLAUSE.finditer(reasoning):
        facts_of_name = known.get(found["name"])
        if facts_of_name and found["rest"] not in facts_of_name:
            return found.start("rest"), facts_of_name[0]
    return None
