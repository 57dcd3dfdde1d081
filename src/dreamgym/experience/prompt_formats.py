"""How a language model is prompted to predict an environment, and how its replies are parsed. Weights that
were trained on another format need a `PromptFormat` of their own (`docs/guides/your-own-traces.md` has an
example)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import Annotated, ClassVar, Protocol

from pydantic import BaseModel, ConfigDict, Field

from dreamgym.errors import EpisodeFailedError
from dreamgym.experience.reply_format import ParsedReply, check_fact
from dreamgym.experience.world_sheet import MAX_FACTS, relevant_facts
from dreamgym.structured import fill_template, parse_error, parse_json, quote, quote_json, read_template
from dreamgym.types import (
    Change,
    CompletionRequest,
    Demonstration,
    Fact,
    FailureKind,
    Outcome,
    Task,
    Transition,
    WorldSheet,
)

_MAX_ACTION = 2_000
_ELLIPSIS = " \t\r\n.…"
"""A state of only these characters was copied from the format, or forgotten."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptContext:
    """Everything that the prompt of one prediction may show."""

    task: Task
    sheet: WorldSheet | None
    """None to leave it out."""
    history: tuple[Transition, ...]
    state: str
    action: str
    demonstrations: tuple[Demonstration, ...] = ()
    text_limit: int = 2_000
    """Characters of each state."""


class PromptFormat(Protocol):
    """Writes the request for a prediction and parses its reply."""

    reports_success: ClassVar[bool]
    """False for weights that predict only states: another grader is needed."""

    def request(self, context: PromptContext) -> CompletionRequest: ...

    def parse(self, text: str) -> ParsedReply:
        """Raises `EpisodeFailedError`: `PARSE_ERROR`, or `CONTRADICTION` if a reply contradicts itself."""
        ...

    def start_request(self, task: Task, sheet: WorldSheet) -> CompletionRequest | None:
        """Asks for a first state; None if the format cannot."""
        ...

    def parse_start(self, text: str) -> str: ...


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


_Fact = Annotated[list[str], Field(min_length=1, max_length=8)]


class _Reply(_Strict):
    reasoning: str
    ended: list[_Fact] = Field(default_factory=list)
    begun: list[_Fact] = Field(default_factory=list)
    next_state: str
    terminated: bool
    success: bool
    confidence: Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)] | None = None


class _Start(_Strict):
    first_state: str


class JsonFormat:
    """The paper's contract for any chat model: reasoning, changed facts, next state, end, confidence."""

    reports_success: ClassVar[bool] = True

    def __init__(
        self,
        *,
        environment: str,
        description: str,
        refusals: Sequence[str] = (),
        actor: str | None = None,
        reasoning: bool = True,
    ) -> None:
        """With the `actor`'s name among the facts, prompts show only the facts that an action touches."""
        refusal = "".join(f"\n  It is then answered by exactly {quote(text)}." for text in refusals[:1])
        slots = {"environment": environment, "description": description}
        self._system = fill_template(__package__, "predict.md", refusals=refusal, **slots)
        self._start_system = fill_template(__package__, "predict-start.md", **slots)
        self._actor = actor
        self._schema = _Reply.model_json_schema()
        self._schema["properties"]["next_state"]["minLength"] = 1
        if not reasoning:
            self._system += "\nAnswer without thinking: `reasoning` stays empty."
            self._schema["properties"]["reasoning"] = {"type": "string", "enum": [""]}

    def request(self, context: PromptContext) -> CompletionRequest:
        def state(text: str) -> str:
            return quote(text, context.text_limit)

        past = [
            f"{number}. action {_action(each.action)} led to {state(each.outcome.next_state.text)}"
            for number, each in enumerate(context.history, 1)
        ]
        shown = [
            f"- in {state(each.state.text)} action {_action(each.action)} led to "
            f"{state(each.outcome.next_state.text)}; {_end(each.outcome)}"
            for each in (found.transition for found in context.demonstrations)
        ]
        parts = [("Task", quote(context.task.instruction)), ("This episode so far", "\n".join(past))]
        parts.append(("Resembling transitions", "\n".join(shown)))
        if context.sheet is not None:
            facts = shown_facts(context.sheet, context.action, self._actor)
            parts.append(("Facts", "\n".join(quote_json(fact) for fact in facts)))
        parts += [("Present state", state(context.state)), ("Action", _action(context.action))]
        prompt = "\n\n".join(f"# {title}\n\n{text or '(none)'}" for title, text in parts)
        return CompletionRequest(system=self._system, prompt=prompt, schema=self._schema)

    def parse(self, text: str) -> ParsedReply:
        """
        >>> reply = '{"reasoning": "", "next_state": "Sold.", "terminated": true, "success": true}'
        >>> JsonFormat(environment="shop", description="A shop.").parse(reply).success
        True
        """
        reply = parse_json(_Reply, text)
        if not reply.next_state.strip().strip(_ELLIPSIS):
            raise parse_error("expected a next_state, got an empty one")
        if reply.success and not reply.terminated:
            raise EpisodeFailedError(
                FailureKind.CONTRADICTION, "success was claimed for an episode that is not terminated"
            )
        return ParsedReply(
            next_state=reply.next_state.strip(),
            reasoning=reply.reasoning,
            change=Change(ended=_facts(reply.ended), begun=_facts(reply.begun)),
            terminated=reply.terminated,
            success=reply.success,
            confidence=reply.confidence,
        )

    def start_request(self, task: Task, sheet: WorldSheet) -> CompletionRequest | None:
        facts = "\n".join(quote_json(fact) for fact in sheet.facts[:MAX_FACTS])
        prompt = f"# Task\n\n{quote(task.instruction)}\n\n# Facts\n\n{facts or '(none)'}"
        return CompletionRequest(system=self._start_system, prompt=prompt, schema=_Start.model_json_schema())

    def parse_start(self, text: str) -> str:
        state = parse_json(_Start, text).first_state.strip()
        if not state.strip(_ELLIPSIS):
            raise parse_error("expected a first_state, got an empty one")
        return state


def environment_description(environment: str) -> str:
    """The rules of an environment in words: its own file in `prompts/environments`, else the one for
    tools."""
    folder = files(__package__).joinpath("prompts", "environments")
    own = f"{environment}.md"
    known = {path.name for path in folder.iterdir()}
    return read_template(__package__, f"environments/{own if own in known else 'tools.md'}").strip()


def shown_facts(sheet: WorldSheet, action: str, actor: str | None) -> Sequence[Fact]:
    """The facts that an action touches if the actor's name is known, else all, up to a limit."""
    facts = relevant_facts(sheet, action, actor=actor) if actor is not None else sheet.facts
    return facts[:MAX_FACTS]


def _action(action: str) -> str:
    return quote(action, _MAX_ACTION)


def _end(outcome: Outcome) -> str:
    if outcome.success:
        return "the episode ended with success"
    return "the episode ended" if outcome.terminated else "the episode went on"


def _facts(listed: Sequence[Sequence[str]]) -> tuple[Fact, ...]:
    facts = tuple(tuple(fact) for fact in listed)
    for fact in facts:
        check_fact(fact)
    return facts
