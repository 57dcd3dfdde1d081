"""The nouns of DreamGym: what flows between the real world, the dream and the learner.

Every value is a frozen, slotted, keyword-only dataclass, so it can be shared between episodes without a
copy. Text from outside is validated where it enters (`replay.offline`, `config`, a model's reply parser);
inside the house these types are trusted.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Literal, TypeAlias

JsonValue: TypeAlias = bool | int | float | str | list["JsonValue"] | dict[str, "JsonValue"] | None

Fact: TypeAlias = tuple[str, ...]
"""A predicate and its arguments, e.g. ``("in", "apple 1", "fridge 1")``."""

Source: TypeAlias = Literal["real", "synthetic"]


class FailureKind(StrEnum):
    """Why an episode could not be finished. A failure is data: it is counted, never trained on."""

    TIMEOUT = "timeout"
    CRASHED = "crashed"
    INVALID_TASK = "invalid_task"
    PARSE_ERROR = "parse_error"
    CONTRADICTION = "contradiction"
    RATE_LIMITED = "rate_limited"
    SERVER_DOWN = "server_down"
    REFUSED = "refused"
    BUDGET = "budget"


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
    """Every action that would do something here, or None where the environment cannot tell."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorldSheet:
    """The hidden facts of one episode, fixed at its start: what is where, and in which condition.

    >>> WorldSheet(facts=(("in", "apple 1", "fridge 1"), ("closed", "fridge 1"))).about("fridge 1")
    (('in', 'apple 1', 'fridge 1'), ('closed', 'fridge 1'))
    """

    facts: tuple[Fact, ...]

    def about(self, name: str) -> tuple[Fact, ...]:
        return tuple(fact for fact in self.facts if name in fact[1:])


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """What an action alters in the world: the facts that end with it and those that begin."""

    ended: tuple[Fact, ...] = ()
    begun: tuple[Fact, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Note:
    """A teacher's explanation of one transition."""

    reasoning: str
    change: Change = Change()


@dataclass(frozen=True, slots=True, kw_only=True)
class Annotation:
    """A teacher's explanation of a whole trajectory: the paper's tutorial, and one note per transition."""

    plan: str
    success_mode: str
    failure_mode: str
    notes: tuple[Note, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What an action led to."""

    next_state: State
    reward: float
    terminated: bool
    """The episode ended by the environment's own rules: nothing follows, PPO bootstraps from zero."""
    truncated: bool = False
    """The episode was cut off by a limit of ours: more would have followed, PPO bootstraps from the value."""
    success: bool = False
    reasoning: str | None = None
    """The experience model's explanation; None for a real environment."""
    confidence: float | None = None
    reward_source: str = "environment"
    """Who gave the reward: ``environment``, ``model``, ``judge`` or ``sheet``."""

    @property
    def over(self) -> bool:
        return self.terminated or self.truncated


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What an action earned, and who says so."""

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
    """What the agent wrote before its action, where it thinks aloud."""
    completion: Completion | None = None
    """The exact tokens that the policy chose the action with: what a learner trains on. Never stored."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Provenance:
    """Where experience comes from, so that real and synthetic never mix unseen."""

    source: Source
    policy: str
    policy_version: int = 0
    """How many updates the policy had seen when it acted."""
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

    @property
    def success(self) -> bool:
        return any(transition.outcome.success for transition in self.transitions)

    @property
    def total_reward(self) -> float:
        return sum(transition.outcome.reward for transition in self.transitions)

    def __len__(self) -> int:
        return len(self.transitions)


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutFailure:
    """An episode that was retried and still failed."""

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
    """One question to a language model."""

    prompt: str
    prompt_token_ids: tuple[int, ...] | None = None
    """If given, exactly these tokens are the prompt of a local model, whatever `prompt` says."""
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
    """Instructions above the prompt: a chat's system message; elsewhere put before the prompt."""
    turns: tuple[tuple[str, str], ...] = ()
    """Earlier questions and answers of the same chat, oldest first; elsewhere put before the prompt."""
    schema: Mapping[str, JsonValue] | None = None
    """A JSON schema that the reply shall have. A wish: servers that cannot hold a reply to it ignore it, so
    whoever asks still parses strictly."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """A language model's answer, with the exact tokens it sampled."""

    text: str
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    prompt_token_ids: tuple[int, ...] = ()
    allowed: tuple[tuple[int, ...], ...] = ()
    """Where only certain choices were allowed: the tokens among which each one was drawn."""
    finish_reason: Literal["stop", "length", "choice"] = "stop"


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """What a policy chose to do, and the tokens it chose it with."""

    action: str
    thought: str | None = None
    completion: Completion | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RetrievalFilter:
    """Which experience may be shown. Applied before the k nearest are chosen, never after."""

    environment: str
    source: Source | None = None
    max_synthetic: int | None = None
    """At most this many of the k may be synthetic; real ones fill the rest."""
    exclude_trajectory: str | None = None
    exclude_task: str | None = None
    min_reward: float | None = None
    """Smallest total reward of the trajectory a transition belongs to."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Demonstration:
    """A past transition that resembles the present one."""

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
    """What an experience model answers: the outcome, and the world sheet as it is afterwards."""

    outcome: Outcome
    sheet: WorldSheet
    demonstrations: tuple[Demonstration, ...] = ()
    """What it was shown for this answer, most similar first."""
    refused: bool = False
    """The action was answered in the words by which the environment says no."""


def transition_id(trajectory_id: str, position: int) -> str:
    """The client-made id that makes storing a transition twice harmless.

    >>> transition_id("alfworld-7", 3)
    'alfworld-7:3'
    """
    return f"{trajectory_id}:{position}"


def history(trajectory: Trajectory) -> Iterator[tuple[tuple[Transition, ...], Transition]]:
    """Each transition of an episode with the transitions before it."""
    for position, transition in enumerate(trajectory.transitions):
        yield trajectory.transitions[:position], transition
