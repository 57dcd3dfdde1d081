"""The roles: what each stage expects of the others, and nothing more.

Stages never import one another; they meet here. If it waits, it is async; if it computes, it is pure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from dreamgym.types import (
    Annotation,
    Completion,
    CompletionRequest,
    Decision,
    Demonstration,
    JsonValue,
    Outcome,
    Prediction,
    RetrievalFilter,
    RolloutGroup,
    State,
    Task,
    Trajectory,
    Transition,
    Verdict,
    WorldSheet,
)

Keys = npt.NDArray[np.float32]
"""Unit vectors, one row per (state, action): `(n, dimension)`."""


class LanguageModel(Protocol):
    """The one road to every language model, local or remote."""

    async def complete(self, request: CompletionRequest) -> Completion: ...


@runtime_checkable
class Environment(Protocol):
    """One episode, used once: `start`, then `step` until the outcome is over, then `aclose`.

    `step` accepts any string. An action that makes no sense is answered in the environment's own words with
    reward 0; it never raises. `EpisodeFailedError` means that the environment itself broke;
    `EpisodeOverError` that the caller stepped outside the episode. `aclose` may be called at any time, twice.
    """

    @property
    def task(self) -> Task: ...

    async def start(self) -> State: ...

    async def step(self, action: str) -> Outcome: ...

    async def aclose(self) -> None: ...


@runtime_checkable
class RevealingEnvironment(Environment, Protocol):
    """A real environment that can tell what an agent cannot see."""

    async def world_sheet(self) -> WorldSheet:
        """The hidden facts as they were at `start`; ask any time after it."""
        ...

    @property
    def experts(self) -> tuple[str, ...]:
        """Names of the experts it has, the default one first."""
        ...

    async def expert_action(self, expert: str | None = None) -> str:
        """What the named expert (None: the default one) would do in the present state."""
        ...


class EnvironmentFactory(Protocol):
    """Makes the episodes of one environment: all that differs between dream, sim-to-real and evaluation."""

    @property
    def name(self) -> str: ...

    @property
    def splits(self) -> tuple[str, ...]: ...

    async def tasks(self, split: str, count: int | None = None, *, seed: int = 0) -> Sequence[Task]:
        """The first `count` tasks of a split in the order that `seed` gives; None for all there are.

        Raises:
            ConfigError: the split is unknown, or holds fewer than `count` tasks.
        """
        ...

    def make(self, task: Task, *, seed: int = 0) -> Environment: ...

    async def aclose(self) -> None: ...


class Policy(Protocol):
    """Chooses actions. `history` holds the transitions of this episode so far, oldest first."""

    @property
    def name(self) -> str: ...

    async def act(self, task: Task, history: Sequence[Transition], state: State) -> Decision: ...


class Embedder(Protocol):
    """Turns (state, action) into a key (the paper's φ)."""

    @property
    def identity(self) -> str:
        """Name, version and settings; two embedders with one identity give equal keys."""
        ...

    @property
    def dimension(self) -> int: ...

    async def embed(self, pairs: Sequence[tuple[str, str]]) -> Keys:
        """Keys of (state text, action) pairs, in order."""
        ...


class Retriever(Protocol):
    """Finds the demonstrations for a batch of keys."""

    async def nearest(
        self, keys: Keys, *, k: int, filters: Sequence[RetrievalFilter]
    ) -> list[list[Demonstration]]:
        """One list per key, most similar first, at most `k` long; `filters` has one entry per key."""
        ...


class ExperienceModel(Protocol):
    """Plays the environment by reasoning (the paper's M_exp).

    `sheet` holds the facts as they are before the action; the prediction carries them as they are after it.
    The same arguments always give the same prediction, so that group members differ by their actions alone.
    """

    @property
    def name(self) -> str: ...

    async def imagine_start(self, task: Task, sheet: WorldSheet) -> State: ...

    async def predict(
        self, task: Task, sheet: WorldSheet, history: Sequence[Transition], state: State, action: str
    ) -> Prediction: ...


class Rewarder(Protocol):
    """Says what an action earned. Frozen: the loop that trains the policy never trains its grader."""

    async def verdict(
        self, task: Task, sheet: WorldSheet, transition: Transition, *, claimed: bool
    ) -> Verdict:
        """`sheet` is the one after the action; `claimed` is the experience model's own word on success."""
        ...


class Teacher(Protocol):
    """Explains recorded transitions, for the experience model to learn from. It alone sees how they ended."""

    @property
    def name(self) -> str: ...

    async def annotate(self, trajectory: Trajectory) -> Annotation: ...


class TaskGenerator(Protocol):
    """Writes variations of tasks (the paper's M_task)."""

    async def vary(self, tasks: Sequence[Task], *, count: int, seed: int) -> list[Task]: ...


class TaskSource(Protocol):
    """Says which tasks come next, and hears what came of them: a fixed list, or a curriculum.

    What it answers depends on its settings and on what it has heard alone, so that a source restored from its
    `state_dict` goes on as if it had never stopped.
    """

    async def sample(self, count: int) -> Sequence[Task]:
        """Tasks of the next step; the same one may come twice. Asked again without `record`, the same."""
        ...

    async def record(self, groups: Sequence[RolloutGroup]) -> Mapping[str, JsonValue]:
        """Hear what came of them; returns what is worth a line in the metrics."""
        ...

    def state_dict(self) -> dict[str, JsonValue]: ...

    def load_state_dict(self, stored: Mapping[str, JsonValue]) -> None: ...


class Learner(Protocol):
    """Turns rollout groups into one update of the policy; returns its metrics."""

    def update(self, groups: Sequence[RolloutGroup]) -> dict[str, Any]: ...
