"""The synthetic environment: an experience model behind the interface of a real environment."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

from dreamgym.envs.episode import Episode, select_tasks
from dreamgym.errors import ConfigError, EpisodeFailedError, UnknownSplitError
from dreamgym.protocols import ExperienceModel
from dreamgym.types import (
    Change,
    Fact,
    FailureKind,
    Outcome,
    Prediction,
    State,
    Task,
    Transition,
    WorldSheet,
)

UNREADABLE = "unreadable"
"""`reward_source` of an action that was refused because the experience model's reply did not parse."""

UNSUPPORTED = "unsupported"
"""`reward_source` of a prediction whose support score is below the bound."""


ListActions: TypeAlias = Callable[[Task, WorldSheet], Sequence[str]]
"""The actions that are admissible on the present facts."""


class SyntheticEnvironment(Episode):
    """One imagined episode. It has a world sheet (`HasWorldSheet`) and no expert.

    `Outcome.info` holds the ``demonstrations`` in the experience model's prompt, the ``change`` that it
    declared, whether the action was ``refused``, and the ``sheet`` before the action.
    """

    def __init__(
        self,
        task: Task,
        experience_model: ExperienceModel,
        sheet: WorldSheet,
        *,
        horizon: int,
        refusal_ends: bool = False,
        first: State | None = None,
        unreadable: str | None = None,
        turns: Sequence[Transition] = (),
        admissible_actions: ListActions | None = None,
    ) -> None:
        """
        Args:
            horizon: actions after which the episode is truncated.
            refusal_ends: a refused action ends the episode without success.
            first: the first state; by default the experience model imagines it.
            unreadable: the text with which an action is refused when the experience model's reply does not
                parse. By default such a reply is an `EpisodeFailedError`, which drops the rollout group; a
                policy early in training causes many of them.
            turns: of a known episode of the task; `given_turns` takes their actions.
            admissible_actions: lists the actions of each state; by default states list none.
        """
        super().__init__(task, horizon)
        self._model = experience_model
        self._first_sheet = self.sheet = sheet
        """`sheet` holds the current facts."""
        self._refusal_ends = refusal_ends
        self._first = first
        self._unreadable = unreadable
        self._turns = turns
        self._list_actions = admissible_actions
        self._history: list[Transition] = []
        self._doubtful = False
        """A step that an experience model marked as `UNSUPPORTED` was part of the episode."""
        self._refused: dict[tuple[frozenset[Fact], str], Prediction] = {}

    async def _start(self) -> State:
        first = self._first or await self._model.imagine_start(self.task, self._first_sheet)
        self._state = self._with_actions(first, self._first_sheet)
        return self._state

    def _with_actions(self, state: State, sheet: WorldSheet) -> State:
        if self._list_actions is None:
            return state
        return replace(state, admissible_actions=tuple(self._list_actions(self.task, sheet)))

    async def given_turns(self) -> list[Transition]:
        """Take the actions of the known turns. It stops before one that would end the episode, and before one
        that is refused here although it was not in the known episode."""
        self._require_running("given_turns")
        taken: list[Transition] = []
        for turn in self._turns:
            before = (self._state, self.sheet, self._doubtful)
            outcome = await self._step(turn.action)
            lost = outcome.info["refused"] and outcome.next_state.text != turn.outcome.next_state.text
            if outcome.over or lost or self._left <= 1:
                self._state, self.sheet, self._doubtful = before
                self._history.pop()
                break
            self._left -= 1
            taken.append(replace(self._history[-1], thought=turn.thought))
        self._turns = ()
        return taken

    async def _step(self, action: str) -> Outcome:
        prediction = await self._predict(self._state, action)
        outcome = prediction.outcome
        terminated = outcome.terminated or (prediction.refused and self._refusal_ends)
        if outcome.reward_source == UNSUPPORTED and not prediction.refused:
            self._doubtful = True
        if outcome.success and self._doubtful:  # a success counts only if every step to it is supported
            outcome = replace(outcome, success=False, reward=0.0, reward_source=UNSUPPORTED)
        outcome = replace(
            outcome,
            next_state=self._with_actions(outcome.next_state, prediction.sheet),
            terminated=terminated,
            truncated=not terminated and outcome.truncated,
            info={
                **outcome.info,
                "demonstrations": prediction.demonstrations,
                "refused": prediction.refused,
                "sheet": self.sheet,
                "change": _difference(self.sheet, prediction.sheet),
            },
        )
        self._history.append(Transition(state=self._state, action=action, outcome=outcome))
        self._state, self.sheet = outcome.next_state, prediction.sheet
        return outcome

    async def _predict(self, state: State, action: str) -> Prediction:
        # A refusal is cached while the facts are unchanged: otherwise a policy learns to repeat an action
        # until a model with some error rate accepts it.
        key = (frozenset(self.sheet.facts), action)
        known = self._refused.get(key)
        if known is not None:
            return replace(known, sheet=self.sheet)
        try:
            prediction = await self._model.predict(self.task, self.sheet, self._history, state, action)
        except EpisodeFailedError as error:
            if self._unreadable is None or error.kind is not FailureKind.PARSE_ERROR:
                raise
            refusal = State(text=self._unreadable)
            outcome = Outcome(next_state=refusal, reward=0.0, terminated=False, reward_source=UNREADABLE)
            prediction = Prediction(outcome=outcome, sheet=self.sheet, refused=True)
        if prediction.refused and self.sheet.facts:
            self._refused[key] = prediction
        return prediction

    async def world_sheet(self) -> WorldSheet:
        return self._first_sheet


def _difference(before: WorldSheet, after: WorldSheet) -> Change:
    if before is after:
        return Change()
    old, new = set(before.facts), set(after.facts)
    return Change(
        ended=tuple(fact for fact in before.facts if fact not in new),
        begun=tuple(fact for fact in after.facts if fact not in old),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeStart:
    """How an imagined episode starts."""

    sheet: WorldSheet
    state: State | None = None
    """The first state; None lets the experience model imagine it."""
    turns: tuple[Transition, ...] = ()
    """Of a known episode of the task: the episode begins after them, as far as the dream follows."""


StartFor: TypeAlias = Callable[[Task, int], EpisodeStart | None]
"""The start of a task's episodes with a seed; None for an unknown task. Members of a rollout group share the
seed, so they share the start."""


class SyntheticFactory:
    """Makes imagined episodes: an `EnvironmentFactory` like that of a real environment.

    Example::

        factory = SyntheticFactory(model, tasks, RecordedStarts(trajectories), horizon=30)
        groups = await run_groups(factory, make_policy, tasks, name="dream")
    """

    def __init__(
        self,
        experience_model: ExperienceModel,
        tasks: Sequence[Task],
        start_for: StartFor,
        *,
        horizon: int = 50,
        refusal_ends: bool = False,
        unreadable: str | None = None,
        admissible_actions: ListActions | None = None,
    ) -> None:
        """The arguments of `SyntheticEnvironment`, for each of its episodes."""
        self.name = tasks[0].environment if tasks else "synthetic"
        self._model = experience_model
        self._tasks = tuple(tasks)
        self._start_for = start_for
        self._horizon = horizon
        self._refusal_ends = refusal_ends
        self._unreadable = unreadable
        self._list_actions = admissible_actions

    @property
    def splits(self) -> tuple[str, ...]:
        return tuple(sorted({task.split for task in self._tasks}))

    async def tasks(self, split: str, count: int | None = None, *, seed: int = 0) -> Sequence[Task]:
        found = [task for task in self._tasks if task.split == split]
        if not found:
            raise UnknownSplitError(split, self.splits, self.name)
        return select_tasks(found, split, count, seed)

    def make(self, task: Task, *, seed: int = 0) -> SyntheticEnvironment:
        start = self._start_for(task, seed)
        if start is None:
            raise ConfigError(f"no start is known for task {task.id!r}: it has no world sheet")
        return SyntheticEnvironment(
            task,
            self._model,
            start.sheet,
            horizon=self._horizon,
            refusal_ends=self._refusal_ends,
            first=start.state,
            unreadable=self._unreadable,
            turns=start.turns,
            admissible_actions=self._list_actions,
        )

    async def aclose(self) -> None:
        """Nothing to close: the caller owns the experience model."""
