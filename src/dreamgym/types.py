"""The nouns of DreamGym: the values that environments, models and learners exchange.

Every value is a frozen, slotted, keyword-only dataclass, so episodes can share it without a copy. Input from
outside is validated where it enters (`data.schema`, `config`, a model's reply parser); code that receives one
of these types does not validate it again.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Final, Literal, TypeAlias

JsonValue: TypeAlias = bool | int | float | str | list["JsonValue"] | dict[str, "JsonValue"] | None

Fact: TypeAlias = tuple[str, ...]
"""A predicate and its arguments, e.g. ``("in", "apple 1", "fridge 1")``."""

Source: TypeAlias = Literal["real", "synthetic"]


class FailureKind(StrEnum):
    """Why an episode could not be finished. Failures are counted and never trained on."""

    TIMEOUT = "timeout"
    CRASHED = "crashed"
    INVALID_TASK = "invalid_task"
    PARSE_ERROR = "parse_error"
    CONTRADICTION = "contradiction"
    RATE_LIMITED = "rate_limited"
    SERVER_DOWN = "server_down"
    REFUSED = "refused"
    BUDGET = "budget"


UNKNOWN_REWARD: Final = "unknown"
"""`Outcome.reward_source` of a record that does not say how its episode ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """An instruction to carry out in one environment (the paper's τ)."""

    id: str
    """Unique within its environment; the same id always names the same episode start."""
    instruction: str
    environment: str
    split: str = "train"
    family: str = ""
    """The kind of task, e.g. ``pick_heat_then_place_in_recep``; results are also reported per family."""
    origin: Literal["seed", "generated"] = "seed"
    parameters: Mapping[str, JsonValue] = field(default_factory=dict)
    """What the environment needs to rebuild this task (a game file, a room, a seed)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """What the agent sees."""

    text: str
    admissible_actions: tuple[str, ...] | None = None
    """Every action that has an effect here; None where the environment does not list them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorldSheet:
    """The hidden facts of one episode, fixed at its start: where each object is, and its condition."""

    facts: tuple[Fact, ...]

    def after(self, change: Change) -> WorldSheet:
        """The sheet after a change. Facts that begin are appended; ending an absent fact does nothing.

        >>> before = WorldSheet(facts=(("in", "mug 1", "desk 1"),))
        >>> change = Change(ended=(("in", "mug 1", "desk 1"),), begun=(("holds", "agent", "mug 1"),))
        >>> before.after(change).facts
        (('holds', 'agent', 'mug 1'),)
        """
        removed = {*change.ended, *change.begun}
        return WorldSheet(facts=(*(fact for fact in self.facts if fact not in removed), *change.begun))


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """The facts that stop being true with an action (`ended`), and those that become true (`begun`)."""

    ended: tuple[Fact, ...] = ()
    begun: tuple[Fact, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Note:
    """An annotator's explanation of one transition."""

    reasoning: str
    change: Change = Change()


@dataclass(frozen=True, slots=True, kw_only=True)
class Annotation:
    """An annotator's explanation of a whole trajectory: the paper's tutorial, and one note per transition."""

    plan: str
    success_mode: str
    failure_mode: str
    notes: tuple[Note, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The result of one action.

    >>> Outcome(next_state=State(text="The fridge is open."), reward=0.0, terminated=False).over
    False
    """

    next_state: State
    reward: float
    terminated: bool
    """The episode ended by the environment's own rules: PPO bootstraps from zero."""
    truncated: bool = False
    """The episode was cut off by a limit of the caller's: PPO bootstraps from the value."""
    success: bool = False
    reasoning: str | None = None
    """The experience model's explanation; None for a real environment."""
    confidence: float | None = None
    reward_source: str = "environment"
    """The grader: ``environment``, ``model``, ``judge``, ``sheet``, or ``unknown`` for an ingested record
    that does not say how its episode ended."""
    info: Mapping[str, Any] = field(default_factory=dict, compare=False, repr=False)
    """Diagnostics, as in Gymnasium; never an input of a policy or a learner, and not stored in a buffer.
    A synthetic environment adds ``demonstrations``, ``change``, ``refused`` and ``sheet`` (the facts before
    the action)."""

    @property
    def over(self) -> bool:
        return self.terminated or self.truncated

    @property
    def graded(self) -> bool:
        """Whether reward and success are known."""
        return self.reward_source != UNKNOWN_REWARD


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """A grader's reward for one action, and the name of the grader."""

    reward: float
    success: bool
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Transition:
    """One turn: state, action, outcome."""

    state: State
    action: str
    outcome: Outcome
    thought: str | None = None
    """The agent's reasoning before the action, if it writes any."""
    completion: Completion | None = None
    """The sampled tokens behind the action, which a learner trains on. Not written to trajectory files."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Provenance:
    """Where experience comes from, so that real and synthetic rows stay distinguishable."""

    source: Source
    policy: str
    policy_version: int = 0
    """Number of updates the policy had received."""
    experience_model: str | None = None
    recorded_at: float = 0.0
    """Seconds since the epoch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trajectory:
    """The record of one episode."""

    id: str
    task: Task
    start: State
    transitions: tuple[Transition, ...]
    provenance: Provenance
    seed: int = 0
    sheet: WorldSheet | None = None
    given: int = 0
    """Turns at the beginning that the policy did not choose: the episode began after them (`chosen`)."""

    @property
    def chosen(self) -> tuple[Transition, ...]:
        """The turns of the policy, which a learner trains on."""
        return self.transitions[self.given :]

    @property
    def success(self) -> bool:
        return any(transition.outcome.success for transition in self.transitions)

    @property
    def graded(self) -> bool:
        """Whether it is known to be a success or a failure."""
        return all(transition.outcome.graded for transition in self.transitions)

    @property
    def total_reward(self) -> float:
        return sum(transition.outcome.reward for transition in self.transitions)

    def __len__(self) -> int:
        return len(self.transitions)


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutFailure:
    """An episode that failed in every attempt."""

    task: Task
    kind: FailureKind
    message: str
    attempts: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutGroup:
    """n rollouts of one task, the unit of GRPO and of reward entropy."""

    task: Task
    trajectories: tuple[Trajectory, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionRequest:
    """One request to a language model."""

    prompt: str
    prompt_token_ids: tuple[int, ...] | None = None
    """If given, a local model uses exactly these tokens and ignores `prompt`."""
    conversation: str | None = None
    """Requests of one growing conversation share this key, so that a local model reuses its KV cache."""
    max_tokens: int = 256
    temperature: float = 0.0
    top_p: float = 1.0
    stop: tuple[str, ...] = ()
    choices: tuple[str, ...] | None = None
    """If given, the completion is exactly one of these strings."""
    seed: int = 0
    system: str = ""
    """The system message of a chat; models without chat get it in front of the prompt."""
    turns: tuple[tuple[str, str], ...] = ()
    """Earlier (user, assistant) messages, oldest first; models without chat get them before the prompt."""
    schema: Mapping[str, JsonValue] | None = None
    """A JSON schema for the reply. Servers without constrained decoding ignore it, so the caller still has to
    validate the reply."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """A language model's reply, with the exact tokens it sampled."""

    text: str
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    prompt_token_ids: tuple[int, ...] = ()
    allowed: tuple[tuple[int, ...], ...] = ()
    """With constrained decoding: for each sampled token, the tokens that were allowed."""
    finish_reason: Literal["stop", "length", "choice"] = "stop"


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """A policy's action, with the reasoning and the tokens behind it."""

    action: str
    thought: str | None = None
    completion: Completion | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RetrievalFilter:
    """Which transitions a search may return. Filters apply before the k nearest are chosen."""

    environment: str
    source: Source | None = None
    max_synthetic: int | None = None
    """At most this many of the k are synthetic; real ones fill the rest."""
    exclude_trajectory: str | None = None
    exclude_task: str | None = None
    min_reward: float | None = None
    """Smallest total reward of the trajectory a transition belongs to; an unknown reward is below any."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Demonstration:
    """A past transition, retrieved as an example for the current one."""

    transition: Transition
    similarity: float
    """Cosine of the two keys, at most 1."""
    transition_id: str
    trajectory_id: str
    task_id: str
    position: int
    provenance: Provenance


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """An experience model's answer: the outcome, and the world sheet after the action."""

    outcome: Outcome
    sheet: WorldSheet
    demonstrations: tuple[Demonstration, ...] = ()
    """The demonstrations in its prompt, most similar first."""
    refused: bool = False
    """The next state is one of the environment's refusal texts: nothing has changed."""


def transition_id(trajectory_id: str, position: int) -> str:
    """The id of a stored transition; a second write with the same id is ignored.

    >>> transition_id("alfworld-7", 3)
    'alfworld-7:3'
    """
    return f"{trajectory_id}:{position}"


def history(trajectory: Trajectory) -> Iterator[tuple[tuple[Transition, ...], Transition]]:
    """Each transition of an episode with the transitions before it."""
    for position, transition in enumerate(trajectory.transitions):
        yield trajectory.transitions[:position], transition
