"""How a language model that was not taught is asked to play the environment, and how its replies are read.

`JsonFormat` is ours: the paper's contract in words, answered by one JSON object. `AgentWorldFormat` and
`WebWorldFormat` are those of open weights that were made to predict states. They tell a next state and
nothing of success, so somebody else has to grade. Whatever does not read as its form says is a parse error.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Annotated, ClassVar, Protocol, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from dreamgym.errors import EpisodeFailedError
from dreamgym.experience.postprocess import Told
from dreamgym.experience.world_sheet import touched
from dreamgym.structured import extract_json
from dreamgym.types import (
    Change,
    Demonstration,
    Fact,
    FailureKind,
    JsonValue,
    Outcome,
    Task,
    Transition,
    WorldSheet,
)

_LONGEST = 200_000
"""Characters of a reply; more is refused unread."""
_LONGEST_ACTION = 2_000
_MOST_FACTS = 300
_SLOT = re.compile(r"\{\{(\w+)\}\}")
_THOUGHT = re.compile(r"\A\s*(?:<think>)?(?P<thought>(?:(?!<think>).)*?)</think>", re.S)
_OBSERVATION = re.compile(r"<predicted_observation>(.*?)</predicted_observation>", re.S | re.I)
_MARK = "**Environment Observation:**"
_DOTS = " \t\r\n.…"
"""A state of these alone is one that was copied from the form, or forgotten."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Situation:
    """Everything that one prediction may be asked with, cut to what the settings allow."""

    task: Task
    sheet: WorldSheet | None
    """None where the model shall do without."""
    history: tuple[Transition, ...]
    state: str
    action: str
    demonstrations: tuple[Demonstration, ...] = ()
    limit: int = 2_000
    """Characters of any one state."""

    def cut(self, text: str) -> str:
        return text if len(text) <= self.limit else f"{text[: self.limit]} […]"


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """What is sent: instructions, earlier turns of the chat, and the prompt."""

    system: str
    prompt: str
    turns: tuple[tuple[str, str], ...] = ()
    schema: Mapping[str, JsonValue] | None = None

    def __len__(self) -> int:
        return len(self.system) + len(self.prompt) + sum(len(a) + len(b) for a, b in self.turns)


class Form(Protocol):
    """Between a situation and a language model."""

    tells_success: ClassVar[bool]

    def question(self, situation: Situation) -> Question: ...

    def read(self, text: str) -> Told:
        """
        Raises:
            EpisodeFailedError: `PARSE_ERROR`, or `CONTRADICTION` where the reply denies itself.
        """
        ...

    def start_question(self, task: Task, sheet: WorldSheet) -> Question | None:
        """Asks for a first state; None where the form cannot."""
        ...

    def read_start(self, text: str) -> str:
        """
        Raises:
            EpisodeFailedError: `PARSE_ERROR`.
        """
        ...


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


_M = TypeVar("_M", bound=BaseModel)


class JsonFormat:
    """The paper's contract, for any chat model: reasoning, changes, next state, end, confidence."""

    tells_success: ClassVar[bool] = True

    def __init__(
        self,
        *,
        environment: str,
        world: str,
        refusals: Sequence[str] = (),
        actor: str | None = None,
        reasoning: bool = True,
    ) -> None:
        """
        Args:
            world: what to know of the environment, in words (`world_prompt`).
            actor: the agent's own name among the facts, where it has one: only facts that an action touches
                are told then, else all.
            reasoning: whether it thinks before it answers.
        """
        said = "".join(f"\n  It is then answered by exactly {_quoted(text)}." for text in refusals[:1])
        self._system = filled("dream.md", environment=environment, world=world, refusals=said)
        self._start_system = filled("dream-start.md", environment=environment, world=world)
        self._actor = actor
        self._schema = _Reply.model_json_schema()
        self._schema["properties"]["next_state"]["minLength"] = 1
        if not reasoning:
            self._system += "\nAnswer without thinking: `reasoning` stays empty."
            self._schema["properties"]["reasoning"] = {"type": "string", "enum": [""]}

    def question(self, situation: Situation) -> Question:
        here = situation
        past = [
            f"{number}. action {_quoted(each.action[:_LONGEST_ACTION])} led to "
            f"{_quoted(here.cut(each.outcome.next_state.text))}"
            for number, each in enumerate(here.history, 1)
        ]
        shown = [_demonstrated(here, each) for each in here.demonstrations]
        parts = [("Task", _quoted(here.task.instruction)), ("This episode so far", "\n".join(past))]
        parts.append(("Resembling transitions", "\n".join(shown)))
        if here.sheet is not None:
            facts = told_facts(here.sheet, here.action, self._actor)
            parts.append(("Facts", "\n".join(json.dumps(fact, ensure_ascii=False) for fact in facts)))
        parts += [
            ("Present state", _quoted(here.cut(here.state))),
            ("Action", _quoted(here.action[:_LONGEST_ACTION])),
        ]
        prompt = "\n\n".join(f"# {title}\n\n{text or '(none)'}" for title, text in parts)
        return Question(system=self._system, prompt=prompt, schema=self._schema)

    def read(self, text: str) -> Told:
        """
        >>> form = JsonFormat(environment="shop", world="A shop.")
        >>> form.read('{"reasoning": "", "next_state": "Sold.", "terminated": true, "success": true}').success
        True
        """
        reply = parsed(_Reply, text)
        if not reply.next_state.strip().strip(_DOTS):
            raise _misfit("expected a next_state, got an empty one")
        if reply.success and not reply.terminated:
            raise EpisodeFailedError(
                FailureKind.CONTRADICTION, "success was claimed of an episode that goes on (terminated false)"
            )
        return Told(
            next_state=reply.next_state.strip(),
            reasoning=reply.reasoning,
            change=Change(ended=_facts(reply.ended), begun=_facts(reply.begun)),
            terminated=reply.terminated,
            success=reply.success,
            confidence=reply.confidence,
        )

    def start_question(self, task: Task, sheet: WorldSheet) -> Question | None:
        facts = "\n".join(json.dumps(fact, ensure_ascii=False) for fact in sheet.facts[:_MOST_FACTS])
        prompt = f"# Task\n\n{_quoted(task.instruction)}\n\n# Facts\n\n{facts or '(none)'}"
        return Question(system=self._start_system, prompt=prompt, schema=_Start.model_json_schema())

    def read_start(self, text: str) -> str:
        state = parsed(_Start, text).first_state.strip()
        if not state.strip(_DOTS):
            raise _misfit("expected a first_state, got an empty one")
        return state


class _StatesOnly:
    """What the forms of open world-model weights share: they begin where somebody tells them."""

    tells_success: ClassVar[bool] = False

    def start_question(self, task: Task, sheet: WorldSheet) -> Question | None:
        return None

    def read_start(self, text: str) -> str:
        raise _misfit("this form has no first state")


class AgentWorldFormat(_StatesOnly):
    """Qwen-AgentWorld (arXiv 2606.24597): turns of action and observation, the reply in a tag.

    `system` may hold the slots environment, world, facts, start and demonstrations, or be one of the prompts
    that its authors publish for their domains.
    """

    def __init__(self, *, environment: str, world: str, system: str | None = None) -> None:
        self._system = template("agentworld.md") if system is None else system
        self._environment = environment
        self._world = world

    def question(self, situation: Situation) -> Question:
        here = situation
        facts = here.sheet.facts[:_MOST_FACTS] if here.sheet is not None else ()
        shown = [
            f"**Action:**\n{past.action[:_LONGEST_ACTION]}\n{_MARK}\n{here.cut(past.outcome.next_state.text)}"
            for past in (each.transition for each in here.demonstrations)
        ]
        start = here.history[0].state.text if here.history else here.state
        system = fill(
            self._system,
            environment=self._environment,
            world=self._world,
            facts="\n".join(f"- {' '.join(fact)}" for fact in facts) or "(none)",
            start=here.cut(start),
            demonstrations="\n\n".join(shown) or "(none)",
        )
        turns = tuple(
            (_turn(number, past.action), f"{_MARK}\n{here.cut(past.outcome.next_state.text)}")
            for number, past in enumerate(here.history, 1)
        )
        return Question(system=system, turns=turns, prompt=_turn(len(turns) + 1, here.action))

    def read(self, text: str) -> Told:
        """The last closed block; plain text only where there is no tag at all, as its authors read it.

        >>> form = AgentWorldFormat(environment="shell", world="")
        >>> form.read("<think>a file</think><predicted_observation>a.txt</predicted_observation>").reasoning
        'a file'
        """
        thought, said = _thought_and_rest(text)
        blocks = _OBSERVATION.findall(said)
        if not blocks and "<predicted_observation>" in said.lower():
            raise _misfit("expected a closed <predicted_observation> block, got an open one")
        state = (blocks[-1] if blocks else said).strip().removeprefix(_MARK).strip()
        if not state:
            raise _misfit("expected an observation, got an empty one")
        before = said.partition("<predicted_observation>")[0].strip() if blocks else ""
        return Told(next_state=state, reasoning=thought or before)


class WebWorldFormat(_StatesOnly):
    """WebWorld (arXiv 2602.14721): an initial page, then actions as quoted calls, answered by whole pages.

    It takes no facts and no demonstrations.
    """

    def __init__(self, *, system: str | None = None) -> None:
        self._system = (template("webworld.md") if system is None else system).strip()

    def question(self, situation: Situation) -> Question:
        here = situation
        actions = [*(past.action for past in here.history), here.action]
        first = here.history[0].state.text if here.history else here.state
        asked = [
            f"Initial Page State:\n{first}\n\nFirst Action: '{actions[0]}'\n\nNext Page State:",
            *(
                "Continue the trajectory. Given the previous state, predict the next page state after this "
                f"action.\n\nAction: '{action}'\n\nNext Page State:"
                for action in actions[1:]
            ),
        ]
        answers = (past.outcome.next_state.text for past in here.history)
        return Question(
            system=self._system, turns=tuple(zip(asked[:-1], answers, strict=True)), prompt=asked[-1]
        )

    def read(self, text: str) -> Told:
        thought, said = _thought_and_rest(text)
        if not said.strip():
            raise _misfit("expected a page, got an empty one")
        return Told(next_state=said.strip(), reasoning=thought)


@cache
def template(name: str) -> str:
    """A prompt of ours, with its slots."""
    return files("dreamgym.experience").joinpath("prompts", *name.split("/")).read_text(encoding="utf-8")


def fill(text: str, **slots: str) -> str:
    """Fill slots in one pass: what fills one can open no other. A slot that nobody knows stays as it is."""
    return _SLOT.sub(lambda found: slots.get(found[1], found[0]), text)


def filled(name: str, **slots: str) -> str:
    return fill(template(name), **slots)


def world_prompt(environment: str) -> str:
    """What we know to say of an environment: its own file, else the one for agents with tools."""
    names = {path.name for path in files("dreamgym.experience").joinpath("prompts", "worlds").iterdir()}
    own = f"{environment}.md"
    return template(f"worlds/{own if own in names else 'tools.md'}").strip()


def told_facts(sheet: WorldSheet, action: str, actor: str | None) -> Sequence[Fact]:
    """The facts that an action touches, where there is an actor to tell by; else all, up to a limit."""
    facts = touched(sheet, action, actor=actor) if actor is not None else sheet.facts
    return facts[:_MOST_FACTS]


def _demonstrated(here: Situation, demonstration: Demonstration) -> str:
    past = demonstration.transition
    return (
        f"- in {_quoted(here.cut(past.state.text))} action {_quoted(past.action[:_LONGEST_ACTION])} led to "
        f"{_quoted(here.cut(past.outcome.next_state.text))}; {_end(past.outcome)}"
    )


def _end(outcome: Outcome) -> str:
    if outcome.success:
        return "the episode ended with success"
    return "the episode ended" if outcome.terminated else "the episode went on"


def _turn(number: int, action: str) -> str:
    return f"### Turn {number}\n**Action:**\n{action[:_LONGEST_ACTION]}"


def _quoted(text: str) -> str:
    """As a JSON string, so that no text can pass for a part of the question."""
    return json.dumps(text, ensure_ascii=False)


def _thought_and_rest(text: str) -> tuple[str, str]:
    """What a reasoning model wrote before its answer, and the answer.

    >>> _thought_and_rest("<think>hm</think> yes")
    ('hm', ' yes')
    """
    if len(text) > _LONGEST:
        raise _misfit(f"expected at most {_LONGEST} characters, got {len(text)}")
    found = _THOUGHT.match(text)
    if found is None:
        if text.lstrip().startswith("<think>"):
            raise _misfit("expected an answer after the thought, got a thought without end")
        return "", text
    return found["thought"].strip(), text[found.end() :]


def parsed(form: type[_M], text: str) -> _M:
    """The JSON object in a reply, after a thought and within a fence, if there are any.

    Raises:
        EpisodeFailedError: `PARSE_ERROR`, with what was expected and what is wrong.
    """
    _, said = _thought_and_rest(text)
    try:
        return form.model_validate_json(extract_json(said))
    except ValidationError as error:
        problems = error.errors(include_url=False, include_context=False, include_input=False)[:5]
        told = "; ".join(f"{'.'.join(map(str, p['loc'])) or 'reply'}: {p['msg']}" for p in problems)
    except UnicodeError:
        told = "characters that are none"
    fields = ", ".join(form.model_fields)
    raise _misfit(f"expected one JSON object with {fields}; {told}")


def _facts(listed: Sequence[Sequence[str]]) -> tuple[Fact, ...]:
    return tuple(tuple(fact) for fact in listed)


def _misfit(problem: str) -> EpisodeFailedError:
    return EpisodeFailedError(FailureKind.PARSE_ERROR, problem)
