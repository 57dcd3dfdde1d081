"""The agent: a language model that reads an episode so far and writes its next action.

One form serves rollouts, supervised examples and tests. An episode is a growing text, one line each:

    task: put a mug in the safe.
    state: You are in the middle of a room. You see a desk 1, a safe 1.
    action: go to desk 1
    state: On the desk 1, you see a mug 1.
    action:

What the agent writes ends the last line. So each turn's prompt begins with the whole turn before it: a local
model reads only what is new, and a learner computes an episode once and not once per turn.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Protocol

from dreamgym.config import AgentConfig
from dreamgym.protocols import LanguageModel
from dreamgym.types import (
    Completion,
    CompletionRequest,
    Decision,
    State,
    Task,
    Trajectory,
    Transition,
    history,
)

LONGEST_ACTION = 500
"""Characters of an action; a model that does not stop must not fill the world's memory."""
_THOUGHT = re.compile(r"\A(?P<thought>.*?)\baction:(?P<action>.*)\Z")


class Agent:
    """The policy of one episode."""

    def __init__(
        self,
        model: LanguageModel,
        *,
        settings: AgentConfig,
        conversation: str | None = None,
        seed: int = 0,
        name: str = "agent",
    ) -> None:
        """`conversation` names the episode to the model, which may then keep what it has read of it."""
        self.name = name
        self._model = model
        self._settings = settings
        self._conversation = conversation
        self._seed = seed

    async def act(self, task: Task, history: Sequence[Transition], state: State) -> Decision:
        settings = self._settings
        choices = tuple(f" {one_line(action)}" for action in state.admissible_actions or ())
        completion = await self._model.complete(
            CompletionRequest(
                prompt=prompt(task, history, state, settings=settings),
                conversation=self._conversation,
                max_tokens=settings.max_tokens,
                temperature=settings.temperature,
                stop=("\n",),
                choices=choices if settings.enforce_actions and choices else None,
                seed=self._seed + 1_000_003 * len(history),
            )
        )
        return read(completion, thought=settings.thought)


def prompt(task: Task, history: Sequence[Transition], state: State, *, settings: AgentConfig) -> str:
    """What the agent is asked."""
    lead = "thought:" if settings.thought else "action:"
    lines = [f"task: {one_line(task.instruction)}"]
    first = window(len(history), settings.history)
    if first:
        lines += _state_lines(history[0].state, settings, now=False)
        lines.append("...")
    for past in history[first:]:
        lines += _state_lines(past.state, settings, now=False)
        lines.append(lead + reply(past, thought=settings.thought))
    lines += _state_lines(state, settings, now=True)
    return "\n".join([*lines, lead])


def reply(transition: Transition, *, thought: bool = False) -> str:
    """What the agent wrote in this turn or, where that is not known, would have written.

    >>> from dreamgym.types import Outcome
    >>> outcome = Outcome(next_state=State(text=""), reward=0.0, terminated=False)
    >>> turn = Transition(state=State(text=""), action="look", outcome=outcome, thought="I am lost.")
    >>> reply(turn), reply(turn, thought=True)
    (' look', ' I am lost. action: look')
    """
    if transition.completion is not None:
        return transition.completion.text.split("\n", 1)[0]
    action = f" {one_line(transition.action)}"
    return f" {one_line(transition.thought or '')} action:{action}" if thought else action


def read(completion: Completion, *, thought: bool = False) -> Decision:
    """The decision in a reply. One without an action is passed on as it is: the environment says no to it,
    and that is what the policy learns from.

    >>> read(Completion(text=" It must be here. action: open safe 1"), thought=True).action
    'open safe 1'
    >>> read(Completion(text=" It must be here."), thought=True).action
    'It must be here.'
    """
    line = completion.text.split("\n", 1)[0].strip()
    found = _THOUGHT.match(line) if thought else None
    if found is None:
        return Decision(action=line[:LONGEST_ACTION], completion=completion)
    action = found["action"].strip()[:LONGEST_ACTION]
    return Decision(action=action, thought=found["thought"].strip(), completion=completion)


def window(length: int, most: int) -> int:
    """Index of the first transition in the prompt; `most` = 0 for no limit.

    It moves by half a window at a time, so that between moves each prompt extends the one before.

    >>> [window(length, 4) for length in range(9)]
    [0, 0, 0, 0, 0, 2, 2, 4, 4]
    """
    if not most or length <= most:
        return 0
    step = max(1, most // 2)
    return -(-(length - most) // step) * step


def one_line(text: str) -> str:
    """Line breaks become spaces: whatever an environment says, it cannot speak for the agent."""
    return " ".join(text.split("\n")).replace("\r", " ").strip()


def _state_lines(state: State, settings: AgentConfig, *, now: bool) -> Iterator[str]:
    yield f"state: {one_line(state.text)[: settings.text_limit]}"
    shown = settings.show_actions == "always" or (settings.show_actions == "now" and now)
    if shown and state.admissible_actions is not None:
        yield f"actions: {'; '.join(one_line(action) for action in state.admissible_actions)}"


class Codec(Protocol):
    """Between text and tokens, as the model's own engine does it (`models.text.TextCodec`)."""

    def start(self, text: str) -> list[int]: ...

    def more(self, text: str) -> list[int]: ...


def examples(trajectory: Trajectory, settings: AgentConfig) -> Iterator[tuple[str, str]]:
    """(prompt, reply) of every turn, as this agent would have been asked and should have answered."""
    for past, transition in history(trajectory):
        yield (
            prompt(trajectory.task, past, transition.state, settings=settings),
            reply(transition, thought=settings.thought),
        )


def tokenised(trajectory: Trajectory, settings: AgentConfig, codec: Codec, end: int) -> Trajectory:
    """The trajectory as if this agent had played it: every turn with the tokens of its prompt and reply.

    Args:
        end: the token that closes a reply.
    """
    turns: list[Transition] = []
    written = _Written(codec)
    for transition, (asked, answer) in zip(
        trajectory.transitions, examples(trajectory, settings), strict=True
    ):
        before = written.tokens_of(asked)
        tokens = codec.more(answer)
        written.add(asked + answer, [*before, *tokens])
        completion = Completion(text=answer, token_ids=(*tokens, end), prompt_token_ids=tuple(before))
        turns.append(replace(transition, completion=completion))
    return replace(trajectory, transitions=tuple(turns))


def tokens_after(trajectory: Trajectory, settings: AgentConfig, codec: Codec) -> tuple[int, ...]:
    """The prompt of the turn that would have come next, in tokens: where a truncated episode was left."""
    *before, last = trajectory.transitions
    written = _Written(codec)
    if last.completion is not None:
        asked = prompt(trajectory.task, before, last.state, settings=settings)
        answer = codec.more(reply(last))
        written.add(asked + reply(last), [*last.completion.prompt_token_ids, *answer])
    state = last.outcome.next_state
    return tuple(written.tokens_of(prompt(trajectory.task, trajectory.transitions, state, settings=settings)))


class _Written:
    """A growing text and its tokens."""

    def __init__(self, codec: Codec) -> None:
        self._codec = codec
        self._text = ""
        self._tokens: list[int] = []

    def add(self, text: str, tokens: list[int]) -> None:
        self._text, self._tokens = text, tokens

    def tokens_of(self, text: str) -> list[int]:
        if self._text and text.startswith(self._text):
            return [*self._tokens, *self._codec.more(text[len(self._text) :])]
        return self._codec.start(text)
