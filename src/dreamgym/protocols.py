"""The roles: the interfaces between stages, which never import one another.

Any object with these methods fits; no base class is needed. What waits for something is async.
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
    """A language model, local or behind an endpoint.

    Example::

        class Echo:
            async def complete(self, request: CompletionRequest) -> Completion:
                return Completion(text=request.prompt)
    """

    async def complete(self, request: CompletionRequest) -> Completion: ...


@runtime_checkable
class Environment(Protocol):
    """One episode, used once: `start`, then `step` until the outcome is over, then `aclose`.

    `step` accepts any string. An invalid action is answered in the environment's own words with reward 0; it
    never raises. `EpisodeFailedError` means that the environment broke; `EpisodeOverError` that the caller
    stepped outside the episode. `aclose` may be called at any time, also twice.

    Example::

        environment = factory.make(task, seed=0)
        state, over = await environment.start(), False
        while not over:
            outcome = await environment.step(choose(state))
            state, over = outcome.next_state, outcome.over
        await environment.aclose()

    `dreamgym.testing.check_environment` tests an implementation against this contract.
    """

    @property
    def task(self) -> Task: ...

    async def start(self) -> State: ...

    async def step(self, action: str) -> Outcome: ...

    async def aclose(self) -> None: ...


@runtime_checkable
class HasWorldSheet(Protocol):
    """Optional role of an environment: it discloses the hidden facts of its episode.

    Trajectories then record the sheet, and an experience model is fine-tuned with the facts that an action
    touches.

    Example::

        async def world_sheet(self) -> WorldSheet:
            return WorldSheet(facts=(("in", "apple 1", "fridge 1"), ("closed", "fridge 1")))
    """

    async def world_sheet(self) -> WorldSheet:
        """The hidden facts at `start`; available at any time after it."""
        ...


@runtime_checkable
class HasExpert(Protocol):
    """Optional role of an environment: it has at least one scripted expert, to collect good episodes with.

    Example::

        experts = ("planner",)

        async def expert_action(self, expert: str | None = None) -> str:
            return self._plan[self._position]
    """

    @property
    def experts(self) -> tuple[str, ...]:
        """Names of the experts, the default first; empty for none."""
        ...

    async def expert_action(self, expert: str | None = None) -> str:
        """The action of the named expert (None: the default) in the current state."""
        ...


@runtime_checkable
class HasGivenTurns(Protocol):
    """Optional role of an environment: its episode may begin after turns of a known one.

    Example::

        state = await environment.start()
        turns = await environment.given_turns()   # the policy goes on after them
    """

    async def given_turns(self) -> Sequence[Transition]:
        """Take the given turns, once, directly after `start`; empty for an episode from its beginning."""
        ...


def find_given_turns(environment: object) -> HasGivenTurns | None:
    """The environment, or one inside its wrappers (`inner`), that may begin after given turns; else None."""
    while environment is not None and not isinstance(environment, HasGivenTurns):
        environment = getattr(environment, "inner", None)
    return environment


def find_world_sheet(environment: object) -> HasWorldSheet | None:
    """The environment, or one inside its wrappers (`inner`), that discloses its hidden facts; else None."""
    while environment is not None and not isinstance(environment, HasWorldSheet):
        environment = getattr(environment, "inner", None)
    return environment


def find_expert(environment: object) -> HasExpert | None:
    """The environment, or one inside its wrappers (`inner`), that has an expert; else None."""
    while environment is not None:
        if isinstance(environment, HasExpert) and environment.experts:
            return environment
        environment = getattr(environment, "inner", None)
    return None


class EnvironmentFactory(Protocol):
    """Makes the episodes of one environment, real or synthetic.

    Example::

        factory = dreamgym.make("alfworld")
        for task in await factory.tasks("valid_unseen", 10):
            environment = factory.make(task, seed=0)
    """

    @property
    def name(self) -> str: ...

    @property
    def splits(self) -> tuple[str, ...]: ...

    async def tasks(self, split: str, count: int | None = None, *, seed: int = 0) -> Sequence[Task]:
        """The first `count` tasks of a split in an order given by `seed`; None for all.

        Raises:
            ConfigError: the split is unknown, or has fewer than `count` tasks.
        """
        ...

    def make(self, task: Task, *, seed: int = 0) -> Environment:
        """A new episode. Episodes with the same task and seed start alike and respond alike."""
        ...

    async def aclose(self) -> None: ...


class Policy(Protocol):
    """Chooses actions. `history` holds the transitions of this episode so far, oldest first.

    Example::

        class FirstAdmissible:
            name = "first"

            async def act(self, task: Task, history: Sequence[Transition], state: State) -> Decision:
                return Decision(action=(state.admissible_actions or ("look",))[0])
    """

    @property
    def name(self) -> str: ...

    async def act(self, task: Task, history: Sequence[Transition], state: State) -> Decision: ...


class Embedder(Protocol):
    """Turns (state, action) into a key (the paper's φ)."""

    @property
    def identity(self) -> str:
        """Name, version and settings; embedders with the same identity return equal keys."""
        ...

    @property
    def dimension(self) -> int: ...

    async def embed(self, pairs: Sequence[tuple[str, str]]) -> Keys:
        """Keys of (state text, action) pairs, in order."""
        ...


class Retriever(Protocol):
    """Finds past transitions that resemble a (state, action).

    Example::

        wanted = RetrievalFilter(environment="alfworld", exclude_task=task.id)
        [demonstrations] = await retriever.search([(state.text, action)], k=4, filters=[wanted])
    """

    async def search(
        self, queries: Sequence[tuple[str, str]], *, k: int, filters: Sequence[RetrievalFilter]
    ) -> list[list[Demonstration]]:
        """For each (state text, action) at most `k` demonstrations, most similar first.

        `filters` has one entry per query and is applied before the k are chosen.
        """
        ...


class ExperienceModel(Protocol):
    """Predicts the environment's response by reasoning (the paper's M_exp).

    `sheet` holds the facts before the action; the prediction holds them after it. The same arguments always
    give the same prediction, so members of a rollout group differ only by their actions.

    Example::

        prediction = await model.predict(task, sheet, history, state, "open fridge 1")
        prediction.outcome.next_state.text, prediction.sheet
    """

    @property
    def name(self) -> str: ...

    async def imagine_start(self, task: Task, sheet: WorldSheet) -> State: ...

    async def predict(
        self, task: Task, sheet: WorldSheet, history: Sequence[Transition], state: State, action: str
    ) -> Prediction: ...


class Grader(Protocol):
    """Assigns the reward of an imagined action. Frozen: training of the policy never updates it.

    Example::

        class GoalCheck:
            async def verdict(self, task, sheet, transition, *, claimed):
                done = goal_met(task, sheet)
                return Verdict(reward=float(done), success=done, source="sheet")
    """

    async def verdict(
        self, task: Task, sheet: WorldSheet, transition: Transition, *, claimed: bool
    ) -> Verdict:
        """`sheet` holds the facts after the action; `claimed`: the experience model claims success."""
        ...


class Annotator(Protocol):
    """Explains recorded transitions, as targets for fine-tuning an experience model.

    It sees how the episode ended; the experience model sees only its notes.

    Example::

        async def annotate(self, trajectory: Trajectory) -> Annotation:
            notes = [Note(reasoning="The door opens.") for _ in trajectory.transitions]
            return Annotation(plan="", success_mode="", failure_mode="", notes=tuple(notes))
    """

    @property
    def name(self) -> str: ...

    async def annotate(self, trajectory: Trajectory) -> Annotation:
        """One note for each transition."""
        ...


class TaskSource(Protocol):
    """Selects the tasks of the next step and receives the results: a fixed list, or a curriculum.

    Its answers depend only on its settings and on the recorded groups, so a source restored from its
    `state_dict` continues identically.

    Example::

        tasks = await source.sample(16)
        groups = ...  # one rollout group for each task
        metrics = await source.record(groups)
    """

    async def sample(self, count: int) -> Sequence[Task]:
        """Tasks of the next step, repeats allowed; the same ones until `record` is called."""
        ...

    async def record(self, groups: Sequence[RolloutGroup]) -> Mapping[str, JsonValue]:
        """Record the results of these tasks; returns metrics."""
        ...

    def state_dict(self) -> dict[str, JsonValue]: ...

    def load_state_dict(self, stored: Mapping[str, JsonValue]) -> None: ...


class Learner(Protocol):
    """Updates the policy from rollout groups; returns metrics.

    Example::

        metrics = learner.update(groups)
        metrics["loss"], metrics["grad_norm"]
    """

    def update(self, groups: Sequence[RolloutGroup]) -> dict[str, Any]: ...
