"""Language-model policies: how an episode is rendered as a prompt, and how a reply becomes an action.

The same text serves rollouts, supervised examples and tests. An episode is one growing text:

    task: put a mug in the safe.
    state: You are in the middle of a room. You see a desk 1, a safe 1.
    action: go to desk 1
    state: On the desk 1, you see a mug 1.
    action:

The model completes the last line. Each prompt starts with the previous prompt and reply, so a local model
reuses its KV cache and a learner packs an episode into one sequence.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Protocol

from dreamgym.config import AgentConfig
from dreamgym.protocols import Environment, LanguageModel
from dreamgym.rollouts import PolicyFactory
from dreamgym.seeding import derive_seed
from dreamgym.structured import one_line
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

MAX_ACTION_LENGTH = 500
"""Characters of an action; longer ones are cut, so that a model that does not stop cannot fill the memory."""
_THOUGHT = re.compile(r"\A(?P<thought>.*?)\baction:(?P<action>.*)\Z")


class LanguageModelPolicy:
    """The policy of one episode: a language model that completes the text above. Implements `Policy`."""

    def __init__(
        self,
        model: LanguageModel,
        config: AgentConfig,
        *,
        conversation: str | None = None,
        seed: int = 0,
        name: str = "agent",
    ) -> None:
        """`conversation` is the key of the episode's KV cache in a local model."""
        self.name = name
        self._model = model
        self._config = config
        self._conversation = conversation
        self._seed = seed

    async def act(self, task: Task, history: Sequence[Transition], state: State) -> Decision:
        config = self._config
        choices = tuple(f" {one_line(action)}" for action in state.admissible_actions or ())
        completion = await self._model.complete(
            CompletionRequest(
                prompt=render_prompt(task, history, state, config),
                conversation=self._conversation,
                max_tokens=config.max_tokens,
                temperature=config.temperature,
                stop=("\n",),
                choices=choices if config.enforce_actions and choices else None,
                seed=derive_seed(self._seed, len(history)),
            )
        )
        return parse_reply(completion, thought=config.thought)


def policy_factory(model: LanguageModel, config: AgentConfig, name: str) -> PolicyFactory:
    """Makes the policy of each episode."""

    def make_policy(environment: Environment, conversation: str, seed: int) -> LanguageModelPolicy:
        return LanguageModelPolicy(model, config, conversation=conversation, seed=seed, name=name)

    return make_policy


def render_prompt(task: Task, history: Sequence[Transition], state: State, config: AgentConfig) -> str:
    lead = "thought:" if config.thought else "action:"
    lines = [f"task: {one_line(task.instruction)}"]
    first = history_start(len(history), config.history)
    if first:
        lines += _state_lines(history[0].state, config, current=False)
        lines.append("...")
    for past in history[first:]:
        lines += _state_lines(past.state, config, current=False)
        lines.append(lead + render_reply(past, thought=config.thought))
    lines += _state_lines(state, config, current=True)
    return "\n".join([*lines, lead])


def render_reply(transition: Transition, *, thought: bool = False) -> str:
    """The reply of this turn: as sampled where that is known, else rendered from the action.

    >>> from dreamgym.types import Outcome
    >>> outcome = Outcome(next_state=State(text=""), reward=0.0, terminated=False)
    >>> turn = Transition(state=State(text=""), action="look", outcome=outcome, thought="I am lost.")
    >>> render_reply(turn), render_reply(turn, thought=True)
    (' look', ' I am lost. action: look')
    """
    if transition.completion is not None:
        return transition.completion.text.split("\n", 1)[0]
    action = f" {one_line(transition.action)}"
    return f" {one_line(transition.thought or '')} action:{action}" if thought else action


def parse_reply(completion: Completion, *, thought: bool = False) -> Decision:
    """The decision in a reply. A reply without an action is passed on unchanged: the environment refuses it,
    and the policy learns from that.

    >>> parse_reply(Completion(text=" It must be here. action: open safe 1"), thought=True).action
    'open safe 1'
    >>> parse_reply(Completion(text=" It must be here."), thought=True).action
    'It must be here.'
    """
    line = completion.text.split("\n", 1)[0].strip()
    found = _THOUGHT.match(line) if thought else None
    if found is None:
        return Decision(action=line[:MAX_ACTION_LENGTH], completion=completion)
    action = found["action"].strip()[:MAX_ACTION_LENGTH]
    return Decision(action=action, thought=found["thought"].strip(), completion=completion)


def history_start(length: int, limit: int) -> int:
    """Index of the first transition in the prompt. It advances by half a window at a time, so that most
    prompts extend the previous one.

    >>> [history_start(length, 4) for length in range(9)], history_start(9, 0)
    ([0, 0, 0, 0, 0, 2, 2, 4, 4], 0)

    Args:
        limit: the most transitions in a prompt; 0 for all.
    """
    if not limit or length <= limit:
        return 0
    step = max(1, limit // 2)
    return -(-(length - limit) // step) * step


def _state_lines(state: State, config: AgentConfig, *, current: bool) -> Iterator[str]:
    yield f"state: {one_line(state.text)[: config.text_limit]}"
    shown = config.show_actions == "always" or (config.show_actions == "now" and current)
    if shown and state.admissible_actions is not None:
        yield f"actions: {'; '.join(one_line(action) for action in state.admissible_actions)}"


class Codec(Protocol):
    """Text to tokens, as the model's own engine does it (`models.local.tokens.TextCodec`)."""

    def start(self, text: str) -> list[int]: ...

    def more(self, text: str) -> list[int]: ...


def prompt_reply_pairs(trajectory: Trajectory, config: AgentConfig) -> Iterator[tuple[str, str]]:
    """(prompt, reply) of every turn."""
    for past, transition in history(trajectory):
        yield (
            render_prompt(trajectory.task, past, transition.state, config),
            render_reply(transition, thought=config.thought),
        )


def tokenize(trajectory: Trajectory, config: AgentConfig, codec: Codec, end_token: int) -> Trajectory:
    """The trajectory with the tokens that this policy would have read and sampled in every turn."""
    turns: list[Transition] = []
    text = _GrowingText(codec)
    for transition, (prompt, reply) in zip(
        trajectory.transitions, prompt_reply_pairs(trajectory, config), strict=True
    ):
        before = text.tokens_of(prompt)
        tokens = codec.more(reply)
        text.set(prompt + reply, [*before, *tokens])
        completion = Completion(text=reply, token_ids=(*tokens, end_token), prompt_token_ids=tuple(before))
        turns.append(replace(transition, completion=completion))
    return replace(trajectory, transitions=tuple(turns))


def next_prompt_tokens(trajectory: Trajectory, config: AgentConfig, codec: Codec) -> tuple[int, ...]:
    """Tokens of the prompt after the last turn: where a truncated episode stopped."""
    *before, last = trajectory.transitions
    text = _GrowingText(codec)
    if last.completion is not None:
        prompt, reply = render_prompt(trajectory.task, before, last.state, config), render_reply(last)
        text.set(prompt + reply, [*last.completion.prompt_token_ids, *codec.more(reply)])
    state = last.outcome.next_state
    return tuple(text.tokens_of(render_prompt(trajectory.task, trajectory.transitions, state, config)))


class _GrowingText:
    """A text and its tokens; an extension of the text keeps the tokens of what it extends."""

    def __init__(self, codec: Codec) -> None:
        self._codec = codec
        self._text = ""
        self._tokens: list[int] = []

    def set(self, text: str, tokens: list[int]) -> None:
        self._text, self._tokens = text, tokens

    def tokens_of(self, text: str) -> list[int]:
        if self._text and text.startswith(self._text):
            return [*self._tokens, *self._codec.more(text[len(self._text) :])]
        return self._codec.start(text)
